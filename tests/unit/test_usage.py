"""Usage rows: the spool, the histograms, the roll-ups on both databases, and the leases of the jobs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select, text

from stencilpress.gateway.catalog.leases import acquire, release, run_periodically
from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.series import Axis, Subject, usage_series
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tops import top_adapters, top_span, top_tenants
from stencilpress.gateway.catalog.usage import insert_usage, tokens_used
from stencilpress.gateway.catalog.usage_models import UsageRankRow, UsageRequestRow, UsageRollupRow
from stencilpress.gateway.catalog.usage_roll_up import purge_usage, retention, roll_up
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.usage import journal
from stencilpress.gateway.usage.histogram import add, bucket_of, merged, pack, quantiles, unpack, value_of
from stencilpress.gateway.usage.journal import SLOTS, Admission, Journal, Segment, SpoolFullError, orphans
from stencilpress.gateway.usage.record import Status, UsageRow, new_key
from stencilpress.gateway.usage.recorder import Admitted, Recorder
from tests.unit.usage_rows import usage_between
from tests.usage import usage_row

NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
WHO = Admitted("req_1", 7, "abcdefghijkl", "pirate", 3, 11)


def row(**given: object) -> UsageRow:
    usual = {
        "request_id": "req_1",
        "tenant_id": 7,
        "key_id": "abcdefghijkl",
        "version": 3,
        "finished_at": NOON + timedelta(seconds=2),
        "prompt_tokens": 11,
        "cached_tokens": 4,
        "completion_tokens": 20,
        "undelivered_tokens": 1,
        "ttft_ms": 12.5,
        "inter_token_ms": 3.0,
        "duration_ms": 2000.0,
    }
    return replace(usage_row(NOON, **usual), **given)  # type: ignore[arg-type]


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=300), st.lists(st.floats(0.01, 1e6), max_size=300))
def test_percentiles_of_merged_histograms_are_those_of_all_values(first: list[float], second: list[float]) -> None:
    merged: dict[int, int] = {}
    for values in (first, second):
        counts: dict[int, int] = {}
        for value in values:
            add(counts, {bucket_of(value): 1})
        add(merged, unpack(pack(counts)))
    shares = [0.5, 0.95, 0.99]
    exact = np.quantile(first + second, shares, method="inverted_cdf")
    for found, wanted in zip(quantiles(merged, shares), exact, strict=True):
        assert found is not None
        assert abs(found / wanted - 1) < 0.05


def test_nothing_has_no_percentile_and_odd_durations_have_a_bucket() -> None:
    assert quantiles({}, [0.5, 0.99]) == [None, None]
    assert bucket_of(0.0) == bucket_of(-1.0) == bucket_of(0.01)
    assert bucket_of(1e12) == bucket_of(86_400_000.0)
    assert value_of(bucket_of(100.0)) == pytest.approx(100, rel=0.05)


def test_a_slot_says_what_was_told_last(tmp_path: Path) -> None:
    spool = Journal(tmp_path, 1 << 20)
    admission = Admission(new_key(), "req_1", 7, "abcdefghijkl", "pirate", 3, 1_700_000_000_000_000, 11)
    segment, slot = spool.claim(admission)
    segment.words[journal.SLOT_WORDS * slot + journal.COUNTS_WORD] = 5
    segment.words[journal.SLOT_WORDS * slot + journal.COUNTS_WORD + 1] = 8
    found = segment.row(slot)
    assert found is not None
    assert (found.status, found.prompt_tokens, found.completion_tokens, found.undelivered_tokens) == ("lost", 11, 5, 3)
    assert (found.key, found.adapter, found.version, found.ttft_ms) == (admission.key, "pirate", 3, None)
    segment.release(slot)
    assert segment.row(slot) is None
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_only_what_has_lost_its_owner_is_an_orphan(tmp_path: Path) -> None:
    spool = Journal(tmp_path, 1 << 20)
    spool.claim(Admission(new_key(), "req_1", 7, "abcdefghijkl", "", 0, 1, 1))
    assert list(orphans(tmp_path)) == []
    spool.close()  # a slot is in use, so the file stays
    (orphan,) = orphans(tmp_path)
    assert len(list(orphan.rows())) == 1
    assert list(orphans(tmp_path)) == []  # it is ours now
    orphan.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_spool_that_is_full_takes_no_more_and_a_slot_that_is_free_is_used_again(tmp_path: Path) -> None:
    spool = Journal(tmp_path, journal.SEGMENT_BYTES * 2)
    admission = Admission(new_key(), "r" * 64, 2**31, "a" * 12, "a" * 63, 2**31, 2**60, 2**40)
    claimed = [spool.claim(admission) for _ in range(2 * SLOTS)]
    with pytest.raises(SpoolFullError):
        spool.claim(admission)
    segment, slot = claimed[7]
    segment.release(slot)
    assert spool.claim(admission) == (segment, slot)
    spool.close()


def test_a_slot_of_nonsense_is_left_out(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path)
    segment.admit(1, Admission(new_key(), "req_1", 7, "abcdefghijkl", "", 0, 1, 1))
    segment.words[0] = 1 | 30 << 32  # live, with 30 bytes that are no admission
    assert [found.request_id for found in segment.rows()] == ["req_1"]
    segment.close(remove=True)


async def rows_in(db: Database) -> list[UsageRequestRow]:
    async with db.read() as session:
        return list(await session.scalars(select(UsageRequestRow).order_by(UsageRequestRow.key)))


async def test_a_row_is_there_once_however_often_it_is_written(db: Database) -> None:
    one = row()
    await insert_usage(db, [one])
    await insert_usage(db, [replace(one, completion_tokens=99), row(request_id="req_2")])
    assert {(found.request_id, found.completion_tokens) for found in await rows_in(db)} == {
        ("req_1", 20),
        ("req_2", 20),
    }


async def test_meters_become_rows_and_their_slots_are_free_again(db: Database, tmp_path: Path) -> None:
    recorder = Recorder(db, tmp_path / "usage", 1 << 20)
    meter = recorder.open(WHO, arrived_at=0.0)
    meter.first(0.020)
    meter.deliver(1)
    for _ in range(4):
        meter.gap(0.010, 1)
        meter.deliver(1)
    meter.close(Status.COMPLETED, 6, [])
    await recorder.flush()
    (found,) = await rows_in(db)
    assert (found.prompt_tokens, found.completion_tokens, found.undelivered_tokens) == (11, 5, 1)
    assert found.ttft_ms == pytest.approx(20.0)
    assert found.inter_token_ms == pytest.approx(10.0)
    assert found.gaps is not None
    assert unpack(found.gaps) == {bucket_of(10.0): 4}
    recorder.close()
    assert list((tmp_path / "usage").iterdir()) == []


async def test_rows_wait_for_a_catalog_that_is_away(tmp_path: Path) -> None:
    async with Database(f"sqlite:///{tmp_path / 'empty.db'}") as away:
        recorder = Recorder(away, tmp_path / "usage", 1 << 20)
        recorder.open(WHO, 0.0).close(Status.COMPLETED, 0, [])
        with pytest.raises(UnavailableError):
            await recorder.flush()
        recorder.close()
        assert len(list((tmp_path / "usage").iterdir())) == 1


async def test_rows_wait_while_the_catalog_is_migrated(db: Database, tmp_path: Path) -> None:
    """The task that writes them lives on: on PostgreSQL a table that is not there is no error of the connection."""
    recorder = Recorder(db, tmp_path / "usage", 1 << 20)
    recorder.open(WHO, 0.0).close(Status.COMPLETED, 0, [])
    await migrate(db, "base")
    with pytest.raises(UnavailableError):
        await recorder.flush()
    await migrate(db)
    await recorder.flush()
    assert len(await rows_in(db)) == 1
    recorder.close()


async def test_roll_ups_are_the_sums_of_the_rows(db: Database) -> None:
    chance = random.Random(3)
    rows = [
        row(
            key=new_key(int(NOON.timestamp() * 1e9)),
            tenant_id=chance.choice((7, 8)),
            adapter=chance.choice(("pirate", "")),
            admitted_at=NOON + timedelta(seconds=chance.randrange(7200)),
            completion_tokens=chance.randrange(100),
            ttft_ms=chance.uniform(1, 500),
            status=chance.choice(("completed", "failed", "lost")),
            cold_start_ms=chance.choice((0.0, 5.0)),
        )
        for _ in range(300)
    ]
    for part in (rows[:100], rows[100:]):
        await insert_usage(db, part)
        while await roll_up(db, limit=70):
            pass
    for period in ("minute", "hour", "day"):
        sums = await usage_between(db, period, NOON - timedelta(days=1), NOON + timedelta(days=1))
        for (tenant, adapter), usage in sums.items():
            mine = [one for one in rows if (one.tenant_id, one.adapter) == (tenant, adapter)]
            assert usage.requests == len(mine)
            assert usage.completion_tokens == sum(one.completion_tokens for one in mine)
            assert usage.failures == sum(one.status != "completed" for one in mine)
            assert usage.cold_starts == sum(one.cold_start_ms > 0 for one in mine)
            exact = np.quantile([one.ttft_ms or 0 for one in mine], [0.5, 0.95, 0.99], method="inverted_cdf")
            assert quantiles(usage.ttft, [0.5, 0.95, 0.99]) == pytest.approx(list(exact), rel=0.05)
    assert set(sums) == {(7, "pirate"), (7, ""), (8, "pirate"), (8, "")}


async def test_two_who_roll_up_at_once_count_each_row_once(db: Database) -> None:
    await insert_usage(db, [row(key=new_key(), request_id=f"req_{number}") for number in range(200)])
    await asyncio.gather(*(roll_up(db, limit=60) for _ in range(8)))
    while await roll_up(db):
        pass
    (usage,) = (await usage_between(db, "hour", NOON, NOON + timedelta(hours=1))).values()
    assert usage.requests == 200


async def test_rows_wait_for_a_newer_code_once_the_schema_is_its_own(db: Database) -> None:
    """A gateway that still runs while the catalog is migrated knows not all roll-ups that there are now."""
    await insert_usage(db, [row(key=new_key())])
    async with db.write() as session:
        newest = await session.scalar(text("SELECT version_num FROM alembic_version"))
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UnavailableError, match="migrated to 9999"):
        await roll_up(db)
    assert await usage_between(db, "hour", NOON, NOON + timedelta(hours=1)) == {}
    async with db.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = :newest"), {"newest": newest})
    assert await roll_up(db) == 1
    (usage,) = (await usage_between(db, "hour", NOON, NOON + timedelta(hours=1))).values()
    assert usage.requests == 1


async def test_used_tokens_count_rows_and_roll_ups_once_also_over_parts_of_hours(db: Database) -> None:
    moments = [NOON + timedelta(minutes=minutes) for minutes in (-31, -30, -1, 0, 29, 30, 59, 60, 95)]
    await insert_usage(db, [row(key=new_key(), admitted_at=moment) for moment in moments])
    start = int(NOON.timestamp())
    for _ in range(2):
        assert await tokens_used(db, 7, start, start + 3600) == 4 * 31
        assert await tokens_used(db, 7, start - 1800, start + 1800) == 4 * 31
        assert await tokens_used(db, 7, start - 1800, start + 5400) == 7 * 31
        assert await tokens_used(db, 7, start + 60, start + 1900) == 2 * 31
        assert await tokens_used(db, 8, start - 7200, start + 7200) == 0
        await roll_up(db, limit=5)
    while await roll_up(db):
        pass
    assert await tokens_used(db, 7, start - 7200, start + 7200) == 9 * 31


async def test_old_rows_and_minutes_go_and_hours_stay(db: Database) -> None:
    old = NOON - timedelta(days=100)
    await insert_usage(
        db, [row(), row(key=new_key(int(old.timestamp() * 1e9)), admitted_at=old), row(key=new_key(), status="lost")]
    )
    bounds = retention(NOON, 90, 3)
    assert await purge_usage(db, *bounds) == 0  # in no roll-up yet
    await roll_up(db)
    assert await purge_usage(db, *bounds) == 6  # a row, its four minutes, and its version's hour
    assert len(await rows_in(db)) == 2
    sums = await usage_between(db, "hour", old - timedelta(hours=1), NOON + timedelta(hours=1))
    assert sums[7, "pirate"].requests == 3


_Histograms = st.dictionaries(st.integers(-60, 200), st.integers(1, 2**40), max_size=40) | st.dictionaries(
    st.integers(-32, 127), st.integers(1, 127), max_size=40
)


@given(st.lists(st.tuples(st.integers(0, 4), _Histograms), max_size=30))
def test_many_histograms_add_up_as_one_after_the_other(given_: list[tuple[int, dict[int, int]]]) -> None:
    """Those whose every number is one byte, which are added as arrays, and others."""
    wanted: list[dict[int, int]] = [{} for _ in range(5)]
    for group, counts in given_:
        add(wanted[group], counts)
    assert merged([pack(counts) for _, counts in given_], [group for group, _ in given_], 5) == wanted


async def test_what_was_rolled_up_before_there_were_series_is_in_them(database_url: str) -> None:
    async with Database(database_url) as db:
        await migrate(db)
        moments = [NOON + timedelta(minutes=number) for number in (0, 0, 1, 70)]
        rows = [row(key=new_key(), admitted_at=at, tenant_id=7 + at.minute % 2, ttft_ms=20.0) for at in moments]
        await insert_usage(db, [*rows, row(key=new_key(), adapter="", ttft_ms=900.0)])
        await roll_up(db)
        axis = Axis("hour", int(NOON.timestamp()), 3600, 2)
        before = [await usage_series(db, Subject(tenant_id), axis) for tenant_id in (0, 7, 8)]
        top = await top_tenants(db, top_span(NOON, NOON + timedelta(hours=2)), "tokens", 9)
        blocks = await stored_blocks(db)
        assert len(blocks) == 2 * 3 * 2, "of three adapters, in two tables"
        await migrate(db, "0013")
        assert await stored_blocks(db) == []
        await migrate(db)
        assert await stored_blocks(db) == blocks
        await migrate(db, "0007")
        await migrate(db)
        after = [await usage_series(db, Subject(tenant_id), axis) for tenant_id in (0, 7, 8)]
        for old, new in zip(before, after, strict=True):
            for one, other in zip(old, new, strict=True):
                assert (one.requests, one.completion_tokens, one.ttft, one.queue) == (
                    other.requests,
                    other.completion_tokens,
                    other.ttft,
                    other.queue,
                )
        again = await top_tenants(db, top_span(NOON, NOON + timedelta(hours=2)), "tokens", 9)
        assert [(one.tenant, one.usage.requests) for one in again] == [(one.tenant, one.usage.requests) for one in top]
        names = await top_adapters(db, top_span(NOON, NOON + timedelta(hours=2)), "requests", 9)
        assert [(one.adapter, one.usage.requests) for one in names] == [("pirate", 3), ("", 1), ("pirate", 1)]


async def stored_blocks(db: Database) -> list[tuple[Any, ...]]:
    """What roll-ups and ranks have of six hours and of seven days."""
    found: list[tuple[Any, ...]] = []
    tables: tuple[Any, ...] = (UsageRollupRow, UsageRankRow)
    for table in tables:
        query = (
            select(table.__table__).where(table.period.in_(("6hours", "7days"))).order_by(*table.__table__.primary_key)
        )
        async with db.read() as session:
            found += [tuple(row) for row in await session.execute(query)]
    return found


async def test_a_lease_has_one_holder_until_it_ends(db: Database) -> None:
    assert await acquire(db, "job", "a", 60)
    assert await acquire(db, "job", "a", 60)
    assert not await acquire(db, "job", "b", 60)
    assert await acquire(db, "other", "b", 60)
    await release(db, "job", "b")
    assert not await acquire(db, "job", "b", 60)
    await release(db, "job", "a")
    assert await acquire(db, "job", "b", 0)
    assert await acquire(db, "job", "a", 60)


async def test_of_many_who_want_a_lease_at_once_one_gets_it(db: Database) -> None:
    got = await asyncio.gather(*(acquire(db, "job", f"holder {number}", 60) for number in range(12)))
    assert sum(got) == 1


async def test_a_job_runs_in_one_place_and_goes_on_after_a_failure(db: Database) -> None:
    ran: list[str] = []
    done = asyncio.Event()

    def job(name: str) -> Callable[[], object]:
        async def work() -> None:
            ran.append(name)
            if len(ran) == 4:
                done.set()
            raise RuntimeError("the job's own fault")

        return work

    tasks = [asyncio.create_task(run_periodically(db, "job", name, 0.01, job(name))) for name in "ab"]  # type: ignore[arg-type]
    async with asyncio.timeout(45):
        await done.wait()
    assert len(set(ran)) == 1
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert await acquire(db, "job", "c", 60)
