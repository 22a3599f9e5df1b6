"""The engine's death and return, and engines that break the protocol, as a gateway lives through them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from stencilpress.engine import client as client_module
from stencilpress.engine.client import EngineClient, EngineUnavailableError
from stencilpress.engine.link import Closed, Link, Received
from stencilpress.engine.messages import PROTOCOL_VERSION, Abort, Finished, Hello, Kept, Step, Token
from stencilpress.engine.ring import REPLIES, RingWriter, map_ring
from tests.fakes.engine import Options, listen, running_engine
from tests.unit.test_link_client import ENDLESS, drain, eventually, request

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@asynccontextmanager
async def engine_process(
    listener: socket.socket, generation: int, *arguments: str
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A fake engine as the supervisor starts it; killed at the end."""
    fd = listener.fileno()
    environment = {**os.environ, "STENCILPRESS_ENGINE_FD": str(fd), "STENCILPRESS_GENERATION": str(generation)}
    command = [sys.executable, "-m", "tests.fakes.engine", *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=(fd,)) as process:  # noqa: ASYNC220
        try:
            yield process
        finally:
            process.kill()


async def test_a_killed_engine_ends_every_stream_once_and_the_next_generation_is_found(path: Path) -> None:
    listener = listen(path)
    async with EngineClient(path) as client:
        async with engine_process(listener, 1, "--step-delay-ms", "2") as engine:
            assert (await client.wait_ready()).generation == 1
            streams = [await client.submit(request([1, 2], ENDLESS)) for _ in range(20)]
            for stream in streams:
                await anext(stream)
            engine.kill()
            for ids, ends in await asyncio.gather(*map(drain, streams)):
                assert [(end.reason, end.code) for end in ends] == [("error", "engine_lost")]
                assert ends[0].prompt_tokens == 2
                assert ends[0].completion_tokens > len(ids), "the first batch was taken before"
            assert not client.ready
        async with engine_process(listener, 2):
            async with asyncio.timeout(45):
                assert (await client.wait_ready()).generation == 2
            stream = await client.submit(request([9, 8], 3))
            assert stream.id > max(old.id for old in streams)
            assert (await drain(stream))[0] == [9, 8, 9]
    listener.close()


async def test_an_engine_that_crashes_by_itself_after_n_tokens(path: Path) -> None:
    listener = listen(path)
    async with EngineClient(path) as client, engine_process(listener, 1, "--crash-after", "50") as engine:
        await client.wait_ready()
        ids, [end] = await drain(await client.submit(request([1], ENDLESS)))
        assert len(ids) == end.completion_tokens == 50, "what was sent before the crash is delivered"
        assert end.code == "engine_lost"
        assert await asyncio.to_thread(engine.wait) == -signal.SIGKILL
    listener.close()


async def test_old_replies_never_reach_new_streams(path: Path) -> None:
    """An engine of the next generation that repeats the old one's ids and frames gets nowhere with them."""
    async with EngineClient(path) as client:
        with running_engine(path, Options(step_delay_s=0.002)) as engine:
            await client.wait_ready()
            old = await client.submit(request([1], ENDLESS))
            await anext(old)
            engine.crash()
            assert (await drain(old))[1][0].code == "engine_lost"
        link = Link(listen(path), Options(generation=2).welcome())
        while not client.ready:
            await asyncio.to_thread(link.poll, 0.01)
        new = await client.submit(request([7], 1))
        [received] = await asyncio.to_thread(link.poll, 5)
        assert isinstance(received, Received)
        link.send(received.connection, Step((Token(old.id, 666),), (Finished(old.id, "stop", 1, 1),)))
        link.send(received.connection, Step((Token(new.id, 7),), (Finished(new.id, "length", 1, 1),)))
        assert await drain(new) == ([7], [Finished(new.id, "length", 1, 1)])
        assert await drain(old) == ([], [])
        link.close()


def forged(generation: int, payload: bytes) -> Callable[[int, int, socket.socket], None]:
    """An engine that answers its gateway with one frame of its own making."""

    def answer(replies: int, size: int, sock: socket.socket) -> None:
        writer = RingWriter(map_ring(replies, size, writable=True), REPLIES, generation)
        writer.write(payload)
        sock.send(b"SPp1" + writer.written.to_bytes(8, "little") + bytes(8))

    return answer


def packet(data: bytes) -> Callable[[int, int, socket.socket], None]:
    def answer(_replies: int, _size: int, sock: socket.socket) -> None:
        sock.send(data)

    return answer


STEP = msgspec.msgpack.encode(Step((Token(1, 5),), ()))


@pytest.mark.parametrize(
    "answer",
    [
        forged(0, STEP),
        forged(2, STEP),
        forged(1, b"\xc1"),
        forged(1, msgspec.msgpack.encode(Abort(1))),
        forged(1, b"\x91" * 100_000),
        packet(bytes(20)),
        packet(b"x"),
        packet(b"SPp1" + b"\xff" * 16),
    ],
    ids=["older", "newer", "garbage", "a-request", "nested", "tag", "short", "positions"],
)
async def test_a_reply_that_breaks_the_protocol_ends_the_connection_and_a_sound_engine_is_found_later(
    path: Path, answer: Callable[[int, int, socket.socket], None]
) -> None:
    listener = listen(path)
    async with EngineClient(path) as client:
        sock, _ = await asyncio.to_thread(listener.accept)
        data, fds, _, _ = socket.recv_fds(sock, 4096, 2)
        hello = msgspec.msgpack.decode(data, type=Hello)
        sock.send(msgspec.msgpack.encode(Options().welcome()))
        await client.wait_ready()
        stream = await client.submit(request([1], ENDLESS))
        answer(fds[1], hello.reply_bytes, sock)
        ids, [end] = await drain(stream)
        assert (ids, end.code) == ([], "engine_lost")
        for fd in fds:
            os.close(fd)
        sock.close()
        listener.close()
        with running_engine(path):
            await client.wait_ready()
            assert (await drain(await client.submit(request([4], 1))))[0] == [4]


