"""Where a visit begins."""

from __future__ import annotations

from aiohttp import web

from stencilpress.web.console import PREFIX


async def to_console(_request: web.Request) -> web.StreamResponse:
    return web.Response(status=303, headers={"Location": f"{PREFIX}/"})


ROUTES = (web.get("/", to_console), web.get(PREFIX, to_console))
