"""The gateway's end, against the real link: streams, aborts, full rings, the engine's death and return."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import uvloop

from stencilpress.engine.client import (
    EngineBusyError,
    EngineClient,
    EngineUnavailableError,
    Stream,
)
from stencilpress.engine.link import Link, Received
from stencilpress.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Finished,
    Hello,
    Sampling,
    Step,
    Submit,
    Token,
    pack_tokens,
)
from stencilpress.engine.ring import MIN_RING_BYTES, REPLIES, RingWriter, map_ring
from tests.fakes.engine import LOGPROB, Options, listen, running_engine

ROOT = Path(__file__).parents[2]
ENDLESS = 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@asynccontextmanager
async def connected(path: Path, **options: float) -> AsyncIterator[EngineClient]:
    async with EngineClient(path, **options) as client:  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            await client.wait_ready()
        yield client


def request(prompt: list[int], max_tokens: int = 4, adapter: str = "", logprobs: int = -1) -> Submit:
    return Submit(0, pack_tokens(prompt), adapter, max_tokens, Sampling(logprobs=logprobs))


async def drain(stream: Stream) -> tuple[list[int], list[Finished]]:
    """All token ids of a stream and all terminal messages (there must be one)."""
    ids: list[int] = []
    ends: list[Finished] = []
    async for tokens, finished in stream:
        ids += [token.token for token in tokens]
        ends += [finished] if finished else []
    return ids, ends


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is in another thread
            await asyncio.sleep(0.005)


async def round_trip(path: Path) -> None:
    async with connected(path) as client:
        assert client.ready
        assert client.welcome.max_model_len == Options().max_model_len
        streams = [await client.submit(request([n, n + 1], 5)) for n in range(1, 60)]
        for n, (ids, ends) in enumerate(await asyncio.gather(*map(drain, streams)), 1):
            assert ids == [n, n + 1, n, n + 1, n]
            assert [(e.reason, e.prompt_tokens, e.completion_tokens) for e in ends] == [("length", 2, 5)]
        assert (await client.stats()).completion_tokens == 59 * 5


async def test_many_streams_at_once_each_get_their_own_tokens_and_one_end(path: Path) -> None:
    with running_engine(path):
        await round_trip(path)


def test_the_same_on_uvloop(path: Path) -> None:
    with running_engine(path), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(round_trip(path))


async def test_fields_cross_unchanged_and_logprobs_come_back(path: Path) -> None:
    with running_engine(path) as engine:
        async with connected(path) as client:
            submit = Submit(
                0,
                pack_tokens([8]),
                "digest",
                1,
                Sampling(seed=2**63 - 1, logprobs=1),
                (8,),
                2**31,
                2.5,
                bytes(range(16)),
            )
            stream = await client.submit(submit)
            tokens, finished = await anext(stream)
            assert tokens == [Token(stream.id, 8, LOGPROB, ((8, LOGPROB),))]
            assert finished == Finished(stream.id, "stop", 1, 1)
            assert engine.submits == [msgspec.structs.replace(submit, id=stream.id)]


async def test_errors_of_the_engine_end_the_stream(path: Path) -> None:
    with running_engine(path, Options(missing=frozenset({"gone"}), max_model_len=4)):
        async with connected(path) as client:
            _, [unavailable] = await drain(await client.submit(request([1], adapter="gone")))
            _, [exceeded] = await drain(await client.submit(request([1] * 4)))
            assert (unavailable.code, exceeded.code) == ("adapter_unavailable", "context_exceeded")
            assert (await client.ensure("gone")).error == "no such adapter"
            assert (await client.ensure("there")).error == ""


async def test_tokens_that_came_meanwhile_arrive_as_one_batch(path: Path) -> None:
    with running_engine(path, Options(tokens_per_step=3)):
        async with connected(path) as client:
            stream = await client.submit(request([1, 2, 3], 30))
            await eventually(lambda: stream._inbox.finished is not None)
            tokens, finished = await anext(stream)
            assert [token.token for token in tokens] == [1, 2, 3] * 10
            assert finished is not None
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_an_abort_is_answered_on_the_stream(path: Path) -> None:
    with running_engine(path, Options(step_delay_s=0.01)) as engine:
        async with connected(path) as client:
            stream = await client.submit(request([1], ENDLESS))
            await anext(stream)
            client.abort(stream.id)
            client.abort(12345)
            _, [finished] = await drain(stream)
            assert finished.reason == "aborted"
            await client.stats()
            assert engine.aborts == [stream.id]


async def close_it(stream: Stream) -> None:
    await anext(stream)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def cancel_it(stream: Stream) -> None:
    await anext(stream)
    started = asyncio.Event()

    async def consume() -> None:
        started.set()
        await drain(stream)

    task = asyncio.create_task(consume())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def break_out_of_it(stream: Stream) -> None:
    async for _ in stream:
        break


async def never_read_it(stream: Stream) -> None:
    pass


@pytest.mark.parametrize("leave", [close_it, cancel_it, break_out_of_it, never_read_it])
async def test_leaving_a_stream_aborts_its_request(path: Path, leave: Callable[[Stream], AsyncIterator[None]]) -> None:
    with running_engine(path, Options(step_delay_s=0.001)) as engine:
        async with connected(path) as client:
            await leave(await client.submit(request([1], ENDLESS)))  # type: ignore[misc]
            gc.collect()
            await eventually(lambda: engine.aborts == [1])
            assert (await client.stats()).running == 0
            assert (await drain(await client.submit(request([5], 2))))[0] == [5, 5]


async def test_a_stream_that_ended_is_not_aborted(path: Path) -> None:
    with running_engine(path) as engine:
        async with connected(path) as client:
            stream = await client.submit(request([1]))
            await drain(stream)
            await stream.aclose()
            stream = await client.submit(request([1]))
            while (await client.stats()).running:
                pass
            del stream
            gc.collect()
            await client.stats()
            assert engine.aborts == []


async def test_without_an_engine_calls_say_so_at_once(path: Path) -> None:
    async with EngineClient(path) as client:
        assert not client.ready
        with pytest.raises(EngineUnavailableError):
            await client.submit(request([1]))
        with pytest.raises(EngineUnavailableError):
            await client.stats()
        with pytest.raises(EngineUnavailableError):
            _ = client.welcome
        client.abort(1)


async def test_a_prompt_that_no_ring_holds_is_a_value_error(path: Path) -> None:
    with running_engine(path):
        async with connected(path, request_ring_bytes=MIN_RING_BYTES) as client:
            with pytest.raises(ValueError, match="at most half fits"):
                await client.submit(request([1] * MIN_RING_BYTES))
            assert await drain(await client.submit(request([3], 1)))


async def test_closing_the_client_ends_its_streams_and_the_engine_drops_them(path: Path) -> None:
    with running_engine(path, Options(step_delay_s=0.01)):
        async with connected(path) as other:
            async with connected(path) as client:
                stream = await client.submit(request([1], ENDLESS))
                await anext(stream)
            _, [finished] = await drain(stream)
            assert finished.code == "engine_lost"
            while (await other.stats()).running:
                pass


async def test_a_long_socket_path(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    with running_engine(folder / "engine.sock"):
        await round_trip(folder / "engine.sock")


async def test_a_full_reply_ring_parks_and_resumes_without_loss_or_disorder(path: Path) -> None:
    with running_engine(path, Options(tokens_per_step=4)) as engine:
        async with connected(path, reply_ring_bytes=MIN_RING_BYTES) as client, connected(path) as other:
            prompt = list(range(1000, 3000))
            streams = [await client.submit(request(prompt, 2000, logprobs=1)) for _ in range(3)]
            first: list[int] = []
            for _ in range(5):
                tokens, _ = await anext(streams[0])
                first += [token.token for token in tokens]
                while not engine.parked:  # the loop stands still, as in a gateway that is stuck
                    time.sleep(0.001)  # noqa: ASYNC251
            results = await asyncio.gather(*map(drain, streams))
            assert first + results[0][0] == results[1][0] == results[2][0] == prompt
            assert [end.completion_tokens for _, [end] in results] == [2000] * 3
            assert (await drain(await other.submit(request([1], 2))))[0] == [1, 1]


async def test_a_stuck_gateway_does_not_slow_another_down(path: Path) -> None:
    with running_engine(path, Options(tokens_per_step=4)) as engine:
        async with connected(path, reply_ring_bytes=MIN_RING_BYTES) as client:
            stuck = await client.submit(request([1], ENDLESS, logprobs=1))
            answers: list[list[int]] = []

            async def use_another() -> None:
                async with connected(path) as other:
                    answers.append((await drain(await other.submit(request([1, 2], 1000))))[0])

            elsewhere = threading.Thread(target=lambda: asyncio.run(use_another()))
            await anext(stuck)
            while not engine.parked:
                time.sleep(0.001)  # noqa: ASYNC251 - this loop is the stuck one
            elsewhere.start()
            elsewhere.join()
            assert answers == [[1, 2] * 500]
            await stuck.aclose()


@asynccontextmanager
async def idle_engine(path: Path, **options: float) -> AsyncIterator[tuple[Link, EngineClient]]:
    """A client, and a link that reads nothing unless the test polls it."""
    link = Link(listen(path), Options().welcome())
    async with EngineClient(path, **options) as client:  # type: ignore[arg-type]
        while not client.ready:
            await asyncio.to_thread(link.poll, 0.01)
        yield link, client
    link.close()


async def test_a_full_request_ring_makes_submit_wait_in_line(path: Path) -> None:
    async with idle_engine(path, request_ring_bytes=MIN_RING_BYTES) as (link, client):
        large = [1] * 1000
        submits = [asyncio.create_task(client.submit(request([*large, n]))) for n in range(12)]
        await asyncio.sleep(0.05)
        waiting = sum(not task.done() for task in submits)
        assert 6 < waiting < 12
        arrived: list[int] = []
        while len(arrived) < 12:
            for event in await asyncio.to_thread(link.poll, 0.01):
                assert isinstance(event, Received)
                assert isinstance(event.message, Submit)
                arrived.append(event.message.prompt[-4])
        assert arrived == list(range(12))
        await asyncio.gather(*submits)


async def test_a_request_ring_that_stays_full_makes_submit_fail_in_time(path: Path) -> None:
    async with idle_engine(path, request_ring_bytes=MIN_RING_BYTES, submit_limit_s=0.1) as (link, client):
        kept = [await client.submit(request([1] * 1000)) for _ in range(3)]
        for _ in range(2):
            with pytest.raises(EngineBusyError):
                await client.submit(request([2] * 1000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.submit(request([2] * 1000))
        client.abort(kept[0].id)
        messages = [e.message for e in await asyncio.to_thread(link.poll, 1) if isinstance(e, Received)]
        assert [type(message) for message in messages] == [Submit, Submit, Submit, Abort], "an abort still finds room"
        stream = await client.submit(request([3]))
        await asyncio.to_thread(link.poll, 1)
        assert stream.id == 7


async def test_more_aborts_than_there_is_room_for_all_arrive(path: Path) -> None:
    async with idle_engine(path, request_ring_bytes=MIN_RING_BYTES) as (link, client):
        streams = [await client.submit(request([1])) for _ in range(50)]
        arrived: list[int] = []

        def poll() -> None:
            arrived.extend(
                e.message.id for e in link.poll(0.01) if isinstance(e, Received) and isinstance(e.message, Abort)
            )

        for _ in range(20):  # again and again: far more than the ring holds
            for stream in streams:
                client.abort(stream.id)
        while len(arrived) < 20 * len(streams):
            await asyncio.to_thread(poll)
        assert arrived == [stream.id for stream in streams] * 20


async def test_the_waiters_of_a_lost_engine_are_told(path: Path) -> None:
    async with idle_engine(path, request_ring_bytes=MIN_RING_BYTES) as (link, client):
        accepted = [await client.submit(request([1] * 1000)) for _ in range(3)]
        waiting = asyncio.create_task(client.submit(request([1] * 1000)))
        question = asyncio.create_task(client.stats())
        await asyncio.sleep(0)
        link.close()
        with pytest.raises(EngineUnavailableError):
            await waiting
        with pytest.raises(EngineUnavailableError):
            await question
        for stream in accepted:
            assert [end.code for end in (await drain(stream))[1]] == ["engine_lost"]


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
            async with asyncio.timeout(20):
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
