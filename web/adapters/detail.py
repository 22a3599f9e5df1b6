"""An adapter's first page: its versions, and taking the whole of it out of use and back."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import adapters as operations
from stencilpress.gateway.api.admin.adapter_views import AdapterView, SmokeSuiteView
from stencilpress.gateway.api.admin.aliases import get_smoke_prompts
from stencilpress.gateway.api.admin.series_views import UsageTotals
from stencilpress.gateway.catalog.audit import actors_of
from stencilpress.gateway.catalog.lifecycle import last_runs
from stencilpress.gateway.errors import ApiError
from stencilpress.gateway.services import SERVICES
from stencilpress.web.adapters.figures import STEPS, places_of, series_of, used_versions
from stencilpress.web.adapters.frame import ADAPTER, adapter_path, find_adapter, home_of, live, show, shown_beside_form
from stencilpress.web.ask import ask
from stencilpress.web.page import page, redirect, tenant_of

VERSIONS_SHOWN = 50


@page(Permission.READ)
async def show_adapter(request: web.Request) -> web.StreamResponse:
    """``?deleted=1`` shows deleted versions as well; ``?before=`` those below a number."""
    return await _page(request, await find_adapter(request))


@page(Permission.WRITE)
async def delete_adapter(request: web.Request) -> web.StreamResponse:
    tenant, name = tenant_of(request).name, request.match_info["adapter"]
    await ask(request, operations.delete_adapter, tenant=tenant, adapter=name)
    return redirect(
        request,
        f"{home_of(tenant)}/adapters?deleted=1",
        f"{name} is out of use. It can be restored until it is purged.",
    )


@page(Permission.WRITE)
async def restore_adapter(request: web.Request) -> web.StreamResponse:
    tenant, name = tenant_of(request).name, request.match_info["adapter"]
    try:
        await ask(request, operations.restore_adapter, tenant=tenant, adapter=name)
    except ApiError as error:
        return redirect(request, adapter_path(request), shown_beside_form(error).message, "bad")
    return redirect(request, adapter_path(request), f"{name} is back in use, as it was.")


async def _page(request: web.Request, adapter: AdapterView) -> web.StreamResponse:
    with_deleted = request.query.get("deleted") == "1"
    shown = list(reversed(adapter.versions)) if with_deleted or adapter.deleted_at is not None else live(adapter)
    before = _number(request.query.get("before", ""))
    rest = [one for one in shown if before is None or one.number < before]
    versions, older = rest[:VERSIONS_SHOWN], rest[VERSIONS_SHOWN:]
    db, tenant = request.app[SERVICES].db, tenant_of(request)
    suite: SmokeSuiteView | None = None
    totals: UsageTotals | None = None
    if adapter.deleted_at is None:
        suite = await ask(request, get_smoke_prompts, tenant=tenant.name, adapter=adapter.name)
        totals = (await series_of(request, adapter.name, points=STEPS)).total
    targets = {f"version:{one.version}": one.number for one in versions}
    return show(
        request,
        "adapters/versions.html",
        adapter,
        "versions",
        versions=versions,
        older=versions[-1].number if older else None,
        with_deleted=with_deleted,
        has_deleted=any(one.deleted_at is not None for one in adapter.versions),
        added_by=await actors_of(db, tenant.id, "version.add", list(targets)),
        runs=await last_runs(db, tenant.id, adapter.name),
        revision=None if suite is None else suite.revision,
        totals=totals,
        activity=await used_versions(request, adapter.name, [one.number for one in versions]),
        seen=await places_of(request, [one.digest for one in versions]),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


ROUTES = (
    web.get(ADAPTER, show_adapter),
    web.post(f"{ADAPTER}/delete", delete_adapter),
    web.post(f"{ADAPTER}/restore", restore_adapter),
)
