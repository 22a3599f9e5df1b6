"""The bytes on the wire: event streams, stop strings on every route, headers, refusals and their bodies."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.engine import Options
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("gateway"), max_body_bytes=64 << 10) as running:
        yield running


def chat(text: str = "ab", **fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [{"role": "user", "content": text}], **fields}


async def stream(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[list[str], Mapping[str, str]]:
    """The raw data of each event, and the response's headers."""
    headers = {"Authorization": f"Bearer {gateway.key}"}
    async with gateway.http.post(f"{gateway.url}{path}", json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events], response.headers


async def test_the_events_of_a_chat_are_these(gateway: Gateway) -> None:
    events, headers = await stream(gateway, CHAT, chat(max_tokens=1, stream_options={"include_usage": True}))
    assert headers["Content-Type"] == "text/event-stream"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert re.fullmatch("req_[0-9a-f]{32}", headers["x-request-id"])
    assert "Content-Encoding" not in headers
    assert headers["Server"] == "stencilpress"
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    head = {key: chunks[0].pop(key) for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"
    assert head["model"] == "acme/Press-1B"
    for chunk in chunks[1:]:
        assert {key: chunk.pop(key) for key in head} == head

    def choice(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        only = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {"choices": [only], "usage": None}

    counts = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    assert chunks == [
        choice({"role": "assistant", "content": ""}),
        choice({"content": "a"}),
        choice({}, "length"),
        {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 0}}},
    ]


async def test_the_events_of_a_completion_are_these(gateway: Gateway) -> None:
    events, _ = await stream(gateway, COMPLETIONS, {"model": "pirate", "prompt": "ab", "max_tokens": 1})
    chunks = [json.loads(event) for event in events[:-1]]
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}],
    ]
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("text_completion", "pirate@1")}
    assert all("usage" not in chunk for chunk in chunks)
    assert events[-1] == "[DONE]"


async def test_an_event_stays_one_line_for_clients_that_split_text(gateway: Gateway) -> None:
    text = "a\u2028b\u2029c\x85d\r\n\x0be"
    events, _ = await stream(gateway, CHAT, chat(text, max_tokens=len(text.encode())))
    assert all(len(event.splitlines()) == 1 for event in events)
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(deltas) == text


