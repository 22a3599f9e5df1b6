"""The console's pages, as an operator asks for them: cases of ``bench console`` beside those of the admin API."""

from __future__ import annotations

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
    "/console/t/{tenant}/usage?days=90",
    "/console/t/{tenant}/keys",
    "/console/t/{tenant}/members",
    "/console/t/{tenant}/settings",
    "/console/t/{tenant}/alerts",
    "/console/t/{tenant}/audit",
    "/console/account",
)


async def signed_in(gateway: Gateway) -> aiohttp.ClientSession:
    """A browser's cookies, of an operator."""
    user = await make_user(gateway.services.db, Role.OPERATOR, tenant="other")
    browser = Browser(gateway, user)
    await browser.sign_in(user.email, PASSWORD)
    return browser.http
