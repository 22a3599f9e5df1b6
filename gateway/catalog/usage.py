"""Usage rows and their roll-ups in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, cast

from sqlalchemy import Row, Table, and_, delete, func, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql.elements import ColumnElement

from stencilpress.gateway.catalog.models import UsageRequestRow, UsageRollupRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.usage.histogram import Counts, add, bucket_of, pack, unpack
from stencilpress.gateway.usage.record import UsageRow

Period = Literal["minute", "hour", "day"]
SECONDS: dict[Period, int] = {"minute": 60, "hour": 3600, "day": 86_400}
BATCH = 1000
_KEYS_A_STATEMENT = 200

_SUMS = (
    "requests", "failures", "cold_starts", "prompt_tokens", "cached_tokens", "completion_tokens", "undelivered_tokens"
)  # fmt: skip
_COLUMNS = tuple(one.name for one in fields(UsageRow))
_HISTOGRAMS = ("ttft", "inter_token", "queue")


@dataclass(slots=True)
class UsageSum:
    """Usage of one tenant and adapter over some time; histograms as gateway/usage/histogram.py has them."""

    requests: int = 0
    failures: int = 0
    """Ended by an error, or lost with their gateway."""
    cold_starts: int = 0
    """Waited for their adapter to be loaded."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    undelivered_tokens: int = 0
    ttft: Counts = field(default_factory=dict)
    inter_token: Counts = field(default_factory=dict)
    queue: Counts = field(default_factory=dict)

    def merge(self, other: UsageSum) -> None:
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HISTOGRAMS:
            add(getattr(self, name), getattr(other, name))


async def insert_usage(db: Database, rows: Sequence[UsageRow]) -> None:
    """Write rows; one whose key is there already is left as it is. Raises :class:`UnavailableError`."""
    insert = postgresql.insert if db.is_postgresql else sqlite.insert
    statement = insert(cast("Table", UsageRequestRow.__table__)).on_conflict_do_nothing(index_elements=["key"])
    values = [{**{name: getattr(row, name) for name in _COLUMNS}, "rolled_up": False} for row in rows]
    async with db.write() as session:
        await session.execute(statement, values)


