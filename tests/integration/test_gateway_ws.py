"""Chat over a WebSocket: the same texts as over SSE, several responses at once, cancelling, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stencilpress.gateway.api import ws as ws_module
from stencilpress.gateway.catalog.credentials import revoke_key
from tests.fakes.engine import Options
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway

PACED = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=100_000, step_delay_s=0.002)
TEXT = "héllo 👩‍👩‍👧‍👦 中文\u2028"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, PACED, max_body_bytes=64 << 10) as running:
        yield running


class Client:
    """A plain WebSocket client that speaks JSON."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def send(self, **event: Any) -> None:
        await self.socket.send_str(json.dumps(event))

    async def ask(self, text: str = TEXT, *, event_id: str | None = None, **fields: Any) -> None:
        body = {"model": "pirate", "messages": [{"role": "user", "content": text}], **fields}
        await self.send(type="response.create", event_id=event_id, response=body)

    async def next(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await self.socket.receive_str(timeout=45))
        return event

    async def until(self, kind: str) -> list[dict[str, Any]]:
        events = [await self.next()]
        while events[-1]["type"] != kind:
            events.append(await self.next())
        return events


async def connect(gateway: Gateway, **headers: str) -> Client:
    socket = await gateway.http.ws_connect(f"{gateway.url}/v1/chat/ws", headers=headers)
    gateway.stack.push_async_callback(socket.close)
    return Client(socket)


async def authenticated(gateway: Gateway) -> Client:
    client = await connect(gateway, Authorization=f"Bearer {gateway.key}")
    assert (await client.next())["type"] == "session.created"
    return client


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(45):
        while not holds():  # noqa: ASYNC110 - what is awaited happens in another thread
            await asyncio.sleep(0.005)


def text_of(events: list[dict[str, Any]], response_id: str, index: int = 0) -> str:
    mine = [e for e in events if e.get("response_id") == response_id and e["output_index"] == index]
    return "".join(e["delta"] for e in mine if e["type"] == "response.output_text.delta")


