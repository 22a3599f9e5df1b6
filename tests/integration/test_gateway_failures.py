"""What happens when a side goes away, is slow, or sends too much: other streams go on, nothing leaks, no false end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import select

from stencilpress.engine.messages import Finished
from stencilpress.gateway import app
from stencilpress.gateway.catalog.usage_models import UsageRequestRow
from stencilpress.gateway.drain import Drain
from stencilpress.gateway.errors import UnavailableError, from_finished
from stencilpress.gateway.services import INLINE_BYTES, off_loop
from stencilpress.gateway.stream import ChunkEncoder
from tests.fakes.engine import Options, running_engine
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway

PACED = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=100_000, step_delay_s=0.002)
FAST = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=100_000, tokens_per_step=50)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, PACED) as running:
        yield running


async def eventually(holds: Callable[[], bool], limit_s: float = 45.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - what is awaited happens in another thread
            await asyncio.sleep(0.005)


async def open_stream(gateway: Gateway, **fields: Any) -> aiohttp.ClientResponse:
    body = {"model": "pirate", "prompt": "abc", "stream": True, **fields}
    headers = {"Authorization": f"Bearer {gateway.key}"}
    return await gateway.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers)


async def next_event(response: aiohttp.ClientResponse) -> str:
    line = await response.content.readline()
    await response.content.readline()
    return line.decode().removeprefix("data: ").strip()


def sample(gateway: Gateway, metric: str) -> float | None:
    return gateway.services.metrics.registry.get_sample_value(metric)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": ["zz"]}, {"logprobs": 1}])
async def test_a_client_that_leaves_aborts_its_request(gateway: Gateway, fields: dict[str, Any]) -> None:
    response = await open_stream(
        gateway, max_tokens=50_000, **{"stop": ["zz"], **fields} if "stop" not in fields else {}
    )
    for _ in range(3):
        await next_event(response)
    response.close()
    await eventually(lambda: len(gateway.engine.aborts) == fields.get("n", 1))
    await eventually(lambda: sample(gateway, "stencilpress_answers_open") == 0)
    counted = sample(gateway, "stencilpress_completion_tokens_total")
    assert counted is not None
    assert 0 < counted < 50_000


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_while_it_waits_aborts_its_request(gateway: Gateway, streamed: bool) -> None:
    gateway.engine.pause()
    task = asyncio.create_task(open_stream(gateway, max_tokens=10, stream=streamed))
    await eventually(lambda: len(gateway.engine.submits) == 1)
    task.cancel()
    await eventually(lambda: len(gateway.engine.aborts) == 1)
    gateway.engine.resume()
    await eventually(lambda: sample(gateway, "stencilpress_answers_open") == 0)


async def test_an_engine_that_dies_in_mid_stream_is_an_error_and_no_end(gateway: Gateway) -> None:
    response = await open_stream(gateway, max_tokens=50_000)
    await next_event(response)
    gateway.engine.crash()
    rest = (await response.content.read()).decode()
    events = [event.removeprefix("data: ") for event in rest.strip().split("\n\n")]
    assert json.loads(events[-1])["error"].keys() == {"message", "type", "param", "code"}
    assert json.loads(events[-1])["error"]["code"] == "engine_lost"
    assert "[DONE]" not in rest
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])


async def test_the_sdk_raises_when_the_engine_dies_in_mid_stream(gateway: Gateway) -> None:
    api = await gateway.openai()
    message: Any = {"role": "user", "content": "abc"}
    stream = await api.chat.completions.create(model="base", messages=[message], max_tokens=50_000, stream=True)

    async def read() -> None:
        await anext(stream)
        gateway.engine.crash()
        async for chunk in stream:
            assert chunk.choices[0].finish_reason is None

    with pytest.raises(openai.APIError) as raised:
        await read()
    assert raised.value.code == "engine_lost"


async def rows(gateway: Gateway) -> list[tuple[str, int, int]]:
    """Status and billed tokens of every request so far."""
    await gateway.services.accounting.flush()
    async with gateway.services.db.read() as session:
        found = (await session.execute(select(UsageRequestRow.__table__))).all()
    return [(row.status, row.prompt_tokens, row.completion_tokens) for row in found]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_without_a_token_outlives_its_engine(gateway: Gateway, tmp_path: Path, streamed: bool) -> None:
    gateway.engine.pause()
    asked = [asyncio.create_task(open_stream(gateway, max_tokens=7, stream=streamed, n=n)) for n in (1, 2)]
    await eventually(lambda: len(gateway.engine.submits) == 3)
    gateway.engine.crash()
    await eventually(lambda: not gateway.services.engine.ready)
    with running_engine(tmp_path / "engine.sock", PACED) as next_engine:
        answers = [await (await one).text() for one in asked]
    assert [answer.count('"finish_reason":"length"') for answer in answers] == [1, 2]
    assert len(next_engine.submits) == 3
    assert await rows(gateway) == [("completed", 3, 7), ("completed", 3, 14)]


async def test_a_request_with_a_token_is_never_begun_anew(gateway: Gateway, tmp_path: Path) -> None:
    response = await open_stream(gateway, max_tokens=50_000)
    await next_event(response)
    gateway.engine.crash()
    with running_engine(tmp_path / "engine.sock", PACED) as next_engine:
        assert '"code":"engine_lost"' in await response.text()
        await eventually(lambda: gateway.services.engine.ready)
    assert next_engine.submits == []


async def test_a_client_that_leaves_while_no_engine_is_there_is_accounted_for(gateway: Gateway) -> None:
    gateway.engine.pause()
    task = asyncio.create_task(open_stream(gateway, max_tokens=10))
    await eventually(lambda: len(gateway.engine.submits) == 1)
    gateway.engine.crash()
    await eventually(lambda: not gateway.services.engine.ready)
    task.cancel()
    await eventually(lambda: sample(gateway, "stencilpress_answers_open") == 0)
    assert await rows(gateway) == [("disconnected", 3, 0)]


async def test_the_second_loss_of_an_engine_ends_a_request(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, PACED, resubmit_limit_s=0.05) as gateway:
        gateway.engine.pause()
        asked = asyncio.create_task(open_stream(gateway, max_tokens=10))
        await eventually(lambda: len(gateway.engine.submits) == 1)
        gateway.engine.crash()
        response = await asked
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "engine_lost"
        assert await rows(gateway) == [("failed", 0, 0)]


async def test_a_stream_that_fails_before_its_first_event_is_a_plain_answer(tmp_path: Path) -> None:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), missing=frozenset({"a" * 64}))
    async with running_gateway(tmp_path, options) as gateway:
        for _ in range(2):  # over one connection: where an answer ends is clear
            response = await open_stream(gateway)
            assert (response.status, response.content_type) == (503, "application/json")
            assert "Transfer-Encoding" not in response.headers
            body = await response.read()
            assert response.headers["Content-Length"] == str(len(body))
            assert json.loads(body)["error"]["code"] == "adapter_unavailable"
        stream = await open_stream(gateway, model="base", max_tokens=2)
        assert (stream.status, stream.headers["Transfer-Encoding"]) == (200, "chunked")
        assert (await stream.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("back", [True, False])
async def test_a_request_that_is_given_to_another_engine_has_waited_already(
    gateway: Gateway, tmp_path: Path, back: bool
) -> None:
    """It is not served late: the next engine is told what is left of its time, and without one it is refused then."""
    gateway.engine.pause()
    wait_ms = 30_000 if back else 1500
    asked = asyncio.create_task(open_stream(gateway, max_tokens=2, max_wait_ms=wait_ms))
    await eventually(lambda: len(gateway.engine.submits) == 1)
    assert 0 < gateway.engine.submits[0].max_wait_ms <= wait_ms
    await asyncio.sleep(0.05)  # what it waits with the first engine
    gateway.engine.crash()
    if not back:
        response = await asked
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "deadline_exceeded"
        return
    await eventually(lambda: not gateway.services.engine.ready)
    with running_engine(tmp_path / "engine.sock", PACED) as again:
        assert '"finish_reason":"length"' in await (await asked).text()
    [submit] = again.submits
    assert 0 < submit.max_wait_ms <= wait_ms - 50


async def test_without_an_engine_requests_are_told_to_come_back(gateway: Gateway) -> None:
    waiting = asyncio.create_task(
        gateway.post("/v1/completions", {"model": "base", "prompt": "a", "max_tokens": 50_000})
    )
    await eventually(lambda: bool(sample(gateway, "stencilpress_time_to_first_token_seconds_count")))
    gateway.engine.crash()
    assert (await waiting)[0] == 503
    await eventually(lambda: not gateway.services.engine.ready)
    response = await open_stream(gateway)
    assert response.status == 503
    assert response.headers["Retry-After"] == "1"
    assert (await response.json())["error"]["code"] == "engine_lost"
    for path, status in [("/readyz", 503), ("/healthz", 200), ("/metrics", 200)]:
        async with gateway.http.get(f"{gateway.url}{path}") as answer:
            assert answer.status == status
            if path == "/metrics":
                assert 'stencilpress_engine_up{engine="1"} 0.0' in await answer.text()


async def test_27_megabytes_are_refused_while_a_stream_goes_on(gateway: Gateway) -> None:
    stream = await open_stream(gateway, max_tokens=300)
    seen = 0

    async def upload() -> AsyncIterator[bytes]:
        nonlocal seen
        for _ in range(27):
            yield b" " * (1 << 20)
            assert '"text"' in await next_event(stream)  # the stream's tokens arrive between the pieces
            seen += 1

    headers = {"Authorization": f"Bearer {gateway.key}"}
    async with gateway.http.post(f"{gateway.url}/v1/chat/completions", data=upload(), headers=headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    assert seen >= 4
    rest = (await stream.content.read()).decode()
    assert rest.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in rest


async def test_a_large_prompt_is_tokenised_beside_the_streams(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, PACED, max_body_bytes=32 << 20) as gateway:
        stream = await open_stream(gateway, max_tokens=50_000)
        body = {"model": "base", "messages": [{"role": "user", "content": "a b " * 200_000}]}
        refused = asyncio.create_task(gateway.post("/v1/chat/completions", body))
        during = 0
        while not refused.done():
            assert '"text"' in await next_event(stream)
            during += 1
        stream.close()
        status, answer = await refused
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "100000" in answer["error"]["message"]
        assert during > 10


async def test_a_client_that_does_not_read_is_cut_off_alone(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, FAST, write_limit_s=0.3) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        many = {"max_tokens": 99_000, "stream": True, "logprobs": True, "top_logprobs": 1}  # about 20 MB
        body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "abc"}], **many})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect((host, int(port)))
            lazy.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            other = await open_stream(gateway, max_tokens=5000)
            assert (await other.content.read()).decode().endswith("data: [DONE]\n\n")
            await eventually(lambda: sample(gateway, "stencilpress_slow_clients_cut_total") == 1, limit_s=30)
        await eventually(lambda: sample(gateway, "stencilpress_answers_open") == 0)


async def test_a_body_that_does_not_arrive_is_given_up(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, PACED, body_limit_s=0.1) as gateway:
        never = asyncio.Event()

        async def stuck() -> AsyncIterator[bytes]:
            yield b"{"
            await never.wait()

        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with gateway.http.post(f"{gateway.url}/v1/completions", data=stuck(), headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "body_timeout"
            never.set()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models/x"])
async def test_a_fault_of_ours_is_told_without_its_cause(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("secret /etc/passwd")

    monkeypatch.setattr(gateway.services.router, "resolve", fail)
    headers = {"Authorization": f"Bearer {gateway.key}"}
    method, body = ("GET", None) if "models" in path else ("POST", {"model": "base", "prompt": "ab"})
    async with gateway.http.request(method, f"{gateway.url}{path}", json=body, headers=headers) as response:
        assert response.status == 500
        text = await response.text()
        request_id = response.headers["x-request-id"]
    assert json.loads(text)["error"]["code"] == "internal_error"
    assert "secret" not in text
    assert f"unexpected error in {request_id}" in caplog.text
    assert "secret" in caplog.text


async def test_a_fault_of_the_engine_is_in_the_log_under_the_requests_id(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise from_finished(Finished(1, "error", 2, 0, code="internal", message="the output was not finite"))

    monkeypatch.setattr(gateway.services.router, "resolve", fail)
    headers, body = {"Authorization": f"Bearer {gateway.key}"}, {"model": "base", "prompt": "ab"}
    async with gateway.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 500
        assert "finite" not in await response.text()
        assert f"the engine failed in {response.headers['x-request-id']}: the output was not finite" in caplog.text


async def test_a_fault_of_ours_in_mid_stream_is_an_error_event(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = await open_stream(gateway, max_tokens=50_000)
    await next_event(response)
    monkeypatch.setattr(ChunkEncoder, "delta", lambda *_: 1 / 0)
    last = (await response.content.read()).decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    await eventually(lambda: len(gateway.engine.aborts) == 1)


async def test_draining_refuses_new_work_and_lets_streams_finish(gateway: Gateway) -> None:
    running = await open_stream(gateway, max_tokens=100)
    await next_event(running)
    gateway.services.drain.begin()
    refused = await open_stream(gateway)
    assert refused.status == 503
    assert refused.headers["Connection"] == "close"
    async with gateway.http.get(f"{gateway.url}/readyz") as ready:
        assert ready.status == 503
    assert (await running.content.read()).decode().endswith("data: [DONE]\n\n")
    assert await gateway.services.drain.idle(5)


async def test_a_stream_that_outlives_the_drain_gets_an_error_event(gateway: Gateway) -> None:
    running = await open_stream(gateway, max_tokens=50_000)
    await next_event(running)
    gateway.services.drain.begin()
    assert not await gateway.services.drain.idle(0.05)
    await gateway.services.engine.close()
    last = (await running.content.read()).decode().strip().split("\n\n")[-1]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert await gateway.services.drain.idle(5)


async def test_a_drain_is_idle_when_nothing_runs() -> None:
    drain = Drain()
    with drain.answering():
        assert not await drain.idle(0.001)
    assert await drain.idle(0.001)
    drain.begin()
    with pytest.raises(UnavailableError), drain.answering():
        pass


async def test_ten_thousand_odd_bodies_do_not_disturb_a_stream(gateway: Gateway) -> None:
    """Every field with every odd value, while one stream runs to its end."""
    stream = await open_stream(gateway, max_tokens=300)
    odd: list[Any] = [None, True, -1, 0, 1.5, 10**30, "", "x", "\u0000", [], [[]], {}, {"a": 1}, [None], ["x"] * 70]
    fields = ["n", "stop", "seed", "tools", "top_p", "model", "prompt", "logprobs", "logit_bias", "stream_options"]
    for path, base in [
        ("/v1/completions", {"model": "base", "prompt": "ab", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ]:
        for field in [*fields, "messages", "metadata", "chat_template_kwargs"]:
            answers = await asyncio.gather(*(gateway.post(path, {**base, field: value}) for value in odd))
            assert {status for status, _ in answers} <= {200, 400, 404}
    rest = (await stream.content.read()).decode()
    assert rest.endswith("data: [DONE]\n\n")
    assert '"error"' not in rest


@pytest.mark.parametrize("head", [b"", b"GET /healthz HTTP/1.1\r\nX-Slow: "], ids=["nothing", "half a head"])
async def test_a_connection_that_never_makes_a_whole_request_is_closed_and_a_stream_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(app, "WHOLE_REQUEST_LIMIT_S", 0.2)
    async with running_gateway(tmp_path, PACED) as gateway:
        response = await open_stream(gateway, max_tokens=50_000)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(head)
        async with asyncio.timeout(45):
            assert await reader.read() == b""
        assert await next_event(response)
        response.close()
        writer.close()


async def test_a_tenant_has_one_thread_at_a_time_and_the_others_go_on(gateway: Gateway) -> None:
    services, big = gateway.services, INLINE_BYTES + 1
    gate, started = threading.Event(), []

    def slow(number: int) -> int:
        started.append(number)
        gate.wait(20)
        return number

    mine = [asyncio.create_task(off_loop(services, 1, big, partial(slow, number))) for number in range(5)]
    assert await asyncio.wait_for(off_loop(services, 2, big, lambda: "other"), 10) == "other"
    await eventually(lambda: started == [0])
    mine[0].cancel()  # its thread goes on
    mine[1].cancel()  # it has none yet
    assert await asyncio.wait_for(off_loop(services, 2, big, lambda: "other"), 10) == "other"
    assert started == [0]
    gate.set()
    assert await asyncio.gather(*mine[2:]) == [2, 3, 4]
    assert started == [0, 2, 3, 4]