async def tokens_used(db: Database, tenant_id: int, start_s: int, end_s: int) -> int:
    """Billed tokens of requests admitted in ``[start_s, end_s)``, in seconds since the epoch.

    From the roll-ups of whole hours, and from rows for what is not rolled up yet and for parts of hours.
    """
    first_s, last_s = -(-start_s // 3600) * 3600, end_s // 3600 * 3600
    rolled = select(func.sum(UsageRollupRow.prompt_tokens + UsageRollupRow.completion_tokens)).where(
        UsageRollupRow.tenant_id == tenant_id,
        UsageRollupRow.period == "hour",
        UsageRollupRow.starts_at >= _instant(first_s),
        UsageRollupRow.starts_at < _instant(last_s),
    )
    admitted = UsageRequestRow.admitted_at
    whole = and_(admitted >= _instant(first_s), admitted < _instant(last_s), UsageRequestRow.rolled_up.is_(False))
    edges = [
        and_(admitted >= _instant(low), admitted < _instant(high))
        for low, high in ((start_s, first_s), (last_s, end_s))
        if low < high
    ]
    rows = select(func.sum(UsageRequestRow.prompt_tokens + UsageRequestRow.completion_tokens)).where(
        UsageRequestRow.tenant_id == tenant_id, or_(whole, *edges)
    )
    async with db.read() as session:
        return int(await session.scalar(rolled) or 0) + int(await session.scalar(rows) or 0)


async def roll_up(db: Database, limit: int = BATCH) -> int:
    """Add rows that are in no roll-up yet to those of their minute, hour and day; returns how many.

    Each row is added once, whoever else does the same at the same time. Raises :class:`UnavailableError`.
    """
    pending = (
        select(UsageRequestRow.__table__)
        .where(UsageRequestRow.rolled_up.is_(False))
        .order_by(UsageRequestRow.key)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    async with db.write() as session:
        rows = (await session.execute(pending)).all()
        groups: dict[tuple[int, Period, datetime, str], UsageSum] = {}
        for row in rows:
            one = _sum_of(row)
            for period, seconds in SECONDS.items():
                group = (row.tenant_id, period, _floor(row.admitted_at, seconds), row.adapter)
                groups.setdefault(group, UsageSum()).merge(one)
        await _merge(db, session, groups)
        for keys in _parts([row.key for row in rows]):
            done = update(UsageRequestRow).where(UsageRequestRow.key.in_(keys)).values(rolled_up=True)
            await session.execute(done, execution_options={"synchronize_session": False})
    return len(rows)


async def usage_between(
    db: Database, period: Period, start: datetime, end: datetime, tenant_id: int | None = None
) -> dict[tuple[int, str], UsageSum]:
    """Sums by (tenant, adapter) of the roll-ups that begin in ``[start, end)``; no row of a request is read."""
    query = select(UsageRollupRow.__table__).where(
        UsageRollupRow.period == period, UsageRollupRow.starts_at >= start, UsageRollupRow.starts_at < end
    )
    if tenant_id is not None:
        query = query.where(UsageRollupRow.tenant_id == tenant_id)
    sums: dict[tuple[int, str], UsageSum] = {}
    async with db.read() as session:
        for row in (await session.execute(query)).all():
            sums.setdefault((row.tenant_id, row.adapter), UsageSum()).merge(stored_sum(row))
    return sums


async def purge_usage(db: Database, rows_before: datetime, minutes_before: datetime, limit: int = BATCH) -> int:
    """Delete rolled-up rows and minute roll-ups that are older, at most ``limit`` of each; returns how many."""
    oldest = int(rows_before.timestamp() * 1000).to_bytes(6) + bytes(10)
    rows = (
        select(UsageRequestRow.key)
        .where(UsageRequestRow.key < oldest, UsageRequestRow.rolled_up.is_(True))
        .order_by(UsageRequestRow.key)
        .limit(limit)
    )
    minutes = _rollup_key()
    old = select(*minutes).where(UsageRollupRow.period == "minute", UsageRollupRow.starts_at < minutes_before)
    async with db.write() as session:
        keys = list(await session.scalars(rows))
        for part in _parts(keys):
            await session.execute(delete(UsageRequestRow).where(UsageRequestRow.key.in_(part)))
        rollups = [tuple(row) for row in (await session.execute(old.limit(limit))).all()]
        for part in _parts(rollups):
            await session.execute(delete(UsageRollupRow).where(tuple_(*minutes).in_(part)))
    return len(keys) + len(rollups)


async def _merge(
    db: Database, session: AsyncSession, groups: dict[tuple[int, Period, datetime, str], UsageSum]
) -> None:
    """Add sums to the roll-ups of their groups, in one order everywhere, so that two writers cannot lock crosswise."""
    insert = postgresql.insert if db.is_postgresql else sqlite.insert
    empty = {**dict.fromkeys(_SUMS, 0), **dict.fromkeys(_HISTOGRAMS, pack({}))}
    names = ("tenant_id", "period", "starts_at", "adapter")
    for keys in _parts(sorted(groups)):
        fresh = [{**dict(zip(names, key, strict=True)), **empty} for key in keys]
        await session.execute(insert(UsageRollupRow).on_conflict_do_nothing(), fresh)
        query = select(UsageRollupRow).where(tuple_(*_rollup_key()).in_(keys)).with_for_update()
        for row in await session.scalars(query.order_by(*_rollup_key())):
            total = stored_sum(row)
            total.merge(groups[row.tenant_id, row.period, row.starts_at, row.adapter])  # type: ignore[index]
            for name in _SUMS:
                setattr(row, name, getattr(total, name))
            for name in _HISTOGRAMS:
                setattr(row, name, pack(getattr(total, name)))
    await session.flush()


def _rollup_key() -> tuple[ColumnElement[Any], ...]:
    return (UsageRollupRow.tenant_id, UsageRollupRow.period, UsageRollupRow.starts_at, UsageRollupRow.adapter)  # type: ignore[return-value]


def _sum_of(row: Row[Any]) -> UsageSum:
    gaps: Counts = {}
    if row.gaps is not None:
        gaps = unpack(row.gaps)
    elif row.inter_token_ms is not None:
        gaps = {bucket_of(row.inter_token_ms): 1}
    began = row.ttft_ms is not None
    return UsageSum(
        requests=1,
        failures=int(row.status in ("failed", "lost")),
        cold_starts=int(row.cold_start_ms > 0),
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        undelivered_tokens=row.undelivered_tokens,
        ttft={bucket_of(row.ttft_ms): 1} if began else {},
        inter_token=gaps,
        queue={bucket_of(row.queue_ms): 1} if began else {},
    )


def stored_sum(row: UsageRollupRow | Row[Any]) -> UsageSum:
    """The sum that a roll-up's row holds."""
    values: dict[str, Any] = {name: getattr(row, name) for name in _SUMS}
    values |= {name: unpack(getattr(row, name)) for name in _HISTOGRAMS}
    return UsageSum(**values)


def _floor(moment: datetime, seconds: int) -> datetime:
    return _instant(int(moment.timestamp()) // seconds * seconds)


def _instant(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _parts(items: list[Any]) -> list[list[Any]]:
    return [items[start : start + _KEYS_A_STATEMENT] for start in range(0, len(items), _KEYS_A_STATEMENT)]


def retention(now: datetime, rows_days: int, minutes_days: int) -> tuple[datetime, datetime]:
    """The two bounds of :func:`purge_usage`."""
    return now - timedelta(days=rows_days), now - timedelta(days=minutes_days)