@pytest.mark.parametrize(
    "welcome",
    [
        b"",
        b"\xc1",
        b"\x91" * 4000,
        msgspec.msgpack.encode(msgspec.structs.replace(Options().welcome(), version=PROTOCOL_VERSION + 1)),
    ],
    ids=["hangs-up", "garbage", "nested", "version"],
)
async def test_a_bad_welcome_is_no_connection(path: Path, welcome: bytes) -> None:
    listener = listen(path)
    async with EngineClient(path) as client:
        sock, _ = await asyncio.to_thread(listener.accept)
        sock.recv(4096)
        sock.send(welcome)
        sock.close()
        again, _ = await asyncio.to_thread(listener.accept)
        assert not client.ready
        again.close()
    listener.close()


async def test_an_engine_that_does_not_answer_the_hello_is_tried_again(path: Path) -> None:
    listener = listen(path)
    async with EngineClient(path, handshake_limit_s=0.05) as client:
        silent, _ = await asyncio.to_thread(listener.accept)
        again, _ = await asyncio.to_thread(listener.accept)
        assert not client.ready
        silent.close()
        again.close()
    listener.close()


async def poll_until_ready(link: Link, client: EngineClient) -> list[Received | Closed]:
    events: list[Received | Closed] = []
    while not client.ready:
        events += await asyncio.to_thread(link.poll, 0.01)
    return events


async def test_an_engine_that_hangs_is_gone_for_its_streams_and_found_again_when_it_goes_on(path: Path) -> None:
    link = Link(listen(path), Options().welcome())
    async with EngineClient(path, silence_limit_s=0.2) as client:
        await poll_until_ready(link, client)
        stream = await client.submit(request([1], ENDLESS))
        ids, [end] = await drain(stream)  # nobody polls the link
        assert (ids, end.reason, end.code) == ([], "error", "engine_lost")
        with pytest.raises(EngineUnavailableError):
            await client.submit(request([1]))
        events = await poll_until_ready(link, client)
        assert Closed(1, "the gateway closed the connection") in events, "so its requests are aborted"
        link.close()


async def test_what_should_be_kept_is_said_again_to_the_next_engine(path: Path) -> None:
    async with EngineClient(path) as client:
        with pytest.raises(EngineUnavailableError):
            await client.keep(["a"])
        with running_engine(path) as first:
            async with asyncio.timeout(45):
                await client.wait_ready()
                await eventually(lambda: bool(first.keeps))
                assert await client.keep(["b"], ["c"]) == Kept(first.keeps[-1].id, "")
            assert [(keep.pinned, keep.preloaded) for keep in first.keeps] == [(("a",), ()), (("b",), ("c",))]
        with running_engine(path) as second:
            await eventually(lambda: bool(second.keeps))
            assert [(keep.pinned, keep.preloaded) for keep in second.keeps] == [(("b",), ("c",))]
            assert (await client.adapters()).adapters == ()
            assert (await client.pages()).total == 0


async def test_an_engine_that_is_only_idle_is_kept(path: Path) -> None:
    with running_engine(path):
        async with EngineClient(path, silence_limit_s=0.5) as client:
            await client.wait_ready()
            stream = await client.submit(request([3], 1))
            await asyncio.sleep(1.2)
            assert await drain(stream) == ([3], [Finished(stream.id, "length", 1, 1)])
            assert client.ready
            assert client._connection is stream._connection


async def test_an_engine_that_hangs_is_doubted_long_before_it_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PROBE_S", 0.01)
    monkeypatch.setattr(client_module, "RESPONSIVE_S", 0.1)
    with running_engine(path) as engine:
        async with EngineClient(path, silence_limit_s=30) as client:
            await client.wait_ready()
            await drain(await client.submit(request([1])))
            await eventually(lambda: client._patience_s < 1)  # it has told of its first step
            with engine.hung():
                await eventually(lambda: not client.responsive)
                assert client.ready
            await eventually(lambda: client.responsive)


async def test_an_engine_has_as_long_as_it_has_taken_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PROBE_S", 0.01)
    monkeypatch.setattr(client_module, "RESPONSIVE_S", 0.2)
    with running_engine(path) as engine:
        async with EngineClient(path, silence_limit_s=30) as client:
            await client.wait_ready()
            with engine.hung():  # no step yet: it may be compiling
                await asyncio.sleep(0.4)
                assert client.responsive
            await drain(await client.submit(request([1])))
            await eventually(lambda: client._patience_s < 1)  # it has told of its first step
            with engine.hung():
                await eventually(lambda: not client.responsive)
                await asyncio.sleep(0.5)  # so long that the next time need not be measured finely
            await eventually(lambda: client.responsive)
            with engine.hung():
                await asyncio.sleep(0.3)
                assert client.responsive
