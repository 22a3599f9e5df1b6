"""Signing in and out of the console, what a session is worth, and who is kept out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stencilpress.gateway.access import Role
from tests.integration.console_harness import Browser, make_user, running_console, signed_in
from tests.integration.gateway_harness import Gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path) as running:
        yield running


async def test_a_visit_from_the_first_page_to_signing_out(gateway: Gateway) -> None:
    user = await make_user(gateway.services.db, Role.ADMIN)
    browser = Browser(gateway)
    assert (await browser.get("/", status=303)).location == "/console/"
    assert (await browser.get("/console/account", status=303)).location == "/console/sign-in?next=%2Fconsole%2Faccount"
    answer = await browser.sign_in(user.email.upper(), back="/console/account")
    assert answer.location == "/console/account"
    page = await browser.get("/console/account")
    assert user.email in page.words
    await browser.submit("/console/sign-out")
    assert (await browser.get("/console/account", status=303)).location.startswith("/console/sign-in")


async def test_the_operations_of_the_admin_api_answer_to_a_session(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.ADMIN)
    assert browser.user is not None
    me = await browser.api("GET", "/me")
    assert (me["tenant"], me["role"]) == ("demo", "admin")
    made = await browser.api("POST", "/tenants/demo/keys", {"label": "ci"}, status=201)
    assert made["token"].startswith("sp_")
    [entry] = (await browser.api("GET", f"/tenants/demo/audit?target=key:{made['id']}"))["data"]
    assert entry["actor"] == f"user:{browser.user.email}"
