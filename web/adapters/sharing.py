"""What an operator decides about an adapter, who else may use it and whether it stays in memory; and its deletion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import adapters as operations
from stencilpress.gateway.api.admin.adapter_views import ShareView
from stencilpress.gateway.api.admin.operation import Operation
from stencilpress.gateway.errors import ApiError
from stencilpress.gateway.services import SERVICES
from stencilpress.web.adapters.frame import ADAPTER, adapter_path, find_adapter, show, shown_beside_form
from stencilpress.web.ask import ask
from stencilpress.web.forms import errors_of, read_form
from stencilpress.web.page import page, redirect, tenant_of
from stencilpress.web.visitor import may_of

KEEPING = {
    "pin": (operations.pin_adapter, "{} stays in the engines' memory."),
    "preload": (operations.preload_adapter, "{} is brought into the engines' memory now and whenever they start."),
    "release": (operations.unpin_adapter, "{} is neither pinned nor preloaded."),
}


@page(Permission.READ)
async def show_settings(request: web.Request) -> web.StreamResponse:
    return await _page(request)


@page(Permission.OPERATE)
async def share(request: web.Request) -> web.StreamResponse:
    guest = (await read_form(request)).get("guest", "").strip()
    try:
        await _ask(request, operations.share_adapter, guest=guest or "-")
    except ApiError as error:
        if error.status >= 500:
            raise
        return await _page(request, guest=guest, errors={"guest": _text(error)}, status=error.status)
    name = request.match_info["adapter"]
    return redirect(request, _here(request), f"{guest} may use {name} under its name.")


@page(Permission.OPERATE)
async def unshare(request: web.Request) -> web.StreamResponse:
    guest = request.match_info["guest"]
    await _ask(request, operations.unshare_adapter, guest=guest)
    return redirect(request, _here(request), f"Requests of {guest} get a 404 from now on.")


@page(Permission.OPERATE)
async def keep(request: web.Request) -> web.StreamResponse:
    """Pin or preload the adapter, or neither, as the field ``kept`` says."""
    operation, text = KEEPING.get((await read_form(request)).get("kept", ""), KEEPING["release"])
    try:
        await _ask(request, operation)
    except ApiError as error:
        return redirect(request, _here(request), shown_beside_form(error).message, "bad")
    return redirect(request, _here(request), text.format(request.match_info["adapter"]))


def _text(error: ApiError) -> str:
    return str(next(iter(errors_of(error).values())))


def _here(request: web.Request) -> str:
    return f"{adapter_path(request)}/settings"


async def _ask(request: web.Request, operation: Operation, **path: Any) -> Any:
    tenant, adapter = tenant_of(request).name, request.match_info["adapter"]
    return await ask(request, operation, tenant=tenant, adapter=adapter, **path)


async def _page(
    request: web.Request, *, guest: str = "", errors: Mapping[str, str] | None = None, status: int = 200
) -> web.StreamResponse:
    adapter = await find_adapter(request)
    shares: list[ShareView] = []
    if may_of(request).operate and adapter.deleted_at is None:
        shares = (await _ask(request, operations.list_shares)).data
    return show(
        request,
        "adapters/settings.html",
        adapter,
        "settings",
        status=status,
        shares=shares,
        guest=guest,
        errors=errors or {},
        grace_s=request.app[SERVICES].settings.purge_grace_s,
    )


ROUTES = (
    web.get(f"{ADAPTER}/settings", show_settings),
    web.post(f"{ADAPTER}/shares", share),
    web.post(f"{ADAPTER}/shares/{{guest}}/remove", unshare),
    web.post(f"{ADAPTER}/keep", keep),
)
