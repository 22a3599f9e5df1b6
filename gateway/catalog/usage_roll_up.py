"""From usage rows to roll-ups: by version, by adapter, by tenant and of everybody; and what is kept for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Row, delete, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.schema import require_schema
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import (
    EngineSampleRow,
    QuotaRefusalRow,
    UsageRankRow,
    UsageRequestRow,
    UsageRollupRow,
    UsageTenantRollupRow,
    UsageVersionRollupRow,
)
from stencilpress.gateway.catalog.usage_sums import (
    BLOCKS,
    EVERYBODY,
    SECONDS,
    Key,
    Period,
    UsageSum,
    add_to_rollups,
    instant,
    parts,
)

BATCH = 1000
COMPARED_DAYS = 90
"""Hours of versions, of refusals and of engines are kept for so long; those of adapters and tenants for good."""


class _Group(NamedTuple):
    """Of a usage row; a coarser one has None where it does not tell apart."""

    tenant_id: int
    adapter: str | None
    version: int | None
    start_s: int


async def roll_up(db: Database, limit: int = BATCH) -> int:
    """Add rows that are in no roll-up yet to those of their minute, hour and day; returns how many.

    Each row is added once, whoever else does the same at the same time. Raises :class:`UnavailableError`, also once the
    schema is another one than this code's: a newer code has its own roll-ups, which would lack these rows.
    """
    pending = (
        select(UsageRequestRow.__table__)
        .where(~UsageRequestRow.rolled_up)
        .order_by(UsageRequestRow.key)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    async with db.write() as session:
        rows = (await session.execute(pending)).all()
        await _add(db, session, _RollUps(rows))
        for keys in parts([row.key for row in rows]):
            done = update(UsageRequestRow).where(UsageRequestRow.key.in_(keys)).values(rolled_up=True)
            await session.execute(done, execution_options={"synchronize_session": False})
        await require_schema(session)
    return len(rows)


class _RollUps:
    """What rows add to each table, by its primary key. Each coarser sum is made of the finer ones."""

    def __init__(self, rows: Iterable[Row[Any]]) -> None:
        self.versions: dict[Key, UsageSum] = {}
        self.adapters: dict[Key, UsageSum] = {}
        self.tenants: dict[Key, UsageSum] = {}
        self.ranks: dict[Key, UsageSum] = {}
        groups: dict[_Group, UsageSum] = {}
        for row in rows:
            group = _Group(row.tenant_id, row.adapter, row.version, int(row.admitted_at.timestamp()))
            groups.setdefault(_floor(group, SECONDS["minute"]), UsageSum()).take(row)
        for period, seconds in SECONDS.items():
            groups = _coarser(groups, lambda group, seconds=seconds: _floor(group, seconds))  # type: ignore[misc]
            self._take(period, groups)

    def _take(self, period: Period, by_version: Mapping[_Group, UsageSum]) -> None:
        by_adapter = _coarser(by_version, lambda group: group._replace(version=None))
        by_tenant = _coarser(by_adapter, lambda group: group._replace(adapter=None))
        everybody = _coarser(by_tenant, lambda group: group._replace(tenant_id=EVERYBODY))
        if period != "day":
            self.versions |= {
                (one.tenant_id, period, one.adapter, one.version, instant(one.start_s)): usage
                for one, usage in by_version.items()
            }
        self._take_adapters(period, by_adapter)
        if period in BLOCKS:
            block, seconds = BLOCKS[period]
            self._take_adapters(block, _coarser(by_adapter, lambda group: _floor(group, seconds)))
        for one, usage in (by_tenant | everybody).items():
            self.tenants[one.tenant_id, period, instant(one.start_s)] = usage

    def _take_adapters(self, period: str, by_adapter: Mapping[_Group, UsageSum]) -> None:
        for one, usage in by_adapter.items():
            start = instant(one.start_s)
            self.adapters[one.tenant_id, period, start, one.adapter] = usage
            if period != "minute":
                self.ranks[period, start, one.tenant_id, one.adapter] = usage


def _coarser(groups: Mapping[_Group, UsageSum], of: Callable[[_Group], _Group]) -> dict[_Group, UsageSum]:
    sums: dict[_Group, UsageSum] = {}
    for group, usage in groups.items():
        sums.setdefault(of(group), UsageSum()).merge(usage)
    return sums


def _floor(group: _Group, seconds: int) -> _Group:
    return group._replace(start_s=group.start_s // seconds * seconds)


async def _add(db: Database, session: AsyncSession, added: _RollUps) -> None:
    """In one order of tables everywhere, for the same reason as their rows."""
    await add_to_rollups(db, session, UsageVersionRollupRow, added.versions)
    await add_to_rollups(db, session, UsageRollupRow, added.adapters)
    await add_to_rollups(db, session, UsageTenantRollupRow, added.tenants)
    insert = postgresql.insert if db.is_postgresql else sqlite.insert
    statement = insert(UsageRankRow)
    sums = ("requests", "failures", "cold_starts", "tokens")
    statement = statement.on_conflict_do_update(
        index_elements=list(UsageRankRow.__table__.primary_key),
        set_={name: getattr(UsageRankRow, name) + getattr(statement.excluded, name) for name in sums},
    )
    for keys in parts(sorted(added.ranks)):
        await session.execute(statement, [_rank(key, added.ranks[key]) for key in keys])


def _rank(key: Key, usage: UsageSum) -> dict[str, Any]:
    period, starts_at, tenant_id, adapter = key
    return {
        "period": period,
        "starts_at": starts_at,
        "tenant_id": tenant_id,
        "adapter": adapter,
        "requests": usage.requests,
        "failures": usage.failures,
        "cold_starts": usage.cold_starts,
        "tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def purge_usage(db: Database, rows_before: datetime, minutes_before: datetime, limit: int = BATCH) -> int:
    """Delete rolled-up rows, minutes that are older, and hours of what is compared, :data:`COMPARED_DAYS` after that.

    At most ``limit`` of each kind; returns how many.
    """
    oldest = int(rows_before.timestamp() * 1000).to_bytes(6) + bytes(10)
    rows = (
        select(UsageRequestRow.key)
        .where(UsageRequestRow.key < oldest, UsageRequestRow.rolled_up.is_(True))
        .order_by(UsageRequestRow.key)
        .limit(limit)
    )
    async with db.write() as session:
        keys = list(await session.scalars(rows))
        for part in parts(keys):
            await session.execute(delete(UsageRequestRow).where(UsageRequestRow.key.in_(part)))
        gone = len(keys)
        for table in (UsageRollupRow, UsageVersionRollupRow, UsageTenantRollupRow, QuotaRefusalRow, EngineSampleRow):
            gone += await _purge(session, table, "minute", minutes_before, limit)
        for table in (UsageVersionRollupRow, QuotaRefusalRow, EngineSampleRow):
            gone += await _purge(session, table, "hour", minutes_before - timedelta(days=COMPARED_DAYS), limit)
    return gone


async def _purge(session: AsyncSession, table: Any, period: Period, before: datetime, limit: int) -> int:
    columns = list(table.__table__.primary_key)
    old = select(*columns).where(table.period == period, table.starts_at < before).limit(limit)
    found = [tuple(row) for row in (await session.execute(old)).all()]
    for part in parts(found):
        await session.execute(delete(table).where(tuple_(*columns).in_(part)))
    return len(found)


def retention(now: datetime, rows_days: int, minutes_days: int) -> tuple[datetime, datetime]:
    """The two bounds of :func:`purge_usage`."""
    return now - timedelta(days=rows_days), now - timedelta(days=minutes_days)
