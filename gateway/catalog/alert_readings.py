"""What rules are judged by, out of roll-ups: a few questions for all tenants and adapters, none for one of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Select, and_, func, or_, select

from stencilpress.gateway.alerts.incidents import Measured, Subject
from stencilpress.gateway.alerts.rules import WINDOW_S, Kind
from stencilpress.gateway.alerts.traffic import Loads, Traffic
from stencilpress.gateway.catalog.models import AdapterRow, TenantRow, VersionRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRankRow, UsageRollupRow, UsageTenantRollupRow
from stencilpress.gateway.catalog.usage_sums import SECONDS, floor, instant, parts
from stencilpress.gateway.names import ANY_BASE
from stencilpress.gateway.quota.calendar import periods_at
from stencilpress.gateway.quota.terms import Span
from stencilpress.gateway.usage.histogram import add, unpack

DAY_S = 86_400
PAST = timedelta(days=1)
"""What hit rates are compared with: a whole day, so that nights are not compared with noons alone."""
ROWS_AT_ONCE = 500


async def read_traffic(db: Database, now: datetime, least_requests: int) -> dict[tuple[int, str], Traffic]:
    """Requests of the window by tenant and adapter; histograms only of those with so many requests.

    Some rows at a time: of a hundred thousand at once the garbage collector looks at each, and all threads wait for it.
    """
    row = UsageRollupRow
    recent = (row.period == "minute", row.starts_at >= now - timedelta(seconds=WINDOW_S))
    sums = select(
        row.tenant_id, row.adapter, func.sum(row.requests), func.sum(row.failures), func.sum(row.cold_starts)
    ).where(*recent)
    busy = (
        select(row.tenant_id, row.adapter)
        .where(*recent)
        .group_by(row.tenant_id, row.adapter)
        .having(func.sum(row.requests) >= least_requests)
        .subquery()
    )
    histograms = select(row.tenant_id, row.adapter, row.ttft, row.cold_start).join(
        busy, and_(row.tenant_id == busy.c.tenant_id, row.adapter == busy.c.adapter)
    )
    found: dict[tuple[int, str], Traffic] = {}
    some = {"yield_per": ROWS_AT_ONCE}
    async with db.read() as session:
        counted = await session.stream(sums.group_by(row.tenant_id, row.adapter), execution_options=some)
        async for rows in counted.partitions():
            for tenant_id, adapter, requests, failures, cold_starts in rows:
                found[tenant_id, adapter or ANY_BASE] = Traffic(int(requests), int(failures), int(cold_starts))
        packed = await session.stream(histograms.where(*recent), execution_options=some)
        async for histogram_rows in packed.partitions():
            for tenant_id, adapter, ttft, cold_start in histogram_rows:
                traffic = found[tenant_id, adapter or ANY_BASE]
                add(traffic.ttft, unpack(ttft))
                if cold_start is not None:
                    add(traffic.cold_start, unpack(cold_start))
    return found


async def read_past(db: Database, now: datetime) -> dict[tuple[int, str], Loads]:
    """The whole hours of the day before this one, by tenant and adapter; of the base there is nothing to load."""
    row, end = UsageRankRow, floor(now, SECONDS["hour"])
    day = (row.period == "hour", row.starts_at >= end - PAST, row.starts_at < end, row.adapter != "")
    sums = select(row.tenant_id, row.adapter, func.sum(row.requests), func.sum(row.cold_starts)).where(*day)
    some = {"yield_per": ROWS_AT_ONCE}
    async with db.read() as session:
        found = await session.stream(sums.group_by(row.tenant_id, row.adapter), execution_options=some)
        return {
            (tenant, adapter): Loads(int(requests), int(cold_starts))
            async for rows in found.partitions()
            for tenant, adapter, requests, cold_starts in rows
        }


async def read_quotas(db: Database, now: datetime) -> dict[Subject, Measured]:
    """How much of the budgets of day and month each limited tenant has spent; one question for each time zone."""
    row = TenantRow
    limited = select(row.id, row.time_zone, row.tokens_per_day, row.tokens_per_month).where(
        row.deleted_at.is_(None), or_(row.tokens_per_day.is_not(None), row.tokens_per_month.is_not(None))
    )
    async with db.read() as session:
        tenants = (await session.execute(limited)).all()
    zones: defaultdict[str, list[tuple[int, int | None, int | None]]] = defaultdict(list)
    for tenant_id, zone, per_day, per_month in tenants:
        zones[zone].append((tenant_id, per_day, per_month))
    found: dict[Subject, Measured] = {}
    for zone, members in zones.items():
        day, month = periods_at(now.timestamp(), zone)
        for at, item, span in ((1, "day", day), (2, "month", month)):
            budgets = {one[0]: budget for one in members if (budget := one[at]) is not None}
            found.update(_spent(item, budgets, await _tokens(db, budgets, span)))
    return found


async def read_damaged(db: Database, errors: Mapping[str, str]) -> dict[Subject, Measured]:
    """The versions whose blobs engines could not load; ``errors`` are by digest. Deleted ones do not matter."""
    found: dict[Subject, Measured] = {}
    async with db.read() as session:
        for some in parts(sorted(errors)):
            rows = await session.execute(_versions().where(VersionRow.digest.in_(some)))
            for tenant_id, adapter, number, digest in rows:
                found[_damaged(tenant_id, adapter, number)] = Measured(1.0, errors[digest])
    return found


async def read_unmended(db: Database, marked: Mapping[Subject, str], sound: Collection[str]) -> dict[Subject, Measured]:
    """Those of the versions that were ``marked`` as damaged, with a note, that no engine has loaded since.

    ``sound`` are the digests that one has loaded. Deleted ones do not matter.
    """
    found: dict[Subject, Measured] = {}
    async with db.read() as session:
        for some in parts(sorted({subject.adapter for subject in marked})):
            for tenant_id, adapter, number, digest in await session.execute(
                _versions().where(AdapterRow.name.in_(some))
            ):
                subject = _damaged(tenant_id, adapter, number)
                if subject in marked and digest not in sound:
                    found[subject] = Measured(1.0, marked[subject])
    return found


def _versions() -> Select[int, str, int, str]:
    """Tenant, adapter, number and digest of those that are not deleted."""
    query = select(AdapterRow.tenant_id, AdapterRow.name, VersionRow.number, VersionRow.digest)
    query = query.join(AdapterRow, VersionRow.adapter_id == AdapterRow.id)
    return query.where(VersionRow.deleted_at.is_(None), AdapterRow.deleted_at.is_(None))


def _damaged(tenant_id: int, adapter: str, number: int) -> Subject:
    return Subject(Kind.ADAPTER_CORRUPT, tenant_id, adapter, str(number))


def _spent(item: str, budgets: Mapping[int, int], used: Mapping[int, int]) -> dict[Subject, Measured]:
    found = {}
    for tenant_id, budget in budgets.items():
        tokens = used.get(tenant_id, 0)
        measured = Measured(tokens / budget, f"{tokens:,} of {budget:,} tokens of the {item}")
        for kind in (Kind.QUOTA_NEAR, Kind.QUOTA_ALMOST_SPENT):
            found[Subject(kind, tenant_id, item=item)] = measured
    return found


async def _tokens(db: Database, tenants: Collection[int], span: Span) -> dict[int, int]:
    """Billed tokens by tenant, from roll-ups of whole days (UTC) and of the hours before and behind them."""
    row = UsageTenantRollupRow
    ids, total = sorted(tenants), func.sum(row.prompt_tokens + row.completion_tokens)
    query = select(row.tenant_id, total).where(_within(span)).group_by(row.tenant_id)
    found: dict[int, int] = {}
    async with db.read() as session:
        for some in parts(ids):
            rows = await session.execute(query.where(row.tenant_id.in_(some)))
            found.update({tenant_id: int(tokens) for tenant_id, tokens in rows})
    return found


def _within(span: Span) -> ColumnElement[bool]:
    """Roll-ups that make up a span; parts of hours, in time zones that have them, count with their hour."""
    start, end = span.start // 3600 * 3600, -(-span.end // 3600) * 3600
    first, last = -(-start // DAY_S) * DAY_S, end // DAY_S * DAY_S
    spans: Sequence[tuple[str, int, int]] = [("day", first, last), ("hour", start, first), ("hour", last, end)]
    if first >= last:
        spans = [("hour", start, end)]
    row = UsageTenantRollupRow
    return or_(
        *(
            and_(row.period == period, row.starts_at >= instant(low), row.starts_at < instant(high))
            for period, low, high in spans
            if low < high
        )
    )
