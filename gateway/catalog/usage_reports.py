"""What a tenant used, for people: sums by adapter out of the roll-ups, and single requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime, timedelta

from sqlalchemy import select, tuple_

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRequestRow, UsageRollupRow, UsageTenantRollupRow
from stencilpress.gateway.catalog.usage_sums import SECONDS, Period, UsageSum, add_up_by, in_pieces
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.usage.record import UsageRow

DEFAULT_PERIODS = 30
MAX_PERIODS = 400


def time_span(period: Period, start: datetime | None, end: datetime | None) -> tuple[datetime, datetime]:
    """The span of a report: what is left out is now, and :data:`DEFAULT_PERIODS` before the end.

    Raises :class:`InvalidRequestError` for an empty span or one of more than :data:`MAX_PERIODS` periods.
    """
    unit = timedelta(seconds=SECONDS[period])
    end = end or datetime.now(UTC)
    start = start or end - DEFAULT_PERIODS * unit
    if start >= end:
        raise InvalidRequestError("start: is not before the end", param="start")
    if end - start > MAX_PERIODS * unit:
        text = f"is more than {MAX_PERIODS} periods of one {period} before the end; use a longer period"
        raise InvalidRequestError(f"start: {text}", param="start")
    return start, end


async def usage_by_adapter(
    db: Database,
    tenant_id: int,
    period: Period,
    start: datetime,
    end: datetime,
    *,
    after: str | None = None,
    limit: int = 50,
) -> list[tuple[str, UsageSum]]:
    """Sums of the roll-ups that begin in ``[start, end)``, by adapter, "" for the base; those behind ``after``."""
    row = UsageRollupRow
    mine = select(row.__table__).where(row.tenant_id == tenant_id)
    behind = mine if after is None else mine.where(row.adapter > after)
    seen = in_pieces(behind.with_only_columns(row.adapter), row, period, start, end).subquery().c.adapter
    names = select(seen).distinct().order_by(seen).limit(limit)
    async with db.read() as session:
        adapters = list(await session.scalars(names))
        stored = in_pieces(mine.where(row.adapter.in_(adapters)), row, period, start, end)
        rows = (await session.execute(stored)).all()
    sums = await asyncio.to_thread(add_up_by, rows, adapters, lambda row: row.adapter)  # tens of ms: not on the loop
    return list(sums.items())


@dataclass(frozen=True, slots=True)
class DayUsage:
    """What all of a tenant's requests of one day (UTC) used."""

    day: date
    requests: int = 0
    failures: int = 0
    cold_starts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    undelivered_tokens: int = 0


async def usage_by_day(db: Database, tenant_id: int, first: date, last: date) -> list[DayUsage]:
    """Every day of a span, those without requests as well. Raises :class:`InvalidRequestError` for a bad span."""
    start, end = _midnight(first), _midnight(last) + timedelta(days=1)
    time_span("day", start, end)
    row = UsageTenantRollupRow
    names = [field.name for field in fields(DayUsage) if field.name != "day"]
    query = select(row.starts_at, *(getattr(row, name) for name in names)).where(
        row.tenant_id == tenant_id, row.period == "day", row.starts_at >= start, row.starts_at < end
    )
    async with db.read() as session:
        found = {one.starts_at.date(): one for one in await session.execute(query)}
    days = [first + timedelta(days=at) for at in range((last - first).days + 1)]
    return [
        DayUsage(day, **{name: getattr(found[day], name) for name in names}) if day in found else DayUsage(day)
        for day in days
    ]


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


async def list_requests(
    db: Database, tenant_id: int, *, after: tuple[datetime, bytes] | None = None, limit: int = 50
) -> tuple[UsageRow, ...]:
    """A tenant's requests, the newest admitted first; those behind ``after``, a request's time and key."""
    row = UsageRequestRow
    query = select(row.__table__).where(row.tenant_id == tenant_id)
    if after is not None:
        query = query.where(tuple_(row.admitted_at, row.key) < tuple_(*after))
    query = query.order_by(row.admitted_at.desc(), row.key.desc()).limit(limit)
    names = [field.name for field in fields(UsageRow)]
    async with db.read() as session:
        found = await session.execute(query)
        return tuple(UsageRow(**{name: getattr(one, name) for name in names}) for one in found)
