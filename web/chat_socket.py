"""``/console/chat/ws``: what ``/v1/chat/ws`` is, with the session in place of a key.

A browser sends cookies with an upgrade from any page, so the page must be ours.
"""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Permission, check_permission
from stencilpress.gateway.api.ws import serve_chat
from stencilpress.gateway.keys import Principal
from stencilpress.web.console import PREFIX
from stencilpress.web.csrf import check_origin
from stencilpress.web.visitor import caller_again


async def chat(request: web.Request) -> web.StreamResponse:
    """Raises :class:`ForgedRequestError`, :class:`SignedOutError`, :class:`PermissionDeniedError`."""
    check_origin(request, required=True)

    async def who() -> Principal:
        caller = await caller_again(request)
        check_permission(caller.role, Permission.CALL)
        return caller

    await who()
    return await serve_chat(request, who)


ROUTES = (web.get(f"{PREFIX}/chat/ws", chat, allow_head=False),)
