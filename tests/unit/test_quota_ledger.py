"""The counts of one tenant: in process and as the script of a shared store, which must be the same machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stencilpress.gateway.quota.ledger import Budget, Ledger
from stencilpress.gateway.quota.local import LocalStore
from stencilpress.gateway.quota.plan import Quota
from stencilpress.gateway.quota.shared import SharedStore
from stencilpress.gateway.quota.terms import Ask, Levels, Outcome, Periods, QuotaStore, Renewal, Seeds, Span
from tests.valkey import running_valkey

DAY, MONTH = Span(1000, 2000), Span(500, 9000)
NEXT_DAY = Span(2000, 3000)
SEEDS = Seeds(0, 0)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Any]:
    with running_valkey() as server:
        yield server


def ask(name: str, quota: Quota, tokens: int = 10, day: Span = DAY, tenant: int = 1) -> Ask:
    return Ask(tenant, name, tokens, quota, Periods(day, MONTH), lease_ms=30_000)


def reserve(ledger: Ledger, one: Ask, now_ms: int = 0) -> Outcome:
    outcome = ledger.reserve(one, now_ms, SEEDS)
    assert outcome is not None
    return outcome


def test_requests_leave_the_window_a_minute_after_their_second() -> None:
    ledger, quota = Ledger(), Quota(requests_per_minute=2)
    assert reserve(ledger, ask("a", quota), 500).refused is None
    assert reserve(ledger, ask("b", quota), 1_500).refused is None
    refused = reserve(ledger, ask("c", quota), 2_000)
    assert (refused.refused, refused.retry_ms) == ("requests_per_minute", 61_000 - 2_000)
    assert reserve(ledger, ask("c", quota), 60_999).refused == "requests_per_minute"
    assert reserve(ledger, ask("c", quota), 61_000).refused is None


@given(st.lists(st.tuples(st.integers(0, 4_000), st.integers(1, 40)), max_size=200))
def test_no_minute_ever_holds_more_than_the_limit(steps: list[tuple[int, int]]) -> None:
    ledger, quota = Ledger(), Quota(requests_per_minute=20, tokens_per_minute=100)
    admitted: list[tuple[int, int]] = []
    now_ms = 0
    for number, (pause_ms, tokens) in enumerate(steps):
        now_ms += pause_ms
        if reserve(ledger, ask(str(number), quota, tokens), now_ms).refused is None:
            admitted.append((now_ms, tokens))
            ledger.settle(str(number), tokens, 0, now_ms)
    for end, _ in admitted:
        minute = [tokens for moment, tokens in admitted if end - 60_000 < moment <= end]
        assert len(minute) <= 20
        assert sum(minute) <= 100


def test_the_suggested_wait_is_long_enough_and_not_a_millisecond_longer() -> None:
    ledger, quota = Ledger(), Quota(tokens_per_minute=100)
    for number, tokens in enumerate((30, 30, 40)):
        reserve(ledger, ask(str(number), quota, tokens), 5_000 * number)
        ledger.settle(str(number), tokens, 0, 5_000 * number)
    wait_ms = reserve(ledger, ask("x", quota, 50), 20_000).retry_ms
    assert reserve(ledger, ask("x", quota, 50), 20_000 + wait_ms - 1).refused == "tokens_per_minute"
    assert reserve(ledger, ask("x", quota, 50), 20_000 + wait_ms).refused is None


def test_what_was_not_used_is_given_back() -> None:
    ledger, quota = Ledger(), Quota(tokens_per_minute=100, tokens_per_day=150)
    assert reserve(ledger, ask("a", quota, 100)).refused is None
    assert reserve(ledger, ask("b", quota, 1)).refused == "tokens_per_minute"
    ledger.settle("a", 20, 0, 1000)
    assert reserve(ledger, ask("b", quota, 80), 1000).refused is None
    ledger.settle("b", 80, 0, 1000)
    ledger.settle("b", 80, 0, 1000)  # of a lease that is over only what was never reported counts
    assert ledger.day is not None
    assert (ledger.day.used, ledger.day.reserved) == (180, 0)


def test_a_refused_request_counts_in_no_dimension() -> None:
    quota = Quota(
        requests_per_minute=5, tokens_per_minute=1000, concurrent_streams=1, tokens_per_day=5, tokens_per_month=5
    )
    ledger = Ledger()
    for _ in range(100):
        assert reserve(ledger, ask("a", quota, 10)).refused == "tokens_per_day"
    assert (ledger.requests.used, ledger.tokens.used, ledger.leases) == (0, 0, {})
    assert reserve(ledger, ask("b", quota, 5)).refused is None


def test_a_lease_that_nobody_renews_expires_and_counts_as_it_last_reported() -> None:
    ledger, quota = Ledger(), Quota(concurrent_streams=1, tokens_per_minute=1000, tokens_per_day=1000)
    one = ask("a", quota, 100)
    reserve(ledger, one, 0)
    ledger.renew(Renewal(one, 40, 0), 20_000)
    assert reserve(ledger, ask("b", quota, 1), 49_999).refused == "concurrent_streams"
    assert reserve(ledger, ask("b", quota, 1), 50_000).refused is None
    assert ledger.tokens.used == 41
    ledger.settle("a", 70, 40, 50_000)
    assert ledger.day is not None
    assert (ledger.day.used, ledger.day.reserved) == (70, 1)


def test_a_lease_that_a_store_has_lost_is_made_again() -> None:
    ledger, quota = Ledger(), Quota(concurrent_streams=1, tokens_per_day=100)
    reserve(ledger, ask("other", quota, 1))
    ledger.settle("other", 1, 0, 0)
    ledger.renew(Renewal(ask("a", quota, 50), 30, 20), 0)
    assert reserve(ledger, ask("b", quota), 0).refused == "concurrent_streams"
    ledger.settle("a", 45, 30, 0)
    assert ledger.day is not None
    assert (ledger.day.used, ledger.day.reserved, ledger.leases) == (26, 0, {})


def test_a_budget_needs_to_know_what_was_used_before_and_begins_anew_after_its_end() -> None:
    ledger, quota = Ledger(), Quota(tokens_per_day=100)
    assert ledger.reserve(ask("a", quota, 50), 0, None) is None
    assert ledger.leases == {}
    outcome = ledger.reserve(ask("a", quota, 50), 0, Seeds(60, 60))
    assert outcome is not None
    assert (outcome.refused, outcome.retry_ms, outcome.left) == ("tokens_per_day", 0, 40)
    tomorrow = ledger.reserve(ask("a", quota, 50, NEXT_DAY), 0, None)
    assert tomorrow is not None
    assert tomorrow.refused is None
    behind = ledger.reserve(ask("b", quota, 51), 0, None)  # of a host where it is still yesterday
    assert behind is not None
    assert behind.refused == "tokens_per_day"


def test_running_requests_stay_reserved_when_the_time_zone_changes() -> None:
    """Their rows come later, so what the new day begins at does not tell of them."""
    ledger, quota, moved = Ledger(), Quota(tokens_per_day=100), Span(1500, 2500)
    reserve(ledger, ask("a", quota, 60))
    refused = reserve(ledger, ask("b", quota, 50, moved))
    assert (refused.refused, refused.left) == ("tokens_per_day", 40)
    ledger.settle("a", 30, 0, 0)
    assert ledger.day == Budget(moved, 30)
    assert reserve(ledger, ask("b", quota, 70, moved)).refused is None


def test_a_budget_that_running_requests_may_give_back_is_not_spent() -> None:
    ledger, quota = Ledger(), Quota(tokens_per_month=100)
    reserve(ledger, ask("a", quota, 80))
    assert reserve(ledger, ask("b", quota, 30)).retry_ms > 0
    ledger.settle("a", 80, 0, 0)
    assert reserve(ledger, ask("b", quota, 30)).retry_ms == 0


def test_shadow_tells_and_admits() -> None:
    ledger, quota = Ledger(), Quota(requests_per_minute=1, shadow=True)
    assert [reserve(ledger, ask(str(n), quota)).refused for n in range(3)] == [None, *["requests_per_minute"] * 2]
    assert len(ledger.leases) == 3


def test_what_can_never_be_admitted_is_told_apart() -> None:
    for quota in (Quota(tokens_per_minute=9), Quota(requests_per_minute=0), Quota(concurrent_streams=0)):
        outcome = reserve(Ledger(), ask("a", quota, 10))
        assert outcome.refused is not None
        assert outcome.retry_ms == 0


def test_levels_are_what_is_held_and_used() -> None:
    ledger, quota = Ledger(), Quota(concurrent_streams=5, tokens_per_day=1000)
    assert ledger.levels(Periods(DAY, MONTH), 0) == Levels(0, 0, 0, None, None)
    reserve(ledger, ask("a", quota, 100))
    reserve(ledger, ask("b", quota, 50))
    assert ledger.levels(Periods(DAY, MONTH), 0) == Levels(2, 2, 150, 150, 150)
    ledger.settle("a", 30, 0, 1000)
    assert ledger.levels(Periods(DAY, MONTH), 1000) == Levels(1, 2, 80, 80, 80)
    assert ledger.levels(Periods(NEXT_DAY, MONTH), 1000) == Levels(1, 2, 80, 0, 80)
    assert ledger.levels(Periods(DAY, MONTH), 40_000 + 60_000) == Levels(0, 0, 0, 30, 30)  # its lease has expired


LIMIT = st.none() | st.integers(0, 60)
QUOTAS = st.builds(
    Quota,
    requests_per_minute=LIMIT,
    tokens_per_minute=LIMIT,
    concurrent_streams=st.none() | st.integers(0, 5),
    tokens_per_day=LIMIT,
    tokens_per_month=LIMIT,
    shadow=st.booleans(),
)
LEASE = st.sampled_from("abcdef")
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "renew"]),
        st.integers(0, 40_000),
        LEASE,
        QUOTAS,
        st.integers(1, 20),
        st.integers(-1, 20),
        st.sampled_from([DAY, DAY, NEXT_DAY, Span(1500, 2500)]),
        st.none() | st.builds(Seeds, st.integers(0, 30), st.integers(0, 30)),
    ),
    max_size=30,
)
Operation = tuple[str, int, str, Quota, int, int, Span, Seeds | None]


async def play(
    store: QuotaStore, operations: list[Operation], clock: Any, tenant: int
) -> list[Outcome | Levels | None]:
    """Run a history; ``clock`` is told the time. Names of leases are not reused while they are held."""
    outcomes: list[Outcome | Levels | None] = []
    for number, (kind, pause_ms, name, quota, tokens, used, day, seeds) in enumerate(operations):
        clock(pause_ms)
        one = replace(ask(f"{name}{number // 8}", quota, tokens, day, tenant))
        if kind == "reserve":
            one = replace(one, lease_id=f"{name}{number}")
            outcomes.append(await store.reserve(one, seeds))
        elif kind == "settle":
            await store.settle(replace(one, lease_id=f"{name}{max(number - 3, 0)}"), used, 0)
        else:
            await store.renew([Renewal(replace(one, lease_id=f"{name}{max(number - 2, 0)}"), max(used, 0), 0)])
        outcomes.append(await store.levels(tenant, Periods(day, MONTH)))
    return outcomes


tenants = iter(range(10**6))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS)
def test_the_script_and_the_ledger_are_one_machine(valkey: Any, operations: list[Operation]) -> None:
    async def both() -> None:
        now = [1_000_000, 1_000_000]
        tenant = next(tenants)
        local = LocalStore(lambda: now[0])
        shared = SharedStore(valkey.connection_url, now_ms=now[1])

        def tick_local(ms: int) -> None:
            now[0] += ms

        def tick_shared(ms: int) -> None:
            now[1] += ms
            shared.now_ms = now[1]

        expected = await play(local, operations, tick_local, tenant)
        try:
            assert await play(shared, operations, tick_shared, tenant) == expected
        finally:
            await shared.close()

    asyncio.run(both())


async def test_a_tenant_takes_no_more_memory_in_the_store_than_what_holds(valkey: Any) -> None:
    from redis.asyncio import Redis

    quota = Quota(requests_per_minute=10**6, concurrent_streams=10, tokens_per_day=10**9)
    store = SharedStore(valkey.connection_url, now_ms=10**9)
    redis: Any = Redis.from_url(valkey.connection_url)
    for number in range(200):
        store.now_ms = 10**9 + 1000 * number
        one = ask(str(number), quota, tenant=77_000_000)
        assert (await store.reserve(one, SEEDS)) is not None
        if number % 2:
            await store.settle(one, 5, 0)
    sizes = [await redis.hlen(f"stencilpress:quota:{{77000000}}:{kind}") for kind in ("windows", "leases", "budgets")]
    assert sizes[0] <= 130
    assert sizes[1:] == [10, 2]
    for kind in ("windows", "expiries", "leases", "budgets"):
        assert await redis.pttl(f"stencilpress:quota:{{77000000}}:{kind}") > 0
    await redis.aclose()
    await store.close()
