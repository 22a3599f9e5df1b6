"""The outermost layer: requests that are no HTTP, pages of other origins, time limits, TLS."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import trustme
from openai import DefaultAsyncHttpxClient

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway import server
from stencilpress.gateway.api import generate
from stencilpress.gateway.lifecycle.desk import AdapterDesk
from stencilpress.gateway.server import Cors, keep_certificate, tls_context
from stencilpress.gateway.settings import GatewaySettings
from tests.fakes.engine import Options
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway
from tests.integration.test_two_gateways import two_gateways

PAGE = "https://app.example"
PACED = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=100_000, step_delay_s=0.002)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, PACED, cors_origins=f"{PAGE}, http://localhost:3000") as running:
        yield running


@pytest.mark.parametrize(
    "sent",
    [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n"],
    ids=["no HTTP", "unknown version", "long header"],
)
async def test_what_is_no_http_gets_the_apis_error_and_fills_no_log(
    gateway: Gateway, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head
    assert b"aiohttp" not in head
    assert b"application/json" in head
    assert b'"code":"malformed_request"' in body
    assert [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info] == []


async def test_a_page_may_ask_before_it_sends_and_read_the_answer(gateway: Gateway) -> None:
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }
    async with gateway.http.options(f"{gateway.url}/v1/chat/completions", headers=asked) as preflight:
        assert preflight.status == 204
        assert preflight.headers["Access-Control-Allow-Origin"] == PAGE
        assert preflight.headers["Access-Control-Allow-Headers"] == asked["Access-Control-Request-Headers"]
        assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in preflight.headers
    body = {"model": "base", "prompt": "ab", "max_tokens": 2, "stream": True}
    headers = {"Authorization": f"Bearer {gateway.key}", "Origin": PAGE}
    async with gateway.http.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert answer.headers["Vary"] == "Origin"
        assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]
    async with gateway.http.get(f"{gateway.url}/v1/models", headers={"Origin": PAGE}) as refused:
        assert refused.status == 401  # errors are readable too
        assert refused.headers["Access-Control-Allow-Origin"] == PAGE


@pytest.mark.parametrize("origin", ["https://evil.example", "https://app.example.evil", "null"])
async def test_a_page_of_another_origin_gets_no_leave(gateway: Gateway, origin: str) -> None:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    async with gateway.http.options(f"{gateway.url}/v1/chat/completions", headers=asked) as preflight:
        assert preflight.status == 405
        assert "Access-Control-Allow-Origin" not in preflight.headers
        assert preflight.headers["Vary"] == "Origin"


async def test_all_origins_may_be_allowed_and_by_default_none_is(tmp_path: Path) -> None:
    async with running_gateway(tmp_path / "all", cors_origins="*") as gateway:
        answer = await gateway.http.get(f"{gateway.url}/v1/models", headers={"Origin": "https://x.example"})
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "Vary" not in answer.headers
    async with running_gateway(tmp_path / "none") as gateway:
        answer = await gateway.http.get(f"{gateway.url}/v1/models", headers={"Origin": PAGE})
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("origin", ["example.com", "https://example.com/path", "ftp://x"])
def test_what_is_no_origin_is_named(origin: str) -> None:
    with pytest.raises(SettingsError, match="STENCILPRESS_CORS_ORIGINS"):
        Cors(origin)


async def test_an_answer_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, PACED, request_limit_s=1.0) as gateway:
        body = {"model": "base", "prompt": "abc", "max_tokens": 50_000}
        status, answer = await gateway.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        headers = {"Authorization": f"Bearer {gateway.key}"}
        async with gateway.http.post(
            f"{gateway.url}/v1/completions", json={**body, "stream": True}, headers=headers
        ) as response:
            assert response.status == 200
            *_, last = (await response.text()).strip().split("\n\n")
        assert '"code":"request_timeout"' in last
        while len(gateway.engine.aborts) < 2:  # noqa: ASYNC110 - the event is in another thread
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("asked", "code"), [({"max_wait_ms": 50}, (503, "deadline_exceeded")), ({}, (504, "request_timeout"))]
)
async def test_an_adapter_that_does_not_come_from_its_store_holds_up_no_request_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, int], code: tuple[int, str]
) -> None:
    @asynccontextmanager
    async def fetch_for_ever(_desk: AdapterDesk, _digest: str, _tenant_id: int) -> AsyncIterator[None]:
        await asyncio.get_running_loop().create_future()
        yield

    monkeypatch.setattr(AdapterDesk, "using", fetch_for_ever)
    async with running_gateway(tmp_path, PACED, request_limit_s=30.0 if asked else 1.0) as gateway:
        body = {"model": "pirate", "prompt": "abc", "max_tokens": 5, **asked}
        status, answer = await gateway.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == code
        assert gateway.engine.submits == []
        assert (await gateway.post("/v1/completions", {**body, "model": "base"}))[0] == 200


async def test_the_engine_is_told_how_long_a_request_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which it is told less by what the gateway took; here that is nothing."""
    monkeypatch.setattr(generate, "time", SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter))
    async with running_gateway(tmp_path, max_wait_s=1.5) as gateway:
        body = {"model": "base", "prompt": "abc", "max_tokens": 1}
        for asked in ({}, {"max_wait_ms": 900}, {"max_wait_ms": 2000}):
            await gateway.post("/v1/completions", {**body, **asked})
        assert [submit.max_wait_ms for submit in gateway.engine.submits] == [1500, 900, 1500]


