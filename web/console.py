"""What the console's pages share, in one place and under one key."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from aiohttp import web
from jinja2 import Environment

from stencilpress.gateway.accounts.oidc import Provider
from stencilpress.gateway.accounts.passwords import Passwords
from stencilpress.gateway.accounts.sessions import SessionRing
from stencilpress.web.answers import SharedAnswers
from stencilpress.web.static import StaticFiles

PREFIX = "/console"
API_PREFIX = "/console/api"


def of_tenant(route: str, tenant: str) -> str:
    """The path of a route with ``{tenant}`` for one of them."""
    return route.replace("{tenant}", quote(tenant))


@dataclass(frozen=True, slots=True)
class Console:
    """Everything lives as long as the process. ``paths`` are the patterns of the routes that exist."""

    sessions: SessionRing
    passwords: Passwords
    answers: SharedAnswers
    templates: Environment
    static: StaticFiles
    paths: frozenset[str]
    provider: Provider | None
    """By which people may sign in, too."""


CONSOLE = web.AppKey("console", Console)