STOPS = ["DEFGHIJ", "DEFX"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stop_string_across_tokens_shows_nothing_of_itself(gateway: Gateway, path: str, streamed: bool) -> None:
    asked: dict[str, Any] = {"model": "base", "stop": STOPS, "max_tokens": 26}
    alphabet = "ABCDEFGHIJKLM"
    asked |= {"messages": [{"role": "user", "content": alphabet}]} if path == CHAT else {"prompt": alphabet}
    if streamed:
        events, _ = await stream(gateway, path, asked)
        assert events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        text = "".join(c["text"] if path == COMPLETIONS else c["delta"].get("content", "") for c in choices)
        reason = choices[-1]["finish_reason"]
    else:
        _, answer = await gateway.post(path, asked)
        (choice,) = answer["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        reason = choice["finish_reason"]
        assert 10 <= answer["usage"]["completion_tokens"] <= 26
    assert (text, reason) == ("ABC", "stop")


async def test_text_that_only_begins_like_a_stop_string_is_shown_at_the_end(gateway: Gateway) -> None:
    _, answer = await gateway.post(CHAT, chat("ABCDE", stop=STOPS, max_tokens=5))
    assert answer["choices"][0]["message"]["content"] == "ABCDE"
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (chat(model="nobody"), 404, "model_not_found", "model"),
        (chat(model="../../etc/passwd"), 404, "model_not_found", "model"),
        (chat(model="pirate@9"), 404, "model_not_found", "model"),
        (chat(model="x" * 500), 404, "model_not_found", "model"),
        (chat(messages=[]), 400, "invalid_value", "messages"),
        (chat("x" * 600), 400, "context_length_exceeded", "messages"),
        (chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
        (chat(max_tokens=-1), 400, "invalid_value", "max_tokens"),
        (chat(max_tokens=1.5), 400, "invalid_value", "max_tokens"),
        (chat(max_tokens=10**12), 400, "context_length_exceeded", "max_tokens"),
        (chat(n=0), 400, "invalid_value", "n"),
        (chat(top_p=1.5), 400, "invalid_value", "top_p"),
        (chat(logit_bias={"300": 1}), 400, "invalid_value", "logit_bias"),
        (chat(prompt_embeds="x"), 400, "unknown_parameter", "prompt_embeds"),
        (chat(""), 400, "invalid_value", "messages"),
        (b'{"model":"\xff"}', 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b"", 400, "invalid_json", None),
        (b'{"user":' + b"[" * 60_000, 400, "invalid_json", None),
    ],
)
async def test_a_bad_chat_is_refused_without_reaching_the_engine(
    gateway: Gateway, body: Any, status: int, code: str, param: str | None
) -> None:
    for streamed in (False, True):
        sent = {**body, "stream": streamed} if isinstance(body, dict) else body
        got, answer = await gateway.post(CHAT, sent)
        assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)
        assert answer.keys() == {"error"}
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
    assert gateway.engine.submits == []


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], [[70], []], ["a", 70], [70, [70]], [300], [-1], [[10**30]], ["a"] * 65, {"a": 1}],
)
async def test_a_bad_prompt_is_refused_without_reaching_the_engine(gateway: Gateway, prompt: Any) -> None:
    status, answer = await gateway.post(COMPLETIONS, {"model": "base", "prompt": prompt})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert gateway.engine.submits == []


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic abc", "Bearer ' OR '1'='1", "Bearer sp_x_y"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/pirate"),
        ("GET", "/v1/chat/ws"),
    ],
)
async def test_no_route_of_the_api_answers_without_a_key(gateway: Gateway, method: str, path: str, header: str) -> None:
    if path == "/v1/chat/ws" and not header:
        return  # a WebSocket may send its key as its first event instead
    headers = {"Authorization": header} if header else {}
    async with gateway.http.request(method, f"{gateway.url}{path}", json=chat(), headers=headers) as response:
        answer = await response.json()
        assert response.status == 401
        assert answer["error"]["code"] == "invalid_api_key"
        assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405), ("DELETE", "/v1/models/x", 405)],
)
async def test_unknown_paths_and_methods_get_an_error_object(
    gateway: Gateway, method: str, path: str, status: int
) -> None:
    async with gateway.http.request(method, f"{gateway.url}{path}") as response:
        assert response.status == status
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_compressed_body_is_refused_and_never_inflated(gateway: Gateway) -> None:
    bomb = gzip.compress(b" " * (32 << 20))
    status, answer = await gateway.post(CHAT, bomb, headers={"Content-Encoding": "gzip"})
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("size", [(64 << 10) + 1, 1 << 20])
async def test_a_body_over_the_limit_is_refused_with_or_without_a_length(gateway: Gateway, size: int) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(0, size, 1 << 16):
            yield b"x" * (1 << 16)
        yield b"x"

    for data in (b"x" * size, in_pieces()):
        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with gateway.http.post(f"{gateway.url}{CHAT}", data=data, headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"


async def test_errors_say_nothing_about_the_inside(gateway: Gateway, tmp_path: Path) -> None:
    """Thirty provoked errors: no path, no class, no trace, no number of a process."""
    bodies: list[Any] = [
        b"\xff", b"{", b"[]", b'{"model":{}}', chat(model="../x"), chat(model="a@b@c"), chat(n=[]), chat(stop=1),
        chat(seed="x"), chat(messages=[1]), chat(messages=[{}]), chat(messages=[{"role": "x", "content": "x"}]),
        chat(tools=[1]), chat(zzz=1), chat(logit_bias=[]), chat(logit_bias={"9999": 1}), chat(temperature=[]),
        chat(max_tokens=10**30), chat(top_logprobs=3), chat(stream_options={}), chat("x" * 5000),
    ]  # fmt: skip
    answers = [await gateway.post(CHAT, body) for body in bodies]
    prompts: list[Any] = [[], [1.5], [[]], None]
    answers += [await gateway.post(COMPLETIONS, {"model": "base", "prompt": prompt}) for prompt in prompts]
    answers += [await gateway.post("/v1/none", b""), await gateway.post(CHAT, b"", headers={"Authorization": "x"})]
    assert {status for status, _ in answers} <= {400, 401, 404}
    for _, answer in answers:
        text = json.dumps(answer)
        assert not re.search(r"Traceback|\.py|stencilpress|msgspec|Error\b|object at 0x|/tmp|/home|pid", text), text
        assert str(tmp_path) not in text


async def test_a_prompt_of_megabytes_is_too_long_before_it_is_counted(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        for path, body, field in (
            (CHAT, chat("xy" * 1_000_000), "messages"),
            (COMPLETIONS, {"model": "base", "prompt": ["a", "xy" * 1_000_000]}, "prompt"),
        ):
            status, answer = await gateway.post(path, body)
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
            assert "512 tokens" in error["message"]
            assert "more than 512 tokens" in error["message"]
        assert not gateway.engine.submits


async def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, template=None) as gateway:
        status, answer = await gateway.post(CHAT, chat())
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
        assert "/v1/completions" in answer["error"]["message"]
        assert (await gateway.post(COMPLETIONS, {"model": "base", "prompt": "ab", "max_tokens": 2}))[0] == 200


async def test_what_a_template_raises_is_a_bad_request(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, template="{{ raise_exception('roles must alternate') }}") as gateway:
        status, answer = await gateway.post(CHAT, chat())
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "roles must alternate" in answer["error"]["message"]


async def test_a_prompt_that_the_engine_cannot_hold_is_a_bad_request(tmp_path: Path) -> None:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=10_000_000)
    async with running_gateway(tmp_path, options, request_ring_bytes=64 << 10) as gateway:
        body = {"model": "base", "prompt": [70] * 20_000}
        status, answer = await gateway.post(COMPLETIONS, body)
        assert (status, answer["error"]["code"]) == (400, "capacity_exceeded")