def test_the_least_time_that_a_request_may_wait_is_a_limit() -> None:
    assert [generate._max_wait_ms(None, allowed_s) for allowed_s in (0.0, 0.0001, 0.0015, 2.0)] == [0, 1, 2, 2000]


def issue(folder: Path, authority: trustme.CA) -> dict[str, str]:
    """A certificate for this machine, as settings."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    return {"tls_certificate": str(folder / "certificate.pem"), "tls_key": str(folder / "key.pem")}


async def test_the_sdk_streams_over_tls_from_two_gateways(tmp_path: Path) -> None:
    """The supervisor, which finds readiness over TLS, and real gateways before the fake engine."""
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with two_gateways(tmp_path, **issue(tmp_path, authority)) as server:
        assert server.url.startswith("https://")
        for _ in range(4):
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key=server.key, http_client=DefaultAsyncHttpxClient(verify=trusting)
            ) as api:
                stream = await api.completions.create(model="base", prompt="abcd", max_tokens=4, stream=True)
                assert "".join([chunk.choices[0].text async for chunk in stream]) == "abcd"
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as distrusting:
            with pytest.raises(openai.APIConnectionError):
                await distrusting.models.list()


async def test_a_renewed_certificate_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_INTERVAL_S", 0.01)
    old, new = trustme.CA(), trustme.CA()
    settings = gateway_settings(**issue(tmp_path, old))
    context = tls_context(settings)
    assert context is not None
    renewal = asyncio.create_task(keep_certificate(context, settings))
    listening = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    assert await trusted(port, old)
    assert not await trusted(port, new)
    issue(tmp_path, new)
    async with asyncio.timeout(45):
        while not await trusted(port, new):  # noqa: ASYNC110 - the event is on disk
            await asyncio.sleep(0.01)
    renewal.cancel()
    listening.close()


async def trusted(port: int, authority: trustme.CA) -> bool:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except ssl.SSLError:
        return False
    writer.close()
    return True


def gateway_settings(**given: Any) -> GatewaySettings:
    return GatewaySettings(model_dir="", database_url="", engine_socket="", http_fd=-1, **given)


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key"])
def test_half_a_certificate_is_named(tmp_path: Path, missing: str) -> None:
    given = {**issue(tmp_path, trustme.CA()), missing: ""}
    with pytest.raises(SettingsError, match="go together"):
        tls_context(gateway_settings(**given))


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    given = issue(tmp_path, trustme.CA())
    Path(given["tls_certificate"]).write_text("no certificate")
    with pytest.raises(SettingsError, match="STENCILPRESS_TLS_CERTIFICATE"):
        tls_context(gateway_settings(**given))
