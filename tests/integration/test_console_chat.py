"""The chat's page: who gets a composer, what its script is told, and the ranges of its inputs."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.lifecycle import share_adapter
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.names import BaseNames
from tests.integration.console_harness import running_console, signed_in
from tests.integration.gateway_harness import BASE_ID, BASE_NAMES, Gateway, new_version

CHAT = "/console/t/demo/chat"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path) as running:
        yield running


def data_of(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="chat-data">(.*?)</script>', text, re.DOTALL)
    assert found, text[:2000]
    return json.loads(found[1])


async def test_an_admin_gets_the_composer_and_what_its_script_needs(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.ADMIN)
    assert browser.user is not None
    page = await browser.get(CHAT)
    assert data_of(page.text) == {
        "tenant": "demo",
        "user": browser.user.public_id,
        "socket": "/console/chat/ws",
        "base": BASE_ID,
        "shared": [],
    }
    assert 'id="chat-composer"' in page.text
    scripts = re.findall(r"<script[^>]*src=\"([^\"]+/chat/main\.js)\"", page.text)
    assert len(scripts) == 1
    for name in ("main", "socket", "markdown", "store"):
        await browser.get(scripts[0].replace("/main.js", f"/{name}.js"))
    await browser.get(scripts[0].replace("chat/main.js", "vendor/dompurify/purify.es.mjs"))


async def test_what_the_policy_forbids_is_not_in_the_page(gateway: Gateway) -> None:
    page = await (await signed_in(gateway, Role.ADMIN)).get(CHAT)
    assert not re.search(r"<[^>]+\s(style|on\w+)=", page.text)
    assert not re.search(r"<script(?![^>]*(src=|application/json))", page.text)


async def test_inputs_have_the_ranges_of_the_api(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.ADMIN)
    text = (await browser.get(CHAT)).text
    edges: dict[str, tuple[float, float]] = {}
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        found = re.search(rf'name="{name}".*?data-least="([^"]+)" data-most="([^"]+)"', text, re.DOTALL)
        assert found, name
        edges[name] = (float(found[1]), float(found[2]))
    for name, (least, most) in edges.items():
        for value, status in ((least, 200), (most, 200), (least - 0.01, 400), (most + 0.01, 400)):
            body = {"model": "base", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 1, name: value}
            answered, answer = await gateway.post("/v1/chat/completions", body)
            assert answered == status, (name, value, answer)


async def test_a_viewer_is_told_why_there_is_no_composer(gateway: Gateway) -> None:
    page = await (await signed_in(gateway, Role.VIEWER)).get(CHAT)
    assert "Your role is viewer" in page.words
    assert "chat-composer" not in page.text
    assert "/chat/main.js" not in page.text


async def test_an_operator_chats_as_the_tenant_it_belongs_to(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.OPERATOR)
    assert 'id="chat-composer"' in (await browser.get(CHAT)).text
    other = await browser.get("/console/t/other/chat")
    assert "Chat runs as your own tenant" in other.words
    assert 'href="/console/t/demo/chat"' in other.text
    assert "chat-composer" not in other.text


async def test_a_foreign_tenant_is_one_that_does_not_exist(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.ADMIN)
    foreign = await browser.get("/console/t/other/chat", status=404)
    missing = await browser.get("/console/t/nobody/chat", status=404)
    assert foreign.words == missing.words
    await browser.get("/console/t/%3Cimg%20src=x%20onerror=alert(1)%3E/chat", status=404)


async def test_adapters_that_are_shared_with_the_tenant_can_be_chosen(gateway: Gateway) -> None:
    db = gateway.services.db
    owner = await get_tenant(db, "other")
    await add_version(db, owner.id, "lent", new_version("c"), BaseNames.of(BASE_NAMES))
    await share_adapter(db, owner.id, "lent", "demo")
    page = await (await signed_in(gateway, Role.ADMIN)).get(CHAT)
    assert data_of(page.text)["shared"] == ["lent"]