async def test_a_response_from_created_to_done(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    await client.ask(max_tokens=60, metadata={"turn": "1"})
    events = await client.until("response.done")
    created, *_, text_done, done = events
    identity = created["response"]["id"]
    assert created["response"] == {
        "id": identity,
        "object": "realtime.response",
        "status": "in_progress",
        "model": "pirate@1",
        "metadata": {"turn": "1"},
    }
    body = {"model": "pirate", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 60}
    _, plain = await gateway.post("/v1/chat/completions", body)
    assert text_of(events, identity) == plain["choices"][0]["message"]["content"] == text_done["text"]
    assert (text_done["type"], text_done["finish_reason"]) == ("response.output_text.done", "length")
    assert done["response"]["status"] == "incomplete"
    assert done["response"]["usage"] == plain["usage"]


async def test_stop_strings_and_logprobs_are_those_of_sse(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    await client.ask("ABCDEFGHIJKLM", stop=["DEFGHIJ"], max_tokens=26, logprobs=True, top_logprobs=1)
    events = await client.until("response.done")
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "ABC"
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == ["A", "B", "C"]
    assert events[-1]["response"]["status"] == "completed"
    assert events[-2]["finish_reason"] == "stop"


async def test_the_key_may_come_as_the_first_event(gateway: Gateway) -> None:
    client = await connect(gateway, Origin="https://elsewhere.example")
    await client.send(type="session.authenticate", api_key=gateway.key)
    session = await client.next()
    assert session["type"] == "session.created"
    assert session["session"]["object"] == "chat.session"
    await client.ask("ab", max_tokens=3)
    events = await client.until("response.done")
    assert text_of(events, events[0]["response"]["id"]) == "aba"


@pytest.mark.parametrize(
    "first",
    [
        {"type": "session.authenticate", "api_key": "sp_wrong"},
        {"type": "response.create", "response": {"model": "base", "messages": []}},
        {"type": "nonsense"},
    ],
)
async def test_without_a_key_the_connection_ends(gateway: Gateway, first: dict[str, Any]) -> None:
    client = await connect(gateway, Cookie="session=stolen")
    await client.send(**first)
    error = await client.next()
    assert error["type"] == "error"
    assert error["error"]["code"] in ("invalid_api_key", "invalid_event")
    assert (await client.socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING)
    assert client.socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
    assert gateway.engine.submits == []


async def test_a_silent_connection_ends(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ws_module, "AUTHENTICATE_LIMIT_S", 0.05)
    client = await connect(gateway)
    assert (await client.next())["error"]["code"] == "invalid_api_key"
    assert (await client.socket.receive()).type is aiohttp.WSMsgType.CLOSE


async def test_a_wrong_header_is_refused_before_the_upgrade(gateway: Gateway) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await connect(gateway, Authorization="Bearer sp_wrong")
    assert refused.value.status == 401


async def test_responses_run_beside_each_other(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    for turn in range(5):
        await client.ask(f"{turn}abc", max_tokens=40, n=2, metadata={"turn": str(turn)})
    events: list[dict[str, Any]] = []
    for _ in range(5):
        events += await client.until("response.done")
    created = {
        e["response"]["id"]: e["response"]["metadata"]["turn"] for e in events if e["type"] == "response.created"
    }
    assert sorted(created.values()) == list("01234")
    for response_id, turn in created.items():
        for index in range(2):
            assert text_of(events, response_id, index) == f"{turn}abc" * 10
    order = [event["response_id"] for event in events if event["type"] == "response.output_text.delta"]
    assert order != sorted(order, key=order.index)  # they took turns


async def test_a_cancelled_response_stops_and_is_accounted_for(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    await client.ask("ab", max_tokens=50_000)
    created = (await client.next())["response"]
    await client.next()
    await client.send(type="response.cancel", response_id=created["id"])
    done = (await client.until("response.done"))[-1]["response"]
    assert done["status"] == "cancelled"
    assert 0 < done["usage"]["completion_tokens"] < 50_000
    assert len(gateway.engine.aborts) == 1
    await client.send(type="response.cancel", response_id=created["id"], event_id="late")
    assert (await client.next())["error"] == {
        "message": "No such response is in progress.",
        "type": "invalid_request_error",
        "param": "response_id",
        "code": "not_found",
        "event_id": "late",
    }


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "nobody"}, "model_not_found"),
        ({"messages": []}, "invalid_value"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"max_tokens": 10**12}, "context_length_exceeded"),
        ({"tools": [{}]}, "unsupported_parameter"),
        ({"foo": 1}, "unknown_parameter"),
        ({"stream": False}, "invalid_value"),
    ],
)
async def test_a_bad_request_is_an_error_event_and_the_connection_lives(
    gateway: Gateway, fields: dict[str, Any], code: str
) -> None:
    client = await authenticated(gateway)
    await client.ask("ab", event_id="e1", **fields)
    error = (await client.next())["error"]
    assert (error["code"], error["event_id"]) == (code, "e1")
    await client.ask("ab", max_tokens=2)
    assert (await client.until("response.done"))[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize(
    "message",
    [
        "",
        "{",
        "[]",
        '{"type":"session.update"}',
        '{"type":"response.create"}',
        '{"type":"response.cancel"}',
        "[" * 9999,
    ],
)
async def test_what_is_no_event_is_told_and_the_connection_lives(gateway: Gateway, message: str) -> None:
    client = await authenticated(gateway)
    await client.socket.send_str(message)
    assert (await client.next())["error"]["code"] == "invalid_event"
    await client.socket.send_bytes(b"\x00\xff")
    assert (await client.next())["error"]["code"] == "invalid_event"
    await client.send(type="session.authenticate", api_key=gateway.key)
    assert (await client.next())["error"]["code"] == "invalid_event"


async def test_a_ping_is_answered_in_its_place(gateway: Gateway) -> None:
    headers = {"Authorization": f"Bearer {gateway.key}"}
    async with gateway.http.ws_connect(f"{gateway.url}/v1/chat/ws", headers=headers, autoping=False) as socket:
        await socket.receive()
        await socket.ping(b"abc")
        await socket.send_str("hello")
        pong, error = await socket.receive(), await socket.receive()
        assert (pong.type, pong.data) == (aiohttp.WSMsgType.PONG, b"abc")
        assert error.type is aiohttp.WSMsgType.TEXT


@pytest.mark.parametrize("kind", [aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.PING, aiohttp.WSMsgType.PONG])
async def test_a_flood_of_small_frames_leaves_other_tasks_their_turns(
    gateway: Gateway, kind: aiohttp.WSMsgType
) -> None:
    client = await authenticated(gateway)
    turns, count = 0, 1000

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for _ in range(count):
        await client.socket.send_frame(b"x", kind)
    await client.socket.send_str('{"type": "response.cancel", "response_id": "last"}')
    counter = asyncio.create_task(count_turns())
    while (await client.next())["error"]["code"] != "not_found":
        pass
    counter.cancel()
    assert turns >= count


async def test_a_message_over_the_limit_ends_the_connection(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    await client.socket.send_str("x" * (65 << 10))
    assert (await client.socket.receive()).type is aiohttp.WSMsgType.CLOSE
    assert client.socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_the_number_of_responses_at_once_is_bounded(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    gateway.engine.pause()
    for turn in range(ws_module.MAX_RESPONSES + 1):
        await client.ask("ab", event_id=str(turn), max_tokens=1)
    error = (await client.until("error"))[-1]["error"]
    assert (error["code"], error["event_id"]) == ("too_many_responses", str(ws_module.MAX_RESPONSES))
    gateway.engine.resume()
    for _ in range(ws_module.MAX_RESPONSES):
        await client.until("response.done")


async def test_a_client_that_leaves_aborts_its_responses(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    await client.ask("ab", max_tokens=50_000)
    await client.ask("cd", max_tokens=50_000)
    await client.until("response.output_text.delta")
    await eventually(lambda: len(gateway.engine.submits) == 2)
    await client.socket.close()
    await eventually(lambda: len(gateway.engine.aborts) == 2)
    registry = gateway.services.metrics.registry
    await eventually(lambda: registry.get_sample_value("stencilpress_answers_open") == 0)
    await eventually(lambda: registry.get_sample_value("stencilpress_websockets_open") == 0)


async def test_an_engine_that_dies_fails_the_response_not_the_connection(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    await client.ask("ab", max_tokens=50_000)
    await client.until("response.output_text.delta")
    gateway.engine.crash()
    events = await client.until("response.done")
    failed = events[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["status_details"]["error"]["code"] == "engine_lost"
    assert all(event["type"] != "response.output_text.done" for event in events)
    await eventually(lambda: not gateway.services.engine.ready)
    await client.ask("ab", event_id="e2")
    assert (await client.next())["error"]["code"] == "engine_lost"


async def test_a_revoked_key_starts_no_more_responses(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    await revoke_key(gateway.services.db, gateway.key.split("_")[1])
    await gateway.services.changes.poll()
    await client.ask("ab")
    assert (await client.next())["error"]["code"] == "invalid_api_key"


async def test_draining_refuses_responses(gateway: Gateway) -> None:
    client = await authenticated(gateway)
    gateway.services.drain.begin()
    await client.ask("ab")
    assert "shutting down" in (await client.next())["error"]["message"]
