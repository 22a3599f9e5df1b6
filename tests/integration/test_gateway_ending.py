"""A gateway process that got SIGTERM ends, and in time: whoever reads nothing, answers nothing or holds the catalog.

Without an end ``exit_code`` gives up; how long an end takes is for the bench.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import termios
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.ending import waits
from stencilpress.gateway.usage.recorder import Recorder
from tests.integration.test_gateway_process import Started, started
from tests.integration.test_usage_survives import rows_of

__all__ = ["started"]  # the fixture

ENDLESS = 90_000
CHOICES = 8
"""Of a request whose client reads nothing: buffers are full sooner."""
SHORT_DRAIN = pytest.mark.parametrize("started", [0.2], indirect=True)


def request_bytes(started: Started, path: str, body: bytes, *more: str) -> bytes:
    length = f"Content-Length: {len(body)}" if body else "Connection: Upgrade"
    kind = "POST" if body else "GET"
    head = [f"{kind} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {started.key}", length, *more]
    return "\r\n".join([*head, "", ""]).encode() + body


def stream_request(started: Started) -> bytes:
    body = json.dumps({"model": "base", "prompt": "abc", "max_tokens": ENDLESS, "n": CHOICES, "stream": True}).encode()
    return request_bytes(started, "/v1/completions", body, "Content-Type: application/json")


def socket_request(started: Started) -> bytes:
    """An upgrade, and in the same breath the first event: one masked frame of text."""
    key = b64encode(os.urandom(16)).decode()
    more = ("Upgrade: websocket", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}")
    asked = {"model": "base", "messages": [{"role": "user", "content": "abc"}], "max_tokens": ENDLESS, "n": CHOICES}
    event = json.dumps({"type": "response.create", "response": asked}).encode()
    frame = b"\x81" + bytes([0x80 | 126]) + struct.pack(">H", len(event)) + bytes(4) + event
    return request_bytes(started, "/v1/chat/ws", b"", *more) + frame


@contextmanager
def deaf_clients(started: Started, requests: list[bytes]) -> Iterator[list[socket.socket]]:
    """Clients that send and never read, with little room for what comes at either end."""
    started.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections take it over
    with ExitStack() as stack:
        clients = []
        for request in requests:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(started.listener.getsockname())
            client.sendall(request)
            clients.append(client)
        yield clients


async def until_full(clients: list[socket.socket]) -> None:
    """Until nothing more comes in, and then until the gateway's own buffers, which nobody sees, are full as well."""
    before: list[int] = []
    while (waiting := [_unread(client) for client in clients]) != before or not all(waiting):
        before = waiting
        await asyncio.sleep(0.3)
    await asyncio.sleep(2)


def _unread(client: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(client, termios.FIONREAD, bytes(4)))[0])


@SHORT_DRAIN
@pytest.mark.parametrize("kind", [stream_request, socket_request])
async def test_clients_that_never_read_do_not_hold_it(
    started: Started, kind: Callable[[Started], bytes], db: Database
) -> None:
    with deaf_clients(started, [kind(started) for _ in range(8)]) as clients:
        await until_full(clients)
        started.process.send_signal(signal.SIGTERM)
        assert await started.exit_code() == 1
    assert "the shutdown does not end" not in started.log.read_text()
    assert len(await rows_of(db)) == 8


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database(f"sqlite:///{tmp_path / 'catalog.db'}") as database:
        yield database


@SHORT_DRAIN
async def test_an_engine_that_hangs_does_not_hold_it(started: Started, db: Database) -> None:
    response = await started.stream(ENDLESS)
    with started.engine.hung():
        started.process.send_signal(signal.SIGTERM)
        last = (await response.content.read()).decode().strip().split("\n\n")[-1]
        assert await started.exit_code() == 1
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert [row.status for row in await rows_of(db)] == ["failed"]


async def test_an_engine_that_is_lost_during_the_drain_ends_it(started: Started) -> None:
    response = await started.stream(ENDLESS)
    started.process.send_signal(signal.SIGTERM)
    while (await started.http.get(f"{started.url}/readyz")).status == 200:  # noqa: ASYNC110 - the event is elsewhere
        await asyncio.sleep(0.01)
    started.engine.crash()
    last = (await response.content.read()).decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert await started.exit_code() == 0, "every stream had its end, though not the one that it hoped for"


