"""Tenants: the list of all, one's plan beside what it uses, and its state."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import urlencode
from zoneinfo import available_timezones

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import tenants
from stencilpress.gateway.api.admin.operation import Operation, Page
from stencilpress.gateway.api.admin.views import LimitChanges, NewTenant, QuotaView, TenantView
from stencilpress.gateway.catalog.limits import TARGET_MODULES
from stencilpress.gateway.errors import ApiError, NotFoundError, UnavailableError
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX, of_tenant
from stencilpress.web.forms import Shown, errors_of, read_form, shown_again, to_struct
from stencilpress.web.page import page, redirect, render, tenant_of

LIST = f"{PREFIX}/tenants"
SETTINGS = f"{PREFIX}/t/{{tenant}}/settings"
QUOTA_LABELS = {
    "requests_per_minute": "Requests a minute",
    "tokens_per_minute": "Tokens a minute",
    "concurrent_streams": "Requests at once",
    "tokens_per_day": "Tokens today",
    "tokens_per_month": "Tokens this month",
}


@page(Permission.OPERATE)
async def list_tenants(request: web.Request) -> web.StreamResponse:
    return await _list(request)


@page(Permission.OPERATE)
async def create_tenant(request: web.Request) -> web.StreamResponse:
    form = await read_form(request)
    try:
        made: TenantView = await ask(request, tenants.create_tenant, body=to_struct(form, NewTenant))
    except ApiError as error:
        return await _list(request, error, shown_again(form))
    return redirect(request, settings_of(made.name), f"{made.name} has been added.")


@page(Permission.READ, deleted=True)
async def show_settings(request: web.Request) -> web.StreamResponse:
    return await _settings(request)


@page(Permission.OPERATE)
async def change_plan(request: web.Request) -> web.StreamResponse:
    form, name = await read_form(request), tenant_of(request).name
    modules = [module for module in TARGET_MODULES if module in form.getall("target_modules", [])]
    allowed = None if len(modules) == len(TARGET_MODULES) else modules
    try:
        changes = to_struct(form, LimitChanges, target_modules=allowed)
        await ask(request, tenants.change_tenant, tenant=name, body=changes)
    except ApiError as error:
        return await _settings(request, error, Shown(shown_again(form), target_modules=modules))
    return redirect(request, settings_of(name), "The plan has been saved; new requests follow within a second.")


def settings_of(tenant: str) -> str:
    return of_tenant(SETTINGS, tenant)


async def _list(request: web.Request, error: ApiError | None = None, form: Shown | None = None) -> web.Response:
    query = {name: request.query[name] for name in ("prefix", "after", "deleted") if request.query.get(name)}
    found: Page[TenantView] = await ask(request, tenants.list_tenants, query=query)
    more = None if found.next is None else "?" + urlencode({**query, "after": found.next})
    return render(
        request,
        "tenants/list.html",
        title="Tenants",
        section="tenants",
        status=200 if error is None else error.status,
        tenants=found.data,
        next=more,
        prefix=query.get("prefix", ""),
        deleted="deleted" in query,
        form=form or Shown(),
        errors=errors_of(error),
    )


async def _settings(request: web.Request, error: ApiError | None = None, form: Shown | None = None) -> web.Response:
    tenant = tenant_of(request)
    plan = TenantView.of(tenant)
    held = Shown({name: getattr(plan, name) for name in LimitChanges.__struct_fields__})
    return render(
        request,
        "tenants/settings.html",
        title=tenant.name,
        section="settings",
        tenant=tenant.name,
        status=200 if error is None else error.status,
        plan=plan,
        form=form or held,
        errors=errors_of(error),
        modules=TARGET_MODULES,
        zones=_time_zones(),
        **await _use(request, tenant.name),
    )


@functools.cache
def _time_zones() -> list[str]:
    """It looks through the system's files."""
    return sorted(available_timezones())


async def _use(request: web.Request, tenant: str) -> dict[str, Any]:
    """What the tenant uses; an outage of the quota store does not take the page away. A deleted one uses nothing."""
    try:
        use: QuotaView = await ask(request, tenants.get_quota, tenant=tenant)
    except (UnavailableError, NotFoundError):
        return {"quota": None, "use": None}
    return {"quota": [(label, getattr(use, name)) for name, label in QUOTA_LABELS.items()], "use": use}


def _state_change(operation: Operation, told: str) -> web.RouteDef:
    """A button that is one operation on the tenant."""

    @page(Permission.OPERATE)
    async def change(request: web.Request) -> web.StreamResponse:
        name = tenant_of(request).name
        await ask(request, operation, tenant=name)
        return redirect(request, settings_of(name), told.format(name))

    verb = operation.id.partition("_")[0]
    return web.post(f"{PREFIX}/t/{{tenant}}/{verb}", change)


ROUTES = (
    web.get(LIST, list_tenants),
    web.post(LIST, create_tenant),
    web.get(SETTINGS, show_settings),
    web.post(SETTINGS, change_plan),
    _state_change(tenants.disable_tenant, "{} is disabled: its keys and uploads are refused."),
    _state_change(tenants.enable_tenant, "{} is enabled again."),
    _state_change(tenants.delete_tenant, "{} has been deleted. It can be restored here."),
    _state_change(tenants.restore_tenant, "{} is back as it was."),
)
