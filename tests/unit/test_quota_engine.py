"""Reservations under pressure: a thousand at once, on one process and on three that share a Valkey; outages."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stencilpress.gateway.errors import InsufficientQuotaError, RateLimitError, UnavailableError
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.quota.answers import duration
from stencilpress.gateway.quota.calendar import Calendar, periods_at
from stencilpress.gateway.quota.engine import Quotas, Reservation
from stencilpress.gateway.quota.guard import GuardedStore
from stencilpress.gateway.quota.local import LocalStore
from stencilpress.gateway.quota.plan import Quota
from stencilpress.gateway.quota.shared import SharedStore
from stencilpress.gateway.quota.terms import Levels, Periods, Seeds
from stencilpress.gateway.settings import FailurePolicy
from tests.valkey import running_valkey

ROOT = Path(__file__).parents[2]
TOKENS = 7
ONE_LIMIT = {
    "concurrent_streams": (Quota(concurrent_streams=100), 100),
    "requests_per_minute": (Quota(requests_per_minute=100), 100),
    "tokens_per_minute": (Quota(tokens_per_minute=1000), 142),
    "tokens_per_day": (Quota(tokens_per_day=1000), 128),  # 100 are used before
    "tokens_per_month": (Quota(tokens_per_month=1000), 114),  # 200 are
}


async def seed(_tenant: int, _periods: Periods) -> Seeds:
    await asyncio.sleep(0)
    return Seeds(100, 200)


@pytest.fixture
def valkey() -> Iterator[Any]:
    with running_valkey() as server:
        yield server


@asynccontextmanager
async def shared_quotas(url: str, policy: FailurePolicy = "local") -> AsyncIterator[Quotas]:
    metrics = Metrics()
    quotas = Quotas(GuardedStore(SharedStore(url), policy, metrics.quota_store_failures), seed, metrics)
    task = asyncio.create_task(quotas.run())
    yield quotas
    task.cancel()
    await asyncio.wait([task])
    await quotas.close()


async def burst(quotas: Quotas, quota: Quota, count: int = 1000) -> tuple[list[Reservation], Counter[str]]:
    """So many requests at once: those that were admitted, and what refused the others."""
    outcomes = await asyncio.gather(*(quotas.reserve(1, quota, TOKENS) for _ in range(count)), return_exceptions=True)
    for outcome in outcomes:
        if not isinstance(outcome, Reservation | RateLimitError):
            raise AssertionError(outcome)
    admitted = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
    return admitted, Counter(outcome.dimension for outcome in outcomes if isinstance(outcome, RateLimitError))


@pytest.mark.parametrize("dimension", ONE_LIMIT)
async def test_a_thousand_at_once_do_not_pass_a_limit(dimension: str) -> None:
    quota, most = ONE_LIMIT[dimension]
    quotas = Quotas(LocalStore(), seed, Metrics())
    admitted, refused = await burst(quotas, quota)
    assert (len(admitted), refused) == (most, {dimension: 1000 - most})
    for reservation in admitted:
        reservation.settle(TOKENS)
    again = {"concurrent_streams": 100}.get(dimension, 0)
    assert len((await burst(quotas, quota))[0]) == again


WORKER = """
import asyncio, json, sys
from stencilpress.gateway.quota.plan import Quota
from tests.unit.test_quota_engine import burst, shared_quotas

async def main():
    async with shared_quotas(sys.argv[1]) as quotas:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        admitted, refused = await burst(quotas, Quota(**json.loads(sys.argv[2])), 334)
        print(json.dumps([len(admitted), dict(refused)]), flush=True)
        if sys.argv[3] == "hold":
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.mark.parametrize("dimension", ONE_LIMIT)
async def test_nor_on_three_processes_that_share_a_store(valkey: Any, dimension: str) -> None:
    quota, most = ONE_LIMIT[dimension]
    limits = json.dumps({dimension: getattr(quota, dimension)})
    command = [sys.executable, "-c", WORKER, valkey.connection_url, limits, "hold"]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    workers = [await asyncio.create_subprocess_exec(*command, cwd=ROOT, **pipes) for _ in range(3)]  # type: ignore[arg-type]
    total = 0
    for worker in workers:
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write(b"\n")
    for worker in workers:
        assert worker.stdout is not None
        admitted, refused = json.loads(await worker.stdout.readline())
        assert set(refused) <= {dimension}
        total += admitted
    assert total == most
    for worker in workers:
        worker.kill()
        await worker.wait()


