"""What quotas refused, by tenant, dimension and minute or hour."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import BigInteger, cast, extract, func, select
from sqlalchemy.dialects import postgresql, sqlite

from stencilpress.gateway.catalog.series import Axis
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import QuotaRefusalRow
from stencilpress.gateway.catalog.usage_sums import EVERYBODY, SECONDS, Period, instant, parts

PERIODS: tuple[Period, ...] = ("minute", "hour")


class Refused(NamedTuple):
    """Which limit refused whom, in the minute that begins at ``minute_s``."""

    tenant_id: int
    dimension: str
    minute_s: int


class Refusals(NamedTuple):
    refused: int
    watched: int
    """Over a limit that is only watched; the request went on."""


async def add_refusals(db: Database, counts: Mapping[Refused, Refusals]) -> None:
    """Add counts to their minutes and hours, of the tenants and of everybody. Raises :class:`UnavailableError`."""
    sums: dict[tuple[int, Period, datetime, str], list[int]] = {}
    for one, count in counts.items():
        for tenant_id in (one.tenant_id, EVERYBODY):
            for period in PERIODS:
                start = instant(one.minute_s // SECONDS[period] * SECONDS[period])
                total = sums.setdefault((tenant_id, period, start, one.dimension), [0, 0])
                total[0] += count.refused
                total[1] += count.watched
    row = QuotaRefusalRow
    statement = (postgresql.insert if db.is_postgresql else sqlite.insert)(row)
    statement = statement.on_conflict_do_update(
        index_elements=list(row.__table__.primary_key),
        set_={
            "refused": row.refused + statement.excluded.refused,
            "watched": row.watched + statement.excluded.watched,
        },
    )
    names = ("tenant_id", "period", "starts_at", "dimension", "refused", "watched")
    async with db.write() as session:
        for keys in parts(sorted(sums)):
            await session.execute(statement, [dict(zip(names, (*key, *sums[key]), strict=True)) for key in keys])


async def refusal_series(db: Database, tenant_id: int, axis: Axis) -> dict[str, list[Refusals]]:
    """By dimension what was refused in each step of the axis; dimensions without any are left out.

    The database adds up, since a day has 1,440 rows of each dimension.
    """
    row = QuotaRefusalRow
    at = ((cast(extract("epoch", row.starts_at), BigInteger) - axis.start_s) // axis.step_s).label("at")
    query = select(at, row.dimension, func.sum(row.refused), func.sum(row.watched)).where(
        row.tenant_id == tenant_id,
        row.period == axis.finer_period,
        row.starts_at >= axis.start,
        row.starts_at < axis.end,
    )
    found: dict[str, list[Refusals]] = {}
    async with db.read() as session:
        for step, dimension, refused, watched in await session.execute(query.group_by(at, row.dimension)):
            found.setdefault(dimension, [Refusals(0, 0)] * axis.count)[step] = Refusals(int(refused), int(watched))
    return dict(sorted(found.items()))
