"""Chat over the console's WebSocket: by the session, from our own pages alone, for as long as the session lasts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.users import disable_user
from tests.integration.console_harness import Browser, running_console, signed_in
from tests.integration.gateway_harness import Gateway

ASK = {"model": "pirate", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path) as running:
        yield running


async def connect(browser: Browser, origin: str | None = "") -> aiohttp.ClientWebSocketResponse:
    """From a page of ``origin``, by default our own; None is a client that does not say."""
    headers = {} if origin is None else {"Origin": origin or browser.gateway.url}
    socket = await browser.http.ws_connect(f"{browser.gateway.url}/console/chat/ws", headers=headers)
    browser.gateway.stack.push_async_callback(socket.close)
    return socket


async def ask(socket: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    """The events of one response."""
    await socket.send_str(json.dumps({"type": "response.create", "response": ASK}))
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("response.done", "error"):
        events.append(json.loads(await socket.receive_str(timeout=45)))
    return events


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.ADMIN])
async def test_a_signed_in_user_chats(gateway: Gateway, role: Role) -> None:
    browser = await signed_in(gateway, role)
    socket = await connect(browser)
    assert json.loads(await socket.receive_str())["type"] == "session.created"
    events = await ask(socket)
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "aba"
    assert events[-1]["response"]["model"] == "pirate@1"


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", None])
async def test_a_page_of_another_site_is_refused(gateway: Gateway, origin: str | None) -> None:
    browser = await signed_in(gateway, Role.ADMIN)
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await connect(browser, origin)
    assert refused.value.status == 403


async def test_whoever_may_not_call_is_refused(gateway: Gateway) -> None:
    for browser, status in ((Browser(gateway), 401), (await signed_in(gateway, Role.VIEWER), 403)):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await connect(browser)
        assert refused.value.status == status


async def test_an_ended_session_starts_no_more_responses(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.ADMIN)
    assert browser.user is not None
    socket = await connect(browser)
    await socket.receive_str()
    await disable_user(gateway.services.db, browser.user.public_id)
    await gateway.services.changes.poll()
    [error] = await ask(socket)
    assert error["error"]["code"] == "signed_out"
