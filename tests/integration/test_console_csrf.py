"""Every change below /console comes from a page of ours: a walk over all routes there are."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.web.csrf import SAFE
from tests.integration.console_harness import Answer, Browser, running_console, signed_in
from tests.integration.gateway_harness import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARTS = {"tenant": "demo", "adapter": "pirate", "version": "1", "alias": "prod"}
"""Parts of paths that exist; for all others any text does."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def operator(shared: Gateway) -> Browser:
    return await signed_in(shared, Role.OPERATOR)


def unsafe_routes(gateway: Gateway) -> list[tuple[str, str]]:
    """Method and path of everything that may change something."""
    found = [
        (route.method, re.sub(r"\{(\w+)[^}]*\}", lambda part: PARTS.get(part[1], "x"), route.resource.canonical))
        for route in gateway.routes
        if route.resource is not None and route.resource.canonical.startswith("/console") and route.method not in SAFE
    ]
    assert len(found) > 50
    return found


async def changes(gateway: Gateway) -> int:
    return (await list_audit(gateway.services.db, limit=1))[0].id


def is_refused(answer: Answer) -> bool:
    return answer.status == 403 and ("csrf" in answer.text or "The page was too old" in answer.words)


async def test_nothing_changes_without_the_token(shared: Gateway, operator: Browser) -> None:
    before, other = await changes(shared), await (await signed_in(shared, Role.OPERATOR)).csrf()
    before = await changes(shared)
    for method, path in unsafe_routes(shared):
        for headers, fields in (
            ({}, {}),
            ({"x-csrf-token": ""}, {}),
            ({"x-csrf-token": other}, {}),
            ({"x-csrf-token": "\u00fc"}, {}),
            ({}, {"csrf": other}),
            ({"Content-Type": "text/plain"}, {"csrf": await operator.csrf()}),
        ):
            answer = await operator.request(method, path, data=fields, headers=headers)
            assert is_refused(answer), (method, path, headers, fields, answer.status)
    assert await changes(shared) == before


async def test_a_page_of_another_site_changes_nothing_even_with_the_token(shared: Gateway, operator: Browser) -> None:
    token, before = await operator.csrf(), await changes(shared)
    port = shared.url.rpartition(":")[2]
    for headers in (
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{int(port) + 1}"},
        {"Origin": f"http://elsewhere.example/{shared.url}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        for method, path in unsafe_routes(shared):
            answer = await operator.request(method, path, headers={**headers, "x-csrf-token": token})
            assert is_refused(answer), (method, path, headers)
    assert await changes(shared) == before


async def test_nobody_changes_anything_without_a_session(shared: Gateway) -> None:
    nobody = Browser(shared)
    token, before = await nobody.csrf(), await changes(shared)
    for method, path in unsafe_routes(shared):
        for headers in ({}, {"x-csrf-token": token}):
            answer = await nobody.request(method, path, headers=headers)
            signed_out = answer.status == 303 and answer.location.startswith("/console/sign-in")
            assert signed_out or answer.status in (401, 403, 404, 415), (method, path, answer.status)
    assert await changes(shared) == before


async def test_the_token_is_of_one_session_alone(shared: Gateway) -> None:
    browser = Browser(shared)
    before = await browser.csrf()
    assert await browser.csrf() == before, "a page may stay open"
    other = await signed_in(shared, Role.ADMIN)
    assert other.user is not None
    mine = await other.csrf()
    await other.submit("/console/sign-out")
    await other.sign_in(other.user.email)
    assert len({before, mine, await other.csrf()}) == 3
