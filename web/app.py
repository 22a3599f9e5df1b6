"""The console's routes. Only wiring: a page module is one name in :data:`PAGES`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined

from stencilpress.gateway.accounts.oidc import provider_of
from stencilpress.gateway.accounts.passwords import Passwords
from stencilpress.gateway.accounts.sessions import SessionRing
from stencilpress.gateway.services import SERVICES
from stencilpress.web import (
    account,
    adapters,
    alerts,
    audit,
    chat,
    chat_socket,
    console_api,
    dashboard,
    home,
    keys,
    live,
    members,
    memory,
    oidc,
    setup,
    signin,
    tenants,
    usage,
)
from stencilpress.web.answers import SharedAnswers
from stencilpress.web.console import CONSOLE, Console
from stencilpress.web.firing import mount_firing
from stencilpress.web.formats import FILTERS
from stencilpress.web.guard import guard
from stencilpress.web.headers import secure
from stencilpress.web.static import ROOT, packaged

PAGES = (
    home,
    signin,
    oidc,
    setup,
    account,
    chat,
    console_api,
    chat_socket,
    members,
    tenants,
    keys,
    adapters,
    usage,
    dashboard,
    live,
    memory,
    alerts,
    audit,
)
"""Modules with ``ROUTES``."""


def mount_console(app: web.Application) -> None:
    """Add the console to the gateway's application."""
    services, static = app[SERVICES], packaged()
    routes = [route for module in PAGES for route in module.ROUTES]
    settings = services.settings
    lasts, idle = timedelta(seconds=settings.session_limit_s), timedelta(seconds=settings.session_idle_s)
    app[CONSOLE] = Console(
        sessions=SessionRing(services.db, services.changes, lasts, idle),
        passwords=Passwords(),
        answers=SharedAnswers(),
        templates=templates(),
        static=static,
        provider=provider_of(settings),
        paths=frozenset(route.path for route in routes if route.method == "GET"),
    )
    app[chat_socket.SOCKETS] = Counter()
    mount_firing(app)
    app.middlewares.append(guard)
    app.on_response_prepare.append(secure)
    app.cleanup_ctx.append(_passwords_closed)
    app.router.add_routes(routes)
    app.router.add_get(f"{ROOT}/{{version}}/{{name:.+}}", static.serve)


def templates() -> Environment:
    """What a person typed is inert in all of them; a name that a page does not give is an error."""
    loader = PackageLoader("stencilpress.web", "templates")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= FILTERS
    return made


async def _passwords_closed(app: web.Application) -> AsyncIterator[None]:
    yield
    app[CONSOLE].passwords.close()
