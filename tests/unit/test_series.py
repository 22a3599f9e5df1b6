"""Series, tops and refusals out of roll-ups, against the same computed from single rows; on both databases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stencilpress.gateway.catalog.refusals import Refusals, Refused, add_refusals, refusal_series
from stencilpress.gateway.catalog.series import (
    MAX_POINTS,
    Axis,
    Subject,
    choose_axis,
    total,
    usage_series,
)
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.catalog.tops import By, top_adapters, top_span, top_tenants
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_reports import usage_by_adapter
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.catalog.usage_sums import BLOCKS, SECONDS, Period, UsageSum, split
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.usage.histogram import quantiles
from stencilpress.gateway.usage.record import UsageRow
from tests.unit.usage_rows import exact_quantiles, random_rows

NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
SHARES = [0.5, 0.95, 0.99]
TENANTS = ("acme", "bolt", "core")


async def filled(db: Database, *, count: int = 300, span: timedelta = timedelta(hours=30)) -> list[UsageRow]:
    """Three tenants, numbers 1 to 3, with rows that are rolled up."""
    for name in TENANTS:
        await create_tenant(db, name)
    rows = random_rows(random.Random(5), NOON - span, int(span.total_seconds()), count)
    for part in (rows[: count // 3], rows[count // 3 :]):
        await insert_usage(db, part)
        while await roll_up(db, limit=70):
            pass
    return rows


def check(found: UsageSum, rows: list[UsageRow]) -> None:
    """A sum is that of these rows."""
    failed = [one for one in rows if one.status in ("failed", "lost")]
    assert found.requests == len(rows)
    assert found.failures == len(failed)
    assert found.cold_starts == sum(one.cold_start_ms > 0 for one in rows)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "undelivered_tokens"):
        assert getattr(found, name) == sum(getattr(one, name) for one in rows)
    assert found.duration_ms == pytest.approx(sum(one.duration_ms for one in rows))
    assert found.errors == dict(Counter(one.error_code or one.status for one in failed))
    began = [one for one in rows if one.ttft_ms is not None]
    if began:
        assert quantiles(found.ttft, SHARES) == pytest.approx(
            exact_quantiles((r.ttft_ms for r in rows), SHARES), rel=0.05
        )
        assert quantiles(found.queue, SHARES) == pytest.approx(
            exact_quantiles((one.queue_ms for one in began), SHARES), rel=0.05
        )
    cold = [one.cold_start_ms for one in rows if one.cold_start_ms > 0]
    if cold:
        assert quantiles(found.cold_start, SHARES) == pytest.approx(exact_quantiles(cold, SHARES), rel=0.05)


Filter = Callable[[UsageRow], bool]
SUBJECTS: list[tuple[Subject, Filter]] = [
    (Subject(), lambda row: bool(row.key)),
    (Subject(2), lambda row: row.tenant_id == 2),
    (Subject(2, "pirate"), lambda row: (row.tenant_id, row.adapter) == (2, "pirate")),
    (Subject(2, ""), lambda row: (row.tenant_id, row.adapter) == (2, "")),
    (Subject(2, "pirate", 1), lambda row: (row.tenant_id, row.adapter, row.version) == (2, "pirate", 1)),
]
SPANS = [(timedelta(hours=6), 300), (timedelta(hours=6), 10), (timedelta(hours=30), 48), (timedelta(days=3), 4)]


async def test_series_are_those_of_the_rows(db: Database) -> None:
    rows = await filled(db)
    for (subject, belongs), (span, points) in product(SUBJECTS, SPANS):
        axis = choose_axis(NOON - span, NOON, points=points, now=NOON)
        steps = await usage_series(db, subject, axis)
        assert len(steps) == axis.count <= points
        for at, step in enumerate(steps):
            check(step, [row for row in rows if belongs(row) and axis.index(row.admitted_at) == at])
        check(
            total(steps),
            [row for row in rows if belongs(row) and axis.start <= row.admitted_at < axis.end],
        )


async def test_the_span_before_ends_where_the_span_begins(db: Database) -> None:
    rows = await filled(db)
    axis = choose_axis(NOON - timedelta(hours=10), NOON, previous=True, now=NOON)
    before = axis.before
    assert before.end == axis.start
    found = total(await usage_series(db, Subject(), before))
    check(found, [row for row in rows if before.start <= row.admitted_at < before.end])


async def test_tops_are_those_of_the_rows(db: Database) -> None:
    rows = await filled(db)
    ends = ((timedelta(hours=12), NOON), (timedelta(hours=20), NOON - timedelta(hours=1)), (timedelta(days=9), NOON))
    for by, (length, end) in product(get_args(By), ends):
        span = top_span(end - length, end)
        mine = [row for row in rows if span.start <= row.admitted_at < span.end]
        groups: dict[tuple[str, str], list[UsageRow]] = {}
        for row in mine:
            groups.setdefault((TENANTS[row.tenant_id - 1], row.adapter), []).append(row)
        found = await top_adapters(db, span, by, 5)
        assert len(found) == 5
        for one in found:
            check(one.usage, groups[one.tenant, one.adapter or ""])
        orders = [order(by, groups[one.tenant, one.adapter or ""]) for one in found]
        assert orders == sorted(orders, reverse=True)
        if by != "ttft_p99":  # its order is that of the histograms' buckets
            assert orders == sorted((order(by, group) for group in groups.values()), reverse=True)[:5]
        own = await top_adapters(db, span, by, 50, tenant_id=2)
        assert {(one.tenant, one.adapter) for one in own} == {name for name in groups if name[0] == "bolt"}
        tenants = await top_tenants(db, span, by, 50)
        assert {one.tenant for one in tenants} == set(TENANTS)
        for one in tenants:
            check(one.usage, [row for row in mine if TENANTS[row.tenant_id - 1] == one.tenant])


async def test_a_long_span_is_read_in_whole_blocks_and_the_days_around_them(db: Database) -> None:
    rows = await filled(db, count=400, span=timedelta(days=40))
    for length in (timedelta(days=31), timedelta(days=16), timedelta(days=5)):
        start, end = NOON - length, NOON - timedelta(days=1)
        span = top_span(start, end)
        mine = [row for row in rows if row.tenant_id == 2 and span.start <= row.admitted_at < midnight_after(end)]
        found = await top_adapters(db, span, "requests", 50, tenant_id=2)
        assert {one.adapter for one in found} == {row.adapter for row in mine}
        for one in found:
            check(one.usage, [row for row in mine if row.adapter == one.adapter])
        for adapter, usage in await usage_by_adapter(db, 2, "day", span.start, end):
            check(usage, [row for row in mine if row.adapter == adapter])


@given(
    period=st.sampled_from(["hour", "day"]),
    start_s=st.integers(0, 90 * 86_400),
    length_s=st.integers(1, 40 * 86_400),
)
def test_blocks_and_what_is_around_them_make_up_a_span(period: Period, start_s: int, length_s: int) -> None:
    """Each hour or day that begins in it once, nothing else, and in few rows."""
    start, end = (NOON + timedelta(seconds=offset) for offset in (start_s, start_s + length_s))
    unit, (block, block_s) = SECONDS[period], BLOCKS[period]
    seconds = {period: unit, block: block_s}
    begun = [
        moment
        for name, first, last in split(period, start, end)
        for block_start in steps(first, last, seconds[name])
        for moment in steps(block_start, block_start + timedelta(seconds=seconds[name]), unit)
    ]
    assert begun == list(steps(start, end, unit))
    rows = sum(len(list(steps(first, last, seconds[name]))) for name, first, last in split(period, start, end))
    assert rows <= len(begun) * unit / block_s + 2 * (block_s / unit - 1)


def steps(first: datetime, last: datetime, seconds: int) -> Iterator[datetime]:
    """Moments in ``[first, last)`` at which an hour, a day or a block begins."""
    for at in range(-(-int(first.timestamp()) // seconds), -(-int(last.timestamp()) // seconds)):
        yield datetime.fromtimestamp(at * seconds, UTC)


def midnight_after(moment: datetime) -> datetime:
    return datetime(moment.year, moment.month, moment.day, tzinfo=UTC) + timedelta(days=1)


def order(by: By, rows: list[UsageRow]) -> float:
    cold = sum(row.cold_start_ms > 0 for row in rows)
    match by:
        case "tokens":
            return sum(row.prompt_tokens + row.completion_tokens for row in rows)
        case "requests":
            return len(rows)
        case "failures":
            return sum(row.status in ("failed", "lost") for row in rows)
        case "cold_starts":
            return cold
        case "hit_rate":
            return cold / len(rows)
        case "ttft_p99":
            return -(-(exact_quantiles((row.ttft_ms for row in rows), [0.99])[0]) // 100)


async def test_refusals_of_two_gateways_are_added_by_minute_and_hour(db: Database) -> None:
    start = int(NOON.timestamp())
    one = {
        Refused(1, "tokens_per_day", start): Refusals(3, 1),
        Refused(2, "tokens_per_day", start + 60): Refusals(5, 0),
    }
    other = {
        Refused(1, "tokens_per_day", start): Refusals(10, 0),
        Refused(1, "concurrent_streams", start + 120): Refusals(0, 7),
    }
    await add_refusals(db, one)
    await add_refusals(db, other)
    minutes = Axis("minute", start, 60, 4)
    assert await refusal_series(db, 1, minutes) == {
        "concurrent_streams": [(0, 0), (0, 0), (0, 7), (0, 0)],
        "tokens_per_day": [(13, 1), (0, 0), (0, 0), (0, 0)],
    }
    assert await refusal_series(db, 1, Axis("minute", start - 60, 180, 2)) == {
        "concurrent_streams": [(0, 0), (0, 7)],
        "tokens_per_day": [(13, 1), (0, 0)],
    }
    assert (await refusal_series(db, 0, minutes))["tokens_per_day"] == [(13, 1), (5, 0), (0, 0), (0, 0)]
    assert (await refusal_series(db, 0, Axis("hour", start, 3600, 1)))["tokens_per_day"] == [(18, 1)]
    assert await refusal_series(db, 3, minutes) == {}


@pytest.mark.parametrize(
    ("back", "length", "points", "step_s", "period"),
    [
        (timedelta(0), timedelta(hours=1), 300, 60, "minute"),
        (timedelta(0), timedelta(hours=6), 400, 60, "minute"),
        (timedelta(0), timedelta(days=1), 300, 300, "minute"),
        (timedelta(days=10), timedelta(hours=6), 300, 3600, "hour"),
        (timedelta(0), timedelta(days=1, seconds=60), 400, 3600, "hour"),
        (timedelta(0), timedelta(days=30), 300, 10_800, "hour"),
        (timedelta(0), timedelta(days=365), 400, 86_400, "day"),
        (timedelta(0), timedelta(days=3660), 400, 864_000, "day"),
    ],
)
def test_the_step_follows_from_the_span_and_its_age(
    back: timedelta, length: timedelta, points: int, step_s: int, period: str
) -> None:
    end = NOON - back
    axis = choose_axis(end - length, end, points=points, now=NOON)
    assert (axis.step_s, axis.period) == (step_s, period)
    assert axis.start <= end - length
    assert axis.end >= end
    assert axis.start_s % step_s == 0


def test_the_first_second_of_a_step_is_on_the_axis() -> None:
    end = NOON + timedelta(milliseconds=400)
    axis = choose_axis(end - timedelta(hours=1), end, now=end)
    assert axis.index(NOON + timedelta(milliseconds=300)) == axis.count - 1
    assert axis.end == NOON + timedelta(minutes=1)


def test_spans_that_cannot_be_shown_are_refused() -> None:
    for start, end in ((NOON, NOON), (NOON, NOON - timedelta(1)), (NOON - timedelta(days=4000), NOON)):
        with pytest.raises(InvalidRequestError, match="start: "):
            choose_axis(start, end, points=MAX_POINTS)
    with pytest.raises(InvalidRequestError, match="start: is more than 31 days"):
        top_span(NOON - timedelta(days=32), NOON)
