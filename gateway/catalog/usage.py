"""Usage rows in SQL, and the tokens that quotas begin at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import cast

from sqlalchemy import Table, and_, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from stencilpress.gateway.catalog.models import UsageRequestRow, UsageRollupRow
from stencilpress.gateway.catalog.session import Database
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
    rolled = select(func.sum(UsageRollupRow.prompt_tokens + UsageRollupRow.completion_tokens)).where(
        UsageRollupRow.tenant_id == tenant_id,
        UsageRollupRow.period == "hour",
        UsageRollupRow.starts_at >= instant(first_s),
        UsageRollupRow.starts_at < instant(last_s),
    )
    admitted = UsageRequestRow.admitted_at
    whole = and_(admitted >= instant(first_s), admitted < instant(last_s), UsageRequestRow.rolled_up.is_(False))
    edges = [
        and_(admitted >= instant(low), admitted < instant(high))
        for low, high in ((start_s, first_s), (last_s, end_s))
        if low < high
    ]
    rows = select(func.sum(UsageRequestRow.prompt_tokens + UsageRequestRow.completion_tokens)).where(
        UsageRequestRow.tenant_id == tenant_id, or_(whole, *edges)
    )
    async with db.read() as session:
        return int(await session.scalar(rolled) or 0) + int(await session.scalar(rows) or 0)
