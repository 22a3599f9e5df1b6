"""Traces as a collector receives them: the real exporter, and a server that reads OTLP by OpenTelemetry's schema."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.app import create_runner
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.tracing import tracing
from tests.fakes.engine import Options
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@asynccontextmanager
async def collector(spans: list[Span]) -> AsyncIterator[str]:
    """A collector's address; what it is sent is appended to ``spans``."""

    async def take(request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(span for one in sent.resource_spans for scope in one.scope_spans for span in scope.spans)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def traced(gateway: Gateway, endpoint: str) -> AsyncIterator[Gateway]:
    """The same gateway once more, with traces; at the end all have been sent."""
    traces = tracing(settings(otlp_endpoint=endpoint))
    assert traces is not None
    runner = create_runner(replace(gateway.services, tracing=traces), 1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield replace(gateway, url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await runner.cleanup()
    await traces.close()


def settings(**given: Any) -> GatewaySettings:
    return GatewaySettings(model_dir="", database_url="", engine_socket="", http_fd=-1, **given)


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


async def test_a_request_is_a_span_in_the_callers_trace(tmp_path: Path) -> None:
    spans: list[Span] = []
    async with running_gateway(tmp_path) as plain, collector(spans) as endpoint, traced(plain, endpoint) as gateway:
        headers = {"Authorization": f"Bearer {gateway.key}", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"model": "pirate", "prompt": "secret", "max_tokens": 3}
        async with gateway.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as response:
            request_id = response.headers["x-request-id"]
        await gateway.post("/v1/completions", {"model": "nobody", "prompt": "a"})
    answered, refused = spans
    assert answered.name == "POST /v1/completions"
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes(answered)
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.response.model"] == "pirate@1"
    assert found["gen_ai.usage.output_tokens"] == 3
    assert (found["stencilpress.tenant"], found["stencilpress.request_id"]) == ("demo", request_id)
    [first_token] = answered.events
    assert answered.start_time_unix_nano < first_token.time_unix_nano <= answered.end_time_unix_nano
    assert "secret" not in str(answered)
    assert refused.trace_id.hex() != TRACE
    assert attributes(refused)["http.response.status_code"] == 404


async def test_each_response_on_a_websocket_is_a_span(tmp_path: Path) -> None:
    spans: list[Span] = []
    async with running_gateway(tmp_path) as plain, collector(spans) as endpoint, traced(plain, endpoint) as gateway:
        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with gateway.http.ws_connect(f"{gateway.url}/v1/chat/ws", headers=headers) as socket:
            asked = {"model": "base", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
            await socket.send_json({"type": "response.create", "response": asked})
            while (await socket.receive_json())["type"] != "response.done":
                pass
    names = {span.name: span for span in spans}
    assert names.keys() == {"WS response.create", "GET /v1/chat/ws"}
    assert attributes(names["WS response.create"])["gen_ai.usage.output_tokens"] == 2


async def test_a_span_has_failed_where_we_have_and_not_where_the_client_has(tmp_path: Path) -> None:
    spans: list[Span] = []
    paced = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=100_000, step_delay_s=0.002)
    async with (
        running_gateway(tmp_path, paced) as plain,
        collector(spans) as endpoint,
        traced(plain, endpoint) as gateway,
    ):
        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with gateway.http.ws_connect(f"{gateway.url}/v1/chat/ws", headers=headers) as socket:
            asked = {"model": "nobody", "messages": [{"role": "user", "content": "ab"}]}
            await socket.send_json({"type": "response.create", "response": asked})
            while (await socket.receive_json())["type"] != "error":
                pass
        body = {"model": "base", "prompt": "abc", "max_tokens": 50_000, "stream": True}
        async with gateway.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            gateway.engine.crash()
            assert b'"error"' in await response.read()
    failed = {span.name: span.status.code == Status.STATUS_CODE_ERROR for span in spans}
    assert failed == {"WS response.create": False, "GET /v1/chat/ws": False, "POST /v1/completions": True}


async def test_a_collector_that_is_away_costs_nothing_but_the_spans(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as plain, traced(plain, "http://127.0.0.1:9") as gateway:
        assert (await gateway.post("/v1/completions", {"model": "base", "prompt": "a", "max_tokens": 1}))[0] == 200


def test_without_an_endpoint_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", None)
    assert tracing(settings()) is None


def test_what_is_no_address_and_a_missing_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="STENCILPRESS_OTLP_ENDPOINT"):
        tracing(settings(otlp_endpoint="collector:4318"))
    load = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name, name=name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError, match=r"stencilpress\[otel\]"):
        tracing(settings(otlp_endpoint="http://localhost"))