@SHORT_DRAIN
async def test_requests_that_wait_for_room_in_the_ring_do_not_hold_it(started: Started) -> None:
    body = {"model": "base", "prompt": [1] * 90_000, "max_tokens": 1}  # 11 of these fill the ring
    headers = {"Authorization": f"Bearer {started.key}"}

    async def ask() -> int:
        async with started.http.post(f"{started.url}/v1/completions", json=body, headers=headers) as answer:
            return answer.status

    with started.engine.hung():
        asked = [asyncio.create_task(ask()) for _ in range(20)]
        while not re.search(rb"^stencilpress_answers_open\S* 20\.0$", await metrics(started), re.MULTILINE):
            assert not any(one.done() for one in asked)
        started.process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*asked) == [503] * 20
        assert await started.exit_code() == 1


async def test_a_second_signal_changes_nothing(started: Started) -> None:
    response = await started.stream(300)
    started.process.send_signal(signal.SIGTERM)
    while (await started.http.get(f"{started.url}/readyz")).status == 200:  # noqa: ASYNC110 - the event is elsewhere
        await asyncio.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGINT):
        started.process.send_signal(number)
    assert (await response.content.read()).decode().endswith("data: [DONE]\n\n")
    assert await started.exit_code() == 0


@SHORT_DRAIN
async def test_a_catalog_that_does_not_come_free_is_left_and_nothing_is_lost(
    started: Started, db: Database, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "catalog.db", isolation_level=None)) as other:
        response = await started.stream(20)
        other.execute("BEGIN IMMEDIATE")
        assert (await response.content.read()).decode().endswith("data: [DONE]\n\n")
        started.process.send_signal(signal.SIGTERM)
        assert await started.exit_code() == 1
    said = started.log.read_text()
    assert "the shutdown does not end; leaving it at that. It waited for" in said
    assert "sampling.sampling:" in said, "the first that has something to write"
    recorder = Recorder(db, tmp_path / "usage", 1 << 20)
    await recorder.recover()
    recorder.close()
    assert [(row.status, row.completion_tokens) for row in await rows_of(db)] == [("completed", 20)]


async def test_a_signal_while_it_starts_ends_it_before_it_serves(started: Started, tmp_path: Path) -> None:
    """Another gateway beside the one that runs: the first moment at which it takes the signal."""
    log = tmp_path / "second.log"
    with socket.create_server(("127.0.0.1", 0)) as listener, log.open("w") as stderr, ExitStack() as stack:
        descriptors = {"STENCILPRESS_HTTP_FD": str(listener.fileno()), "STENCILPRESS_LIFELINE_FD": "-1"}
        environment = {**started.environment, **descriptors}
        command = [sys.executable, "-W", "error", "-m", "stencilpress.gateway"]
        with subprocess.Popen(command, env=environment, pass_fds=(listener.fileno(),), stderr=stderr) as process:  # noqa: ASYNC220
            stack.callback(process.kill)
            while not catches(process.pid, signal.SIGTERM):
                assert process.poll() is None
                await asyncio.sleep(0.001)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 15) == 0
    assert " ERROR " not in log.read_text()


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


async def test_what_is_waited_for_has_a_name() -> None:
    never = asyncio.Event()

    @asynccontextmanager
    async def stubborn() -> AsyncIterator[None]:
        yield
        await never.wait()

    async def end() -> None:
        async with stubborn():
            pass

    task, loop = asyncio.create_task(end(), name="ending-task"), asyncio.get_running_loop()
    await asyncio.sleep(0)
    told: asyncio.Future[str] = loop.create_future()
    asking = threading.Thread(target=lambda: loop.call_soon_threadsafe(told.set_result, waits(loop)), name="asking")
    asking.start()
    said = await told
    task.cancel()
    assert "ending-task in test_gateway_ending.end:" in said
    assert "test_gateway_ending.stubborn:" in said
    assert "thread asking" not in said


async def metrics(started: Started) -> bytes:
    async with started.http.get(f"{started.url}/metrics") as answer:
        return await answer.read()
