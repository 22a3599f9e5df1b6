"""The console's pages, as an operator asks for them: cases of ``bench console`` beside those of the admin API."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

import aiohttp

from stencilpress.gateway.access import Role
from tests.integration.console_harness import PASSWORD, Browser, make_user
from tests.integration.gateway_harness import Gateway

PATHS = (
    "/console/",
    "/console/?range=24h&compare=1",
    "/console/?range=30d",
    "/console/?range=24h&by=ttft_p99",
    "/console/tenants",
    "/console/adapters",
    "/console/memory",
    "/console/alerts",
    "/console/audit",
    "/console/t/{tenant}/",
    "/console/t/{tenant}/?range=24h&compare=1",
    "/console/t/{tenant}/?range=30d",
    "/console/t/{tenant}/?range=7d&adapter={adapter}",
    "/console/t/{tenant}/chat",
    "/console/t/{tenant}/adapters",
    "/console/t/{tenant}/adapters/{adapter}",
    "/console/t/{tenant}/adapters/{adapter}/versions/1",
    "/console/t/{tenant}/usage?range=90d",
    "/console/t/{tenant}/keys",
    "/console/t/{tenant}/members",
    "/console/t/{tenant}/settings",
    "/console/t/{tenant}/alerts",
    "/console/t/{tenant}/audit",
    "/console/account",
)


FIRST_VISITS = {
    "/console/?format=engines first visitor, 1 day": ("/console/?format=engines", timedelta(days=1)),
    "/console/?format=top first visitor, 30 days": ("/console/?format=top", timedelta(days=30)),
    "/console/?format=engines first visitor, 30 days": ("/console/?format=engines", timedelta(days=30)),
    "/console/ first visitor, 1 hour": ("/console/", timedelta(hours=1)),
    "/console/ first visitor, 1 day": ("/console/", timedelta(days=1)),
    "/console/ first visitor, 30 days": ("/console/", timedelta(days=30)),
    "/console/t/{tenant}/ first visitor, 1 day": ("/console/t/{tenant}/", timedelta(days=1)),
    "/console/t/{tenant}/ first visitor, 30 days": ("/console/t/{tenant}/", timedelta(days=30)),
}
"""Dashboards whose answer nobody else has asked for in this moment."""


def paths() -> dict[str, Callable[[int], str]]:
    """What a round of each case asks for, by the number of the round."""
    now = datetime.now(UTC)

    def fresh(path: str, length: timedelta) -> Callable[[int], str]:
        def of(number: int) -> str:
            end = now - timedelta(seconds=number)
            span = urlencode({"start": (end - length).isoformat(), "end": end.isoformat()})
            return f"{path}{'&' if '?' in path else '?'}{span}"

        return of

    def same(path: str) -> Callable[[int], str]:
        return lambda _: path

    return {path: same(path) for path in PATHS} | {name: fresh(*visit) for name, visit in FIRST_VISITS.items()}


async def signed_in(gateway: Gateway) -> aiohttp.ClientSession:
    """A browser's cookies, of an operator."""
    user = await make_user(gateway.services.db, Role.OPERATOR, tenant="other")
    browser = Browser(gateway, user)
    await browser.sign_in(user.email, PASSWORD)
    return browser.http
