"""Live pictures: rates from meters, sums over gateways, listeners that come, are slow, and go; samples of engines."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stencilpress.engine.messages import Stats
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.engine_reader import EngineNow, EngineReader
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.live import MAX_LISTENERS, LiveFeed, live_feed
from stencilpress.gateway.live_counts import LiveCounts, LiveSlice, LiveTenant
from stencilpress.gateway.live_picture import Sampler
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.peers import ask_metrics, serve_peers
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.usage.engine_sums import EngineSum
from stencilpress.gateway.usage.recorder import Admitted, Meter, Recorder
from stencilpress.gateway.usage.refusals import RefusalCounts

STATS = Stats(0, 1, 2, 100, 40, 30, 30, 5, 9, 10, 100, 50, 0, 3, 1, adapters_per_step={0: 4, 2: 6})


class Engines:
    """In place of an engine view: two engines, and the names of tenants."""

    def __init__(self) -> None:
        self.now: list[Stats | None] = [STATS, None]
        self.asked = 0

    async def stats(self) -> Sequence[EngineNow]:
        self.asked += 1
        return [EngineNow(number, stats, None, 0.0, 0) for number, stats in enumerate(self.now, 1)]

    async def tenants(self, ids: set[int]) -> dict[int, str]:
        return {one: f"tenant-{one}" for one in ids}


def feed_of(slices: list[LiveSlice], engines: Engines | None = None, interval_s: float = 0.01) -> LiveFeed:
    async def ask() -> list[LiveSlice]:
        return slices

    return LiveFeed(cast("EngineReader", engines or Engines()), ask, 2, interval_s)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Database(f"sqlite:///{tmp_path / 'catalog.db'}"), tmp_path / "usage", 1 << 20)


def meter(recorder: Recorder, tenant_id: int, prompt_tokens: int = 10) -> Meter:
    return recorder.open(Admitted("req", tenant_id, "kkkkkkkkkkkk", "", 0, prompt_tokens), 0.0)


def test_rates_are_what_came_since_the_last_look(recorder: Recorder) -> None:
    now = [100.0]
    live = LiveCounts(3, clock=lambda: now[0])
    before = meter(recorder, 7)
    old = live.began(7, before)
    before.deliver(5)
    first = live.look()
    assert (first.window_s, first.tenants) == (0.0, [LiveTenant(7, open=1, waiting=1)])
    before.first(0.1)
    before.deliver(3)
    new = live.began(7, meter(recorder, 7, prompt_tokens=20))
    live.refused(8, "tokens_per_day")
    now[0] += 1
    assert live.look() is first  # too soon
    now[0] += 1
    second = live.look()
    assert (second.gateway, second.window_s) == (3, 2.0)
    seven, eight = second.tenants
    assert (seven.open, seven.waiting, seven.requests, seven.prompt_tokens, seven.completion_tokens) == (2, 1, 1, 20, 3)
    assert (list(seven.ttft.values()), eight.refused) == ([1], {"tokens_per_day": 1})
    before.deliver(4)
    live.ended(old, failed=True)
    live.ended(new, failed=False)
    now[0] += 2
    [third] = live.look().tenants
    assert (third.open, third.completion_tokens, third.failures, third.ttft) == (0, 4, 1, {})
    recorder.close()


def test_nothing_is_kept_while_nobody_looks(recorder: Recorder) -> None:
    now = [100.0]
    live = LiveCounts(1, clock=lambda: now[0])
    live.look()
    now[0] += 60
    request = live.began(7, meter(recorder, 7))
    live.refused(7, "tokens_per_day")
    assert live._window is None
    live.ended(request, failed=False)
    assert not live._open
    assert live.look().tenants == []
    recorder.close()


async def test_pictures_are_sums_over_gateways_and_a_tenant_has_its_own_alone() -> None:
    slices = [
        LiveSlice(1, 2.0, [LiveTenant(1, 3, 1, 4, 0, 100, 60, {"a": 2}, {10: 4}), LiveTenant(2, 1, 0, 0, 0, 0, 20)]),
        LiveSlice(2, 4.0, [LiveTenant(1, 2, 0, 4, 4, 100, 40, {}, {10: 1, 50: 5})]),
        LiveSlice(3, 0.0, [LiveTenant(1, 1, 1, 99, 99, 99, 99)]),  # its first look
    ]
    feed = feed_of(slices)
    with feed.listen() as everybody, feed.listen(2) as one, feed.listen(9) as nobody:
        all_, two, nine = [json.loads(await anext(aiter(listener))) for listener in (everybody, one, nobody)]
    assert [(row["tenant"], row["open"], row["waiting"]) for row in all_["tenants"]] == [
        ("tenant-1", 6, 2),
        ("tenant-2", 1, 0),
    ]
    first = all_["tenants"][0]
    assert (first["requests_per_s"], first["prompt_tokens_per_s"], first["completion_tokens_per_s"]) == (3, 75, 40)
    assert (first["failures_per_s"], first["refusals_per_s"]) == (1, {"a": 1.0})
    assert (all_["total"]["completion_tokens_per_s"], all_["total"]["open"]) == (50, 7)
    assert all_["ttft_ms"]["p50"] == pytest.approx(1.1**10, rel=0.05)
    assert all_["ttft_ms"]["p99"] == pytest.approx(1.1**50, rel=0.05)
    assert (all_["gateways"], all_["gateways_up"]) == (2, 3)
    assert [(row["engine"], row["up"]) for row in all_["engines"]] == [(1, True), (2, False)]
    assert (two["total"]["tenant"], two["total"]["completion_tokens_per_s"]) == ("tenant-2", 10)
    assert (two["tenants"], two["engines"], two["gateways"]) == ([], [], 0)
    assert nine["total"] == {**two["total"], "tenant": "tenant-9", "open": 0, "completion_tokens_per_s": 0}


async def test_gateways_ask_each_other(recorder: Recorder) -> None:
    names = [f"stencilpress-test-{secrets.token_hex(8)}" for _ in range(3)]
    gateways = [Metrics(number) for number in (1, 2, 3)]
    servers = []
    for name, metrics in zip(names[:2], gateways, strict=False):  # the third does not answer
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
        servers.append(await serve_peers(listener, metrics))
        metrics.live.began(7, meter(recorder, 7))
    settings = GatewaySettings(
        model_dir="", database_url="", engine_socket="", http_fd=-1, gateway=1, peers=",".join(names)
    )
    with live_feed(settings, gateways[0], cast("EngineReader", Engines())).listen() as listener_:
        picture = json.loads(await anext(listener_))
    assert (picture["gateways"], picture["gateways_up"], picture["total"]["open"]) == (3, 2, 2)
    assert [snapshot.gateway for snapshot in await ask_metrics(names, 1)] == [2]
    for server in servers:
        server.close()
    recorder.close()


async def test_rates_of_an_engine_are_since_the_picture_before() -> None:
    sampler = Sampler()
    sampler.take([], [EngineNow(1, STATS, None, 0.0, 0)])
    assert (sampler.engines[0].steps_per_s, sampler.engines[0].adapters_per_step) == (0, None)
    later = msgspec.structs.replace(STATS, steps=30, adapters_per_step={0: 4, 2: 16, 4: 10})
    await asyncio.sleep(0)
    sampler.take([], [EngineNow(1, later, None, 0.0, 0)])
    assert sampler.engines[0].adapters_per_step == 3.0
    assert sampler.engines[0].steps_per_s > 0
    anew = msgspec.structs.replace(STATS, steps=2)
    sampler.take([], [EngineNow(1, anew, None, 0.0, 0)])
    assert sampler.engines[0].steps_per_s == 0


async def test_a_slow_listener_gets_the_newest_picture_and_the_sampler_ends_with_the_last() -> None:
    engines = Engines()
    feed = feed_of([], engines)
    with feed.listen() as fast:
        with feed.listen() as slow:
            pictures = [await anext(fast) for _ in range(5)]
            assert await anext(slow) == pictures[-1]
            asked = engines.asked
        assert asked < 8
        task = feed._task
    assert task is not None
    await asyncio.wait([task])
    assert feed._task is None
    with feed.listen() as again:
        await anext(again)


async def test_a_feed_that_closes_ends_its_listeners_and_there_are_only_so_many() -> None:
    feed = feed_of([])
    listening = [feed.listen() for _ in range(MAX_LISTENERS)]
    listeners = [one.__enter__() for one in listening]
    with pytest.raises(UnavailableError), feed.listen():
        pass
    feed.close()
    assert [picture async for picture in listeners[0]] == []
    for one in listening:
        one.__exit__(None, None, None)
    with pytest.raises(UnavailableError), feed.listen():
        pass


def counted(now: Stats | None, before: Stats | None) -> dict[str, Any]:
    return msgspec.structs.asdict(EngineSum.between(before, now))


def test_an_engines_counters_are_subtracted_and_one_that_began_anew_is_taken_whole() -> None:
    later = msgspec.structs.replace(STATS, steps=15, completion_tokens=80, adapters_per_step={0: 5, 2: 6, 3: 4})
    one = counted(later, STATS)
    assert (one["samples"], one["gauges"]["running"], one["peaks"]["waiting"]) == (1, 1, 2)
    assert (one["counters"]["steps"], one["counters"]["completion_tokens"]) == (5, 30)
    assert one["adapters_per_step"] == {0: 1, 3: 4}
    anew = counted(msgspec.structs.replace(STATS, steps=2, completion_tokens=7), STATS)
    assert (anew["counters"]["steps"], anew["counters"]["completion_tokens"]) == (2, 7)
    assert counted(None, STATS)["down"] == 1
    assert counted(STATS, None)["counters"] == {}


async def test_refusals_wait_for_a_catalog_that_is_away(db: Database, tmp_path: Path) -> None:
    from stencilpress.gateway.catalog.refusals import refusal_series
    from stencilpress.gateway.catalog.series import Axis

    counts = RefusalCounts(clock=lambda: 1_700_000_000.0)
    counts.add(1, "tokens_per_day", watched=False)
    async with Database(f"sqlite:///{tmp_path / 'empty.db'}") as away:
        with pytest.raises(UnavailableError):
            await counts.flush(away)
    counts.add(1, "tokens_per_day", watched=False)
    await counts.flush(db)
    await counts.flush(db)
    minute = 1_700_000_000 // 60 * 60
    assert await refusal_series(db, 1, Axis("minute", minute, 60, 1)) == {"tokens_per_day": [(2, 0)]}
