"""What engines did, by minute and hour."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from stencilpress.gateway.catalog.series import Axis
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import EngineSampleRow
from stencilpress.gateway.catalog.usage_sums import SECONDS, Period, instant, parts
from stencilpress.gateway.usage.engine_sums import EngineSum, decode, encode

PERIODS: tuple[Period, ...] = ("minute", "hour")


class Sampled(NamedTuple):
    """One engine of a server, in the minute that begins at ``minute_s``."""

    server: str
    engine: int
    minute_s: int


async def add_engine_samples(db: Database, sums: Mapping[Sampled, EngineSum]) -> None:
    """Add sums to their minutes and hours. Raises :class:`UnavailableError`."""
    groups: dict[tuple[str, int, Period, datetime], EngineSum] = {}
    for one, usage in sums.items():
        for period in PERIODS:
            start = instant(one.minute_s // SECONDS[period] * SECONDS[period])
            groups.setdefault((one.server, one.engine, period, start), EngineSum()).merge(usage)
    row = EngineSampleRow
    columns = list(row.__table__.primary_key)
    names = [str(column.key) for column in columns]
    insert = (postgresql.insert if db.is_postgresql else sqlite.insert)(row).on_conflict_do_nothing()
    async with db.write() as session:
        for keys in parts(sorted(groups)):
            await session.execute(insert, [{**dict(zip(names, key, strict=True)), "sums": _NOTHING} for key in keys])
            query = select(row).where(tuple_(*columns).in_(keys)).with_for_update().order_by(*columns)
            for stored in await session.scalars(query):
                total = decode(stored.sums)
                total.merge(groups[stored.server, stored.engine, stored.period, stored.starts_at])  # type: ignore[index]
                stored.sums = encode(total)
            await session.flush()


async def engine_series(db: Database, axis: Axis, server: str, engine: int | None = None) -> dict[int, list[EngineSum]]:
    """What one engine of a server, or each that was there, did in each step of the axis."""
    row = EngineSampleRow
    query: Any = select(row.engine, row.starts_at, row.sums).where(
        row.server == server,
        row.period == axis.finer_period,
        row.starts_at >= axis.start,
        row.starts_at < axis.end,
    )
    if engine is not None:
        query = query.where(row.engine == engine)
    async with db.read() as session:
        rows = (await session.execute(query)).all()
    return await asyncio.to_thread(_in_steps, rows, axis)


def _in_steps(rows: Sequence[Row[Any]], axis: Axis) -> dict[int, list[EngineSum]]:
    engines: dict[int, list[EngineSum]] = {}
    for row in rows:
        steps = engines.get(row.engine)
        if steps is None:
            steps = engines[row.engine] = [EngineSum() for _ in range(axis.count)]
        steps[axis.index(row.starts_at)].merge(decode(row.sums))
    return engines


_NOTHING = encode(EngineSum())
