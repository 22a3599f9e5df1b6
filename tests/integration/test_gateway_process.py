"""``python -m stencilpress.gateway`` as the supervisor starts it: settings, readiness, SIGTERM, a lost supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from stencilpress.gateway.__main__ import BACKLOG
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.keys import issue_key
from tests.catalogs import lay_catalog
from tests.fakes.engine import FakeEngine, Options, running_engine
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, build_model

OPTIONS = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=100_000, step_delay_s=0.002)


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen[bytes]
    url: str
    key: str
    lifeline: int
    http: aiohttp.ClientSession
    listener: socket.socket
    engine: FakeEngine
    environment: dict[str, str]
    log: Path

    async def stream(self, max_tokens: int) -> aiohttp.ClientResponse:
        body = {"model": "base", "prompt": "abc", "max_tokens": max_tokens, "stream": True}
        headers = {"Authorization": f"Bearer {self.key}"}
        response = await self.http.post(f"{self.url}/v1/completions", json=body, headers=headers)
        assert response.status == 200
        await response.content.readline()
        return response

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 45)


@pytest.fixture
async def started(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Started]:
    """A gateway process behind an inherited socket. The test's parameter is its drain time in seconds."""
    url = lay_catalog(tmp_path / "catalog.db")
    async with Database(url) as db:
        await create_tenant(db, "demo")
        key = (await issue_key(db, "demo")).token
    with ExitStack() as stack:
        engine = stack.enter_context(running_engine(tmp_path / "engine.sock", OPTIONS))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        lifeline, held = os.pipe()
        stack.callback(os.close, lifeline)
        settings = {
            "MODEL_DIR": build_model(tmp_path / "model"),
            "DATABASE_URL": url,
            "ENGINE_SOCKET": tmp_path / "engine.sock",
            "HTTP_FD": listener.fileno(),
            "LIFELINE_FD": lifeline,
            "DRAIN_S": getattr(request, "param", 20.0),
        }
        environment = {**os.environ, **{f"STENCILPRESS_{name}": str(value) for name, value in settings.items()}}
        command = [sys.executable, "-W", "error", "-m", "stencilpress.gateway"]
        descriptors = (listener.fileno(), lifeline)
        log = tmp_path / "gateway.log"
        stack.callback(lambda: sys.stderr.write(log.read_text()))
        stderr = stack.enter_context(log.open("w"))
        process = subprocess.Popen(command, env=environment, pass_fds=descriptors, stderr=stderr)  # noqa: ASYNC220 - nothing else runs
        stack.callback(process.wait)
        stack.callback(process.kill)
        http = aiohttp.ClientSession()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        while (await http.get(f"{address}/readyz")).status != 200:  # noqa: ASYNC110 - the event is in another process
            await asyncio.sleep(0.05)
        yield Started(process, address, key, held, http, listener, engine, environment, log)
        await http.close()


async def test_a_stream_that_ends_in_time_is_finished_and_the_exit_is_clean(started: Started) -> None:
    response = await started.stream(100)
    started.process.send_signal(signal.SIGTERM)
    text = (await response.content.read()).decode()
    assert text.endswith("data: [DONE]\n\n")
    assert await started.exit_code() == 0


@pytest.mark.parametrize("started", [0.2], indirect=True)
async def test_a_stream_that_does_not_is_told_and_the_exit_says_so(started: Started) -> None:
    response = await started.stream(50_000)
    socket_ = await started.http.ws_connect(
        f"{started.url}/v1/chat/ws", headers={"Authorization": f"Bearer {started.key}"}
    )
    started.process.send_signal(signal.SIGTERM)
    last = (await response.content.read()).decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert (await socket_.receive()).type is aiohttp.WSMsgType.TEXT
    assert (await socket_.receive()).type is aiohttp.WSMsgType.CLOSE
    assert socket_.close_code == aiohttp.WSCloseCode.GOING_AWAY
    assert await started.exit_code() == 1


def test_a_burst_of_connections_finds_room(started: Started) -> None:
    tcp_info = started.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    longest_queue = struct.unpack_from("I", tcp_info, 28)[0]  # of a listening socket, tcpi_sacked is that
    assert longest_queue == min(BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))


async def test_it_ends_with_its_supervisor(started: Started) -> None:
    os.close(started.lifeline)
    assert await started.exit_code() == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "STENCILPRESS_MODEL_DIR"),
        ({"STENCILPRESS_MAX_BODY_BYTES": "many"}, "STENCILPRESS_MAX_BODY_BYTES"),
        ({"STENCILPRESS_DRAIN_S": "-1"}, "STENCILPRESS_DRAIN_S"),
        ({"STENCILPRESS_MODEL_DIR": "nowhere"}, "STENCILPRESS_MODEL_DIR"),
    ],
)
def test_bad_settings_are_named(given: dict[str, str], told: str) -> None:
    needed = {"MODEL_DIR": "m", "DATABASE_URL": "sqlite://", "ENGINE_SOCKET": "s", "HTTP_FD": "9"} if given else {}
    environment = {**os.environ, **{f"STENCILPRESS_{name}": value for name, value in needed.items()}, **given}
    command = [sys.executable, "-m", "stencilpress.gateway"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
