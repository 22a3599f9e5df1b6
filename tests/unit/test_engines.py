"""Several engines behind one face: affinity, bounded loads, a lost engine. Real clients, fake engines in threads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from stencilpress.engine import client as client_module
from stencilpress.engine.client import EngineClient, EngineUnavailableError, Stream
from stencilpress.engine.messages import MAX_HELD_SHOWN, Sampling, Submit, pack_tokens
from stencilpress.gateway import engines as engines_module
from stencilpress.gateway.engines import ALWAYS_TAKEN, LOAD_FACTOR, Engines, ranking
from tests.fakes.engine import FakeEngine, Options, running_engine

COUNT = 3


def digest(number: int) -> str:
    return f"{number:064x}"


def submit(adapter: str = "", tenant: int = 0) -> Submit:
    return Submit(0, pack_tokens([1, 2]), adapter, 1000, Sampling(), tenant=tenant)


@dataclass
class Fleet:
    engines: Engines
    fakes: list[FakeEngine]

    async def loaded(self, adapter: str = "", count: int = 1, tenant: int = 0) -> list[Stream]:
        """Streams that stay open: the fakes are paused."""
        return [await self.engines.submit(submit(adapter, tenant)) for _ in range(count)]

    def open_of(self, tenant: int) -> list[int]:
        return [client.open_requests_of(tenant) for client in self.engines._clients]

    async def ready(self, count: int) -> None:
        async with asyncio.timeout(45):
            while sum(client.ready for client in self.engines._clients) != count:  # noqa: ASYNC110 - of all, not of one
                await asyncio.sleep(0.005)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        paths = [tmp_path / f"{number}.sock" for number in range(COUNT)]
        fakes = [stack.enter_context(running_engine(path, Options())) for path in paths]
        engines = await stack.enter_async_context(Engines([EngineClient(path) for path in paths]))
        fleet = Fleet(engines, fakes)
        await fleet.ready(COUNT)
        for fake in fakes:
            fake.pause()
        yield fleet


def test_adapters_are_spread_evenly_and_only_a_lost_engines_move() -> None:
    adapters = [digest(number) for number in range(3000)]
    before = Counter(ranking(adapter, COUNT)[0] for adapter in adapters)
    assert all(900 < before[index] < 1100 for index in range(COUNT))
    assert all(sorted(ranking(adapter, COUNT)) == list(range(COUNT)) for adapter in adapters)
    second = Counter(ranking(adapter, COUNT)[1] for adapter in adapters if ranking(adapter, COUNT)[0] == 0)
    assert all(400 < second[index] < 600 for index in (1, 2))  # its adapters go to all the others
    grown = [(ranking(adapter, COUNT)[0], ranking(adapter, COUNT + 1)[0]) for adapter in adapters]
    assert all(new in (old, COUNT) for old, new in grown)  # a new engine takes, the others keep


async def test_an_adapters_requests_meet_and_the_bases_go_to_whoever_has_least(fleet: Fleet) -> None:
    home = ranking(digest(1), COUNT)[0]
    streams = await fleet.loaded(digest(1), ALWAYS_TAKEN)
    assert fleet.engines.open_requests == [ALWAYS_TAKEN * (index == home) for index in range(COUNT)]
    streams += await fleet.loaded("", 2 * ALWAYS_TAKEN)
    assert fleet.engines.open_requests == [ALWAYS_TAKEN] * COUNT
    for stream in streams:
        await stream.aclose()
    assert fleet.engines.open_requests == [0] * COUNT


async def test_one_hot_adapter_overflows_to_all_within_the_bound(fleet: Fleet) -> None:
    streams = await fleet.loaded(digest(7), 300)
    loads = fleet.engines.open_requests
    assert sum(loads) == 300
    assert max(loads) <= LOAD_FACTOR * 100 + 1
    assert min(loads) > 0
    assert loads[ranking(digest(7), COUNT)[0]] == max(loads)
    for stream in streams:
        await stream.aclose()


async def test_a_lost_engines_adapters_move_and_come_back(fleet: Fleet, tmp_path: Path) -> None:
    home, heir = ranking(digest(1), COUNT)[:2]
    [stream] = await fleet.loaded(digest(1))
    fleet.fakes[home].crash()
    *_, (_, finished) = [batch async for batch in stream]
    assert finished is not None
    assert finished.code == "engine_lost"
    assert fleet.engines.choose(digest(1)) == heir
    [moved] = await fleet.loaded(digest(1))
    assert fleet.engines.open_requests[heir] == 1
    await moved.aclose()
    with running_engine(tmp_path / f"{home}.sock", Options()):
        await fleet.ready(COUNT)
        assert fleet.engines.choose(digest(1)) == home


async def test_the_narrowest_limits_hold_for_all(tmp_path: Path) -> None:
    limits = [Options(max_model_len=100, max_lora_rank=64), Options(max_model_len=200, max_lora_rank=8)]
    paths = [tmp_path / f"{number}.sock" for number in range(2)]
    async with AsyncExitStack() as stack:
        for path, options in zip(paths, limits, strict=True):
            stack.enter_context(running_engine(path, options))
        engines = await stack.enter_async_context(Engines([EngineClient(path) for path in paths]))
        fleet = Fleet(engines, [])
        await fleet.ready(2)
        assert (engines.welcome.max_model_len, engines.welcome.max_lora_rank) == (100, 8)


async def test_without_any_engine_it_is_said(tmp_path: Path) -> None:
    async with Engines([EngineClient(tmp_path / "nobody.sock")]) as engines:
        assert not engines.ready
        assert await engines.stats() == [None]
        with pytest.raises(EngineUnavailableError):
            await engines.submit(submit())
        with pytest.raises(EngineUnavailableError):
            _ = engines.welcome


async def test_the_numbers_of_each_engine_are_told(fleet: Fleet) -> None:
    streams = await fleet.loaded("", 3)
    fleet.fakes[1].crash()
    await fleet.ready(COUNT - 1)
    assert len(streams) == COUNT
    assert [stats and stats.running for stats in await fleet.engines.stats()] == [1, None, 1]


async def test_pins_beyond_what_an_engine_takes_do_not_cost_the_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines_module, "MAX_KEPT", 2)
    digests = [digest(number) for number in range(30)]
    await fleet.engines.keep(digests, digests[:1])
    for index, fake in enumerate(fleet.fakes):
        mine = [one for one in digests if ranking(one, COUNT)[0] == index]
        assert list(fake.keeps[-1].pinned) == mine[:2]
    assert caplog.messages[-1].startswith("24 adapters more")


async def test_adapters_are_kept_where_their_requests_go_and_forgotten_everywhere(fleet: Fleet) -> None:
    digests = [digest(number) for number in range(30)]
    assert all(kept is not None and not kept.error for kept in await fleet.engines.keep(digests[:20], digests[20:]))
    for index, fake in enumerate(fleet.fakes):
        mine = [one for one in digests if ranking(one, COUNT)[0] == index]
        [keep] = fake.keeps
        assert [*keep.pinned, *keep.preloaded] == mine
    await fleet.engines.forget([digests[0]])
    assert [fake.forgotten for fake in fleet.fakes] == [[digests[0]]] * COUNT
    fleet.fakes[1].crash()
    await fleet.ready(COUNT - 1)
    assert await fleet.engines.adapters() == [[], None, []]
    pages = [await fleet.engines.pages_of(index) for index in range(COUNT)]
    assert [one and one.total for one in pages] == [0, None, 0]


async def test_each_engine_tells_all_that_it_holds_and_one_alone_forgets(fleet: Fleet) -> None:
    digests = [digest(number) for number in range(2 * MAX_HELD_SHOWN)]
    fleet.fakes[0].held.update(digests)
    fleet.fakes[1].held.update(digests[:7])
    assert [await fleet.engines.held_by(index) for index in range(COUNT)] == [digests, digests[:7], []]
    assert await fleet.engines.forget_on(0, set(digests[5:100]))
    assert fleet.fakes[0].forgotten == digests[5:100]
    assert [len(fake.held) for fake in fleet.fakes] == [len(digests) - 95, 7, 0]
    fleet.fakes[1].crash()
    await fleet.ready(COUNT - 1)
    assert await fleet.engines.held_by(1) is None
    assert not await fleet.engines.forget_on(1, digests[:1])
    assert await fleet.engines.forget_on(1, ())


async def test_a_request_is_taken_over_by_another_engine_or_by_the_first_that_is_back(
    fleet: Fleet, tmp_path: Path
) -> None:
    for fake in fleet.fakes[1:]:
        fake.crash()
    await fleet.ready(1)
    stream = await fleet.engines.resubmit(submit(), 5)
    assert stream is not None
    assert fleet.engines.open_requests == [1, 0, 0]
    await stream.aclose()
    fleet.fakes[0].crash()
    await fleet.ready(0)
    assert await fleet.engines.resubmit(submit(), 0.01) is None
    waiting = asyncio.create_task(fleet.engines.resubmit(submit(), 60))
    with running_engine(tmp_path / "2.sock", Options()) as back:
        stream = await waiting
        assert stream is not None
        async with asyncio.timeout(45):
            while not back.submits:  # noqa: ASYNC110 - it reads in a thread of its own
                await asyncio.sleep(0.005)
        await stream.aclose()
    assert len(back.submits) == 1


async def test_nothing_waits_for_an_engine_when_all_are_closed(tmp_path: Path) -> None:
    async with Engines([EngineClient(tmp_path / "nobody.sock")]) as engines:
        waiting = asyncio.create_task(engines.resubmit(submit(), 60))
        await asyncio.sleep(0)
        await engines.close()
        assert await waiting is None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PROBE_S", 0.01)
    monkeypatch.setattr(client_module, "RESPONSIVE_S", 0.1)


@pytest.mark.usefixtures("impatient")
async def test_a_tenants_requests_spread_over_engines_only_while_some_wait_at_home(fleet: Fleet) -> None:
    """Three tenants with an adapter each, every one at home on another engine: no engine has more than the others."""
    homes = [ranking(digest(number), COUNT)[0] for number in range(100)]
    own = [digest(homes.index(home)) for home in range(COUNT)]
    streams = [await fleet.loaded(adapter, 1, tenant) for _ in range(30) for tenant, adapter in enumerate(own)]
    assert [fleet.open_of(tenant) for tenant in range(COUNT)] == [[30, 0, 0], [0, 30, 0], [0, 0, 30]]
    fleet.fakes[0].waiting = 5
    async with asyncio.timeout(45):
        while not fleet.engines._clients[0].crowded:  # noqa: ASYNC110 - the engine is in another thread
            await asyncio.sleep(0.005)
    streams += [await fleet.loaded(adapter, 1, tenant) for _ in range(6) for tenant, adapter in enumerate(own)]
    assert fleet.open_of(0)[0] == 30, "it has more than its part there"
    assert sum(fleet.open_of(0)) == 36
    assert [fleet.open_of(1), fleet.open_of(2)] == [[0, 36, 0], [0, 0, 36]]
    assert fleet.engines.choose(own[0]) == 0, "that is where it is kept and checked"
    for [stream] in streams:
        await stream.aclose()
    assert [fleet.open_of(tenant) for tenant in range(COUNT)] == [[0] * COUNT] * COUNT


@pytest.mark.usefixtures("impatient")
async def test_an_engine_that_does_not_answer_is_passed_over(fleet: Fleet) -> None:
    home, heir = ranking(digest(1), COUNT)[:2]
    for fake in fleet.fakes:
        fake.resume()
    for client in fleet.engines._clients:
        async for _ in await client.submit(Submit(0, pack_tokens([1, 2]), "", 3, Sampling())):
            pass
    async with asyncio.timeout(45):
        while fleet.engines._clients[home]._patience_s > 1:  # noqa: ASYNC110 - until it has told of its first step
            await asyncio.sleep(0.005)
    with fleet.fakes[home].hung():
        async with asyncio.timeout(45):
            while fleet.engines._clients[home].responsive:  # noqa: ASYNC110 - the engine is in another thread
                await asyncio.sleep(0.005)
        assert fleet.engines.responsive
        assert fleet.engines.choose(digest(1)) == heir
