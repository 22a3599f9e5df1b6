"""Usage rows in SQL, and the tokens that quotas begin at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import cast

from sqlalchemy import ColumnElement, Select, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import InstrumentedAttribute

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRequestRow, UsageTenantRollupRow
from stencilpress.gateway.catalog.usage_sums import instant
from stencilpress.gateway.usage.record import UsageRow

_COLUMNS = tuple(one.name for one in fields(UsageRow))


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
    if first_s > last_s:  # inside one hour
        first_s = last_s = end_s
    rollup, row = UsageTenantRollupRow, UsageRequestRow
    whole_hours = _within(rollup.starts_at, first_s, last_s)
    sums = [_tokens(rollup).where(rollup.tenant_id == tenant_id, rollup.period == "hour", *whole_hours)]
    mine = _tokens(row).where(row.tenant_id == tenant_id)
    sums.append(mine.where(~row.rolled_up, *_within(row.admitted_at, first_s, last_s)))
    sums += [mine.where(*_within(row.admitted_at, *edge)) for edge in ((start_s, first_s), (last_s, end_s))]
    async with db.read() as session:  # one statement sees no row twice, or not at all, that is rolled up meanwhile
        (found,) = await session.execute(select(*(one.scalar_subquery() for one in sums)))
    return sum(int(one or 0) for one in found)


def _tokens(table: type[UsageTenantRollupRow] | type[UsageRequestRow]) -> Select[tuple[int]]:
    return select(func.sum(table.prompt_tokens + table.completion_tokens))


def _within(moment: InstrumentedAttribute[datetime], start_s: int, end_s: int) -> tuple[ColumnElement[bool], ...]:
    return moment >= instant(start_s), moment < instant(end_s)
