"""The map of an engine's pool. The page is a frame; its script asks for the pages themselves."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import engines
from stencilpress.gateway.api.admin.engine_views import EnginesView
from stencilpress.gateway.errors import NotFoundError
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX
from stencilpress.web.page import page, render


@page(Permission.OPERATE)
async def show_memory(request: web.Request) -> web.StreamResponse:
    found: EnginesView = await ask(request, engines.list_engines)
    wanted = request.query.get("engine", "1")
    chosen = next((one for one in found.data if str(one.engine) == wanted), None)
    if chosen is None:
        raise NotFoundError(f"engine: {wanted[:16]!r} does not exist", param="engine")
    return render(
        request,
        "memory.html",
        title="Memory",
        section="memory",
        engines=found.data,
        engine=chosen.engine,
    )


ROUTES = (web.get(f"{PREFIX}/memory", show_memory),)
