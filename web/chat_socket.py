"""``/console/chat/ws``: what ``/v1/chat/ws`` is, with the session in place of a key.

A browser sends cookies with an upgrade from any page, so the page must be ours.
"""

from __future__ import annotations

from collections import Counter

from aiohttp import web

from stencilpress.gateway.access import Permission, check_permission
from stencilpress.gateway.api.ws import serve_chat
from stencilpress.gateway.errors import OverloadedError
from stencilpress.gateway.keys import Principal
from stencilpress.web.console import PREFIX
from stencilpress.web.csrf import check_origin
from stencilpress.web.visitor import caller_again

MAX_SOCKETS = 20
"""Of one user, at one gateway: a page has one."""
SOCKETS = web.AppKey("chat_sockets", Counter[str])


async def chat(request: web.Request) -> web.StreamResponse:
    """Raises :class:`ForgedRequestError`, :class:`SignedOutError`, :class:`PermissionDeniedError`."""
    check_origin(request, required=True)

    async def who() -> Principal:
        caller = await caller_again(request)
        check_permission(caller.role, Permission.CALL)
        return caller

    user_id = (await who()).key_id
    open_by_user = request.app[SOCKETS]
    if open_by_user[user_id] >= MAX_SOCKETS:
        raise OverloadedError(f"{MAX_SOCKETS} chats are open already; close one first.")
    open_by_user[user_id] += 1
    try:
        return await serve_chat(request, who)
    finally:
        open_by_user[user_id] -= 1
        open_by_user += Counter()  # forgets those with none


ROUTES = (web.get(f"{PREFIX}/chat/ws", chat, allow_head=False),)
