"""Where a visit begins: what each role works with."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.web.console import CONSOLE, PREFIX
from stencilpress.web.nav import menu
from stencilpress.web.page import page, redirect
from stencilpress.web.visitor import visitor_of


async def to_console(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=303, headers={"Location": f"{PREFIX}/"})


@page(Permission.READ)
async def home(request: web.Request) -> web.StreamResponse:
    """The first page of the menu, or one's own account."""
    groups = menu(visitor_of(request), "", None, request.app[CONSOLE].paths)
    pages = [item.href for group in groups for item in group.items if item.href != f"{PREFIX}/"]
    return redirect(request, pages[0] if pages else f"{PREFIX}/account")


ROUTES = (web.get("/", to_console), web.get(PREFIX, to_console), web.get(f"{PREFIX}/", home))
