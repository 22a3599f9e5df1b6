"""The log of changes: who did what to what, when and from where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import audit
from stencilpress.gateway.api.admin.operation import Operation, Page
from stencilpress.gateway.api.admin.views import AuditView
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX, of_tenant
from stencilpress.web.page import page, render, tenant_of

ALL = f"{PREFIX}/audit"
OF_TENANT = f"{PREFIX}/t/{{tenant}}/audit"
FILTERS = ("target", "actor", "action")
ENTRIES = 50
NOTHING = "none"


class Difference(msgspec.Struct, frozen=True):
    """One field of a change; None where it was not there."""

    field: str
    before: str | None
    after: str | None


@page(Permission.OPERATE)
async def show_all(request: web.Request) -> web.StreamResponse:
    return await _show(request, audit.list_audit, None)


@page(Permission.READ)
async def show_of_tenant(request: web.Request) -> web.StreamResponse:
    return await _show(request, audit.list_tenant_audit, tenant_of(request).name)


def differences(one: AuditView) -> list[Difference]:
    """What a change did, field by field; nested fields have their path: ``canary.percent``.

    A field that is null is as good as none: what is made begins with many of them.
    """
    before, after = _flat(one.before), _flat(one.after)
    pairs = [(name, before.get(name), after.get(name)) for name in {**before, **after}]
    return [
        Difference(name, old, new)
        for name, old, new in pairs
        if old != new and {old or NOTHING, new or NOTHING} != {NOTHING}
    ]


async def _show(request: web.Request, operation: Operation, tenant: str | None) -> web.Response:
    wanted = {name: request.query[name].strip() for name in FILTERS if request.query.get(name, "").strip()}
    query: dict[str, Any] = {**wanted, "after": request.query.get("after", ""), "limit": ENTRIES}
    found: Page[AuditView] = await ask(request, operation, tenant=tenant, query=query)
    at = ALL if tenant is None else of_tenant(OF_TENANT, tenant)
    return render(
        request,
        "audit.html",
        title="Audit log",
        section="audit",
        tenant=tenant,
        at=at,
        entries=[(one, differences(one)) for one in found.data],
        wanted={name: wanted.get(name, "") for name in FILTERS},
        filtered=bool(wanted),
        narrowed=lambda name, value: f"{at}?{urlencode({**wanted, name: value})}",
        next=None if found.next is None else f"{at}?{urlencode({**wanted, 'after': found.next})}",
    )


def _flat(state: Mapping[str, Any] | None, path: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in (state or {}).items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[path + name] = _words(value)
    return flat


def _words(value: Any) -> str:
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


ROUTES = (web.get(ALL, show_all), web.get(OF_TENANT, show_of_tenant))
