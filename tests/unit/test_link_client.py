"""The gateway's end, against the real link: streams, aborts, full rings, the engine's death and return."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
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
    Abort,
    Finished,
    Sampling,
    Submit,
    Token,
    pack_tokens,
)
from stencilpress.engine.ring import MIN_RING_BYTES
from tests.fakes.engine import LOGPROB, Options, listen, running_engine

ROOT = Path(__file__).parents[2]
ENDLESS = 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@asynccontextmanager
async def connected(path: Path, **options: float) -> AsyncIterator[EngineClient]:
    async with EngineClient(path, **options) as client:  # type: ignore[arg-type]
        async with asyncio.timeout(45):
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
    async with asyncio.timeout(45):
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


async def test_streams_go_on_a_few_at_a_time_so_that_others_get_their_turn(path: Path) -> None:
    """Behind a first token, which goes on at once, tokens of one step are handed out over many turns of the loop."""
    turn, went_on, going = 0, Counter[int](), True

    def count() -> None:
        nonlocal turn
        turn += 1
        if going:
            asyncio.get_running_loop().call_soon(count)

    async def read(stream: Stream) -> None:
        await anext(stream)
        async for _ in stream:
            went_on[turn] += 1

    with running_engine(path, Options(step_delay_s=0.3)):
        async with connected(path) as client:
            streams = [await client.submit(request([7], 2)) for _ in range(40)]
            count()
            await asyncio.gather(*map(read, streams))
            going = False
    assert went_on.total() == 40
    assert max(went_on.values()) <= 10


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


async def break_out_of_it(stream: Stream) -> None:
    async for _ in stream:
        break


async def never_read_it(stream: Stream) -> None:
    pass


@pytest.mark.parametrize("leave", [close_it, break_out_of_it, never_read_it])
async def test_leaving_a_stream_aborts_its_request(path: Path, leave: Callable[[Stream], AsyncIterator[None]]) -> None:
    with running_engine(path, Options(step_delay_s=0.001)) as engine:
        async with connected(path) as client:
            await leave(await client.submit(request([1], ENDLESS)))  # type: ignore[misc]
            gc.collect()
            await eventually(lambda: engine.aborts == [1])
            assert (await client.stats()).running == 0
            assert (await drain(await client.submit(request([5], 2))))[0] == [5, 5]


async def test_cancelling_the_reader_of_a_stream_aborts_its_request_though_the_stream_is_still_held(path: Path) -> None:
    with running_engine(path) as engine:
        engine.pause()
        async with connected(path) as client:
            stream = await client.submit(request([1], ENDLESS))
            reader = asyncio.create_task(drain(stream))
            await asyncio.sleep(0)  # now it waits
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await eventually(lambda: engine.aborts == [stream.id])
            tokens, finished = await drain(stream)  # what the engine has to say about it can still be had
            assert (tokens, [one.reason for one in finished]) == ([], ["aborted"])
            assert engine.aborts == [stream.id]


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
    try:
        async with EngineClient(path, **options) as client:  # type: ignore[arg-type]
            while not client.ready:
                await asyncio.to_thread(link.poll, 0.01)
            yield link, client
    finally:
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
        given_up = asyncio.create_task(client.submit(request([2] * 1000)))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        with suppress(EngineBusyError):
            while True:  # leave no room for the smallest request either
                kept.append(await client.submit(request([1])))
        for stream in kept:
            client.abort(stream.id)
        await asyncio.sleep(0)  # the end of this turn of the loop publishes
        messages = [e.message for e in await asyncio.to_thread(link.poll, 1) if isinstance(e, Received)]
        assert messages[len(kept) :] == [Abort(stream.id) for stream in kept], "aborts have room of their own"
        last = await client.submit(request([3]))
        [received] = await asyncio.to_thread(link.poll, 1)
        assert isinstance(received, Received)
        assert received.message.id == last.id


async def test_a_request_given_up_in_the_moment_it_goes_out_is_aborted(path: Path) -> None:
    async with idle_engine(path, request_ring_bytes=MIN_RING_BYTES) as (link, client):
        kept = [await client.submit(request([1] * 1000)) for _ in range(3)]
        late = asyncio.create_task(client.submit(request([1] * 1000)))
        await asyncio.sleep(0)
        connection = client._connection
        assert connection is not None
        assert len(connection._outbox) == 1
        messages = [e.message for e in link.poll(1) if isinstance(e, Received)]
        while connection._outbox:  # noqa: ASYNC110 - ends in the turn in which it was written, before its task runs again
            await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        while not isinstance(messages[-1], Abort):
            messages += [e.message for e in await asyncio.to_thread(link.poll, 1) if isinstance(e, Received)]
        assert messages[-1] == Abort(messages[-2].id)
        assert len(messages) == len(kept) + 2


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
