"""``/console/api/…``: the operations of the admin API for scripts of our pages, with a session in place of a key."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.api.admin.dispatch import handler_of
from stencilpress.gateway.api.admin.operation import Operation
from stencilpress.gateway.api.admin.router import OPERATIONS
from stencilpress.web.ask import ask_by_session
from stencilpress.web.console import API_PREFIX


def _route(one: Operation) -> web.RouteDef:
    plain = {"allow_head": False} if one.method == "GET" else {}  # as the admin API: streams have no head alone
    return web.route(one.method, API_PREFIX + one.path, handler_of(one, ask_by_session), **plain)


ROUTES = tuple(map(_route, OPERATIONS))