async def test_settling_gives_back_slots_and_tokens_in_the_shared_store(valkey: Any) -> None:
    quota = Quota(concurrent_streams=50, tokens_per_minute=10_000)
    async with shared_quotas(valkey.connection_url) as quotas:
        for _ in range(5):
            admitted, _refused = await burst(quotas, quota, 60)
            assert len(admitted) == 50
            for reservation in admitted[:-1]:
                reservation.settle(0)
            admitted[-1].undo()
            async with asyncio.timeout(45):
                while True:
                    with_one = await _until_admitted(quotas, quota)
                    left = int(with_one.headers["x-ratelimit-remaining-tokens"])
                    with_one.settle(0)
                    if left == 9_999:
                        break
                    await asyncio.sleep(0.01)


async def test_a_killed_gateway_s_slots_come_back_after_their_lease(
    valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stencilpress.gateway.quota.engine.LEASE_MS", 1000)
    quota = Quota(concurrent_streams=3)
    async with shared_quotas(valkey.connection_url) as killed, shared_quotas(valkey.connection_url) as other:
        held = [await killed.reserve(1, quota, 1) for _ in range(3)]
        with pytest.raises(RateLimitError):
            await other.reserve(1, quota, 1)
        for reservation in held:
            reservation.settled = True  # as if its process had gone: nobody settles or renews
        del held, reservation
        async with asyncio.timeout(20):
            for _ in range(3):
                await _until_admitted(other, quota)


async def _until_admitted(quotas: Quotas, quota: Quota) -> Reservation:
    while True:
        try:
            return await quotas.reserve(1, quota, 1)
        except RateLimitError:
            await asyncio.sleep(0.02)


async def test_a_renewed_lease_is_held_and_a_dropped_one_is_not() -> None:
    now = 0
    quotas = Quotas(LocalStore(lambda: now), seed, Metrics())
    quota = Quota(concurrent_streams=2)
    kept = await quotas.reserve(1, quota, 1)
    await quotas.reserve(1, quota, 1)  # whoever asked for it is gone without a word
    now = 20_000
    await quotas.renew()
    now = 40_000
    second = await quotas.reserve(1, quota, 1)
    with pytest.raises(RateLimitError):
        await quotas.reserve(1, quota, 1)
    kept.settle(1)
    kept.settle(1)
    second.settle(1)


@pytest.mark.parametrize("policy", ["local", "allow", "refuse"])
async def test_while_the_store_is_down_its_policy_holds_and_it_is_found_again(
    valkey: Any, policy: FailurePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stencilpress.gateway.quota.guard.PAUSE_S", 0.05)
    quota = Quota(requests_per_minute=5)
    async with shared_quotas(valkey.connection_url, policy) as quotas:
        before = [await quotas.reserve(1, quota, 1) for _ in range(2)]
        port = valkey.port
        valkey.terminate()
        before[0].settle(1)
        outcomes = await asyncio.gather(*(quotas.reserve(1, quota, 1) for _ in range(8)), return_exceptions=True)
        kinds = Counter(type(outcome) for outcome in outcomes)
        expected = {
            "local": {Reservation: 5, RateLimitError: 3},
            "allow": {Reservation: 8},
            "refuse": {UnavailableError: 8},
        }
        assert kinds == expected[policy]
        failures = quotas._metrics.registry.get_sample_value(
            "stencilpress_quota_store_failures_total", {"policy": policy}
        )
        assert failures == 8
        valkey._desired_port = port
        valkey.start()
        async with asyncio.timeout(45):
            await _until_shared(quotas, quota)


async def test_a_request_that_leaves_while_it_is_being_admitted_holds_nothing(valkey: Any) -> None:
    quota = Quota(concurrent_streams=500, requests_per_minute=1000)
    async with shared_quotas(valkey.connection_url) as quotas:
        waiting = [asyncio.create_task(quotas.reserve(1, quota, 1)) for _ in range(300)]
        for turn, task in enumerate(waiting):
            await asyncio.sleep(0)
            if turn % 3:
                task.cancel()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Reservation):
                outcome.undo()
        async with asyncio.timeout(45):
            while True:
                last = await _until_admitted(quotas, quota)
                last.undo()
                if last.headers["x-ratelimit-remaining-requests"] == "999":
                    break
                await asyncio.sleep(0.01)


async def _until_shared(quotas: Quotas, quota: Quota) -> None:
    while True:
        try:
            reservation = await quotas.reserve(2, quota, 1)
        except (UnavailableError, RateLimitError):
            reservation = None
        if reservation is not None and isinstance(reservation.store, SharedStore):
            return
        await asyncio.sleep(0.02)


async def test_a_refusal_says_what_refused_and_what_would_help() -> None:
    quotas = Quotas(LocalStore(lambda: 0), seed, Metrics())
    quota = Quota(requests_per_minute=1, tokens_per_minute=50)
    headers = (await quotas.reserve(1, quota, 20)).headers
    assert headers == {
        "x-ratelimit-limit-requests": "1",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "50",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "1m1s",
    }
    with pytest.raises(RateLimitError) as over:
        await quotas.reserve(1, quota, 20)
    error = over.value
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error.fields()["dimension"] == "requests_per_minute"
    assert (error.headers["Retry-After"], error.headers["retry-after-ms"]) == ("61", "61000")
    with pytest.raises(RateLimitError, match="can never be admitted") as never:
        await quotas.reserve(2, quota, 51)
    assert never.value.headers["x-should-retry"] == "false"


async def test_a_spent_budget_is_insufficient_quota() -> None:
    quotas = Quotas(LocalStore(), seed, Metrics(), Calendar(lambda: 1_764_450_000.0))
    with pytest.raises(
        InsufficientQuotaError, match=r"of which 5 are left.*begins anew at 2025-12-01T00:00:00"
    ) as over:
        await quotas.reserve(1, Quota(tokens_per_month=205, time_zone="Asia/Kolkata"), 20)
    assert over.value.type == over.value.code == "insufficient_quota"
    assert over.value.headers["x-should-retry"] == "false"
    assert "Retry-After" not in over.value.headers


async def test_shadow_refuses_nothing_and_is_counted() -> None:
    metrics = Metrics()
    quotas = Quotas(LocalStore(), seed, metrics)
    for _ in range(5):
        await quotas.reserve(1, Quota(requests_per_minute=2, shadow=True), 1)
    name = "stencilpress_quota_shadow_refusals_total"
    assert metrics.registry.get_sample_value(name, {"dimension": "requests_per_minute"}) == 3


async def test_a_plan_without_limits_asks_no_store() -> None:
    quotas = Quotas(LocalStore(), seed, Metrics())
    reservation = await quotas.reserve(1, Quota(), 10**9)
    reservation.settle(5)
    assert (reservation.headers, reservation.store) == ({}, None)


async def test_one_look_into_the_catalog_serves_all_that_wait_and_none_comes_later() -> None:
    asked = []

    async def slow(tenant: int, _periods: Periods) -> Seeds:
        asked.append(tenant)
        await asyncio.sleep(0.01)
        return Seeds(0, 0)

    quotas = Quotas(LocalStore(), slow, Metrics())
    quota = Quota(tokens_per_day=10**6)
    await asyncio.gather(*(quotas.reserve(1, quota, 1) for _ in range(100)))
    await quotas.reserve(1, quota, 1)
    assert asked == [1]


@pytest.mark.parametrize(
    ("moment", "zone", "day", "month"),
    [
        ("2026-11-29T21:00:00+00:00", "UTC", "2026-11-29T00:00+00:00/24", "2026-11-01T00:00+00:00/720"),
        ("2026-11-30T20:00:00+00:00", "Asia/Kolkata", "2026-12-01T00:00+05:30/24", "2026-12-01T00:00+05:30/744"),
        ("2026-10-25T10:00:00+00:00", "Europe/Berlin", "2026-10-25T00:00+02:00/25", "2026-10-01T00:00+02:00/745"),
        ("2026-03-29T10:00:00+00:00", "Europe/Berlin", "2026-03-29T00:00+01:00/23", "2026-03-01T00:00+01:00/743"),
        ("2026-12-31T23:30:00+00:00", "America/New_York", "2026-12-31T00:00-05:00/24", "2026-12-01T00:00-05:00/744"),
    ],
)
def test_days_and_months_are_those_of_the_zone(moment: str, zone: str, day: str, month: str) -> None:
    for span, wanted in zip(periods_at(datetime.fromisoformat(moment).timestamp(), zone), (day, month), strict=True):
        start, hours = wanted.split("/")
        assert datetime.fromtimestamp(span.start, UTC) == datetime.fromisoformat(start)
        assert (span.end - span.start) / 3600 == int(hours)


def test_durations_are_written_as_openai_does() -> None:
    assert [duration(ms) for ms in (0, 12, 1000, 1500, 59_999, 60_000, 360_000, 61_001)] == [
        "0ms", "12ms", "1s", "1.5s", "59.999s", "1m0s", "6m0s", "1m2s"
    ]  # fmt: skip


async def test_levels_begin_with_what_the_rows_say_and_follow_the_reservations(valkey: Any) -> None:
    quota = Quota(concurrent_streams=9, tokens_per_day=10**6)
    local = Quotas(LocalStore(), seed, Metrics())
    assert await local.levels(1, Quota()) == Levels(None, None, None, 100, 200)
    async with shared_quotas(valkey.connection_url) as shared:
        for quotas in (local, shared):
            assert await quotas.levels(1, quota) == Levels(0, 0, 0, 100, 200)
            held = await quotas.reserve(1, quota, 50)
            assert await quotas.levels(1, quota) == Levels(1, 1, 50, 150, 250)
            held.settle(20)
            while (await quotas.levels(1, quota)).concurrent_streams:  # noqa: ASYNC110 - settling tells nobody
                await asyncio.sleep(0.001)
            assert await quotas.levels(1, quota) == Levels(0, 1, 20, 120, 220)
    async with shared_quotas("redis://127.0.0.1:1") as lost:
        with pytest.raises(UnavailableError):
            await lost.levels(1, quota)


async def test_a_script_that_another_gateway_brings_meanwhile_charges_nobody_twice(valkey: Any) -> None:
    quota = Quota(tokens_per_minute=10_000)
    async with shared_quotas(valkey.connection_url) as quotas:
        store = quotas._store
        assert isinstance(store, GuardedStore)
        shared, asked = store.shared, []
        send = shared._send

        async def half_known(calls: list[list[str | int]]) -> list[Any]:
            """As if the script came when half of the first calls were through."""
            asked.append(len(calls))
            if len(asked) > 1:
                return await send(calls)
            await shared._redis.script_load(shared._script)
            half = len(calls) // 2
            return [shared._unknown_script() for _ in calls[:half]] + await send(calls[half:])

        shared._send = half_known  # type: ignore[method-assign]
        asks = [quotas.reserve(5, quota, 10) for _ in range(20)]
        await asyncio.gather(*asks)
        assert (await quotas.levels(5, quota)).tokens_per_minute == 200
        assert asked[:2] == [20, 10]
