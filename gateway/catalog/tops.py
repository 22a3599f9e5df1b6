"""Who is on top: adapters or tenants of a span of hours or days by a number, out of roll-ups alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import CompoundSelect, Float, Row, Select, cast, func, null, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRankRow, UsageRollupRow, UsageTenantRollupRow
from stencilpress.gateway.catalog.usage_sums import (
    EVERYBODY,
    SECONDS,
    Period,
    UsageSum,
    add_up_by,
    floor,
    in_pieces,
    keyed,
    pieces,
)
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.usage.histogram import merged, quantiles

By = Literal["tokens", "requests", "failures", "cold_starts", "hit_rate", "ttft_p99"]
"""``hit_rate`` has the lowest first, everything else the highest."""
MAX_DAYS = 31
HOURS_SPAN = timedelta(hours=25)
"""Longest span that is added up from hours."""
CANDIDATES = 100
"""For the order by a percentile: those with the most requests."""

Name = tuple[int, str | None]
"""A tenant's id and an adapter; "" for the base, None for a tenant as a whole."""
RollUp = Any
"""The table of adapters' roll-ups or that of tenants'."""


@dataclass(frozen=True, slots=True)
class Top:
    """One line of a table. ``adapter`` is None for a tenant as a whole, "" for the base."""

    tenant: str
    adapter: str | None
    usage: UsageSum


@dataclass(frozen=True, slots=True)
class TopSpan:
    """Whole hours or days that hold a span."""

    period: Period
    start: datetime
    end: datetime


def top_span(start: datetime, end: datetime) -> TopSpan:
    """Raises :class:`InvalidRequestError` for a span that is empty or too long."""
    if start >= end:
        raise InvalidRequestError("start: is not before the end", param="start")
    if end - start > timedelta(days=MAX_DAYS):
        raise InvalidRequestError(f"start: is more than {MAX_DAYS} days before the end", param="start")
    period: Period = "hour" if end - start <= HOURS_SPAN else "day"
    return TopSpan(period, floor(start, SECONDS[period]), end)


async def top_adapters(db: Database, span: TopSpan, by: By, limit: int, tenant_id: int | None = None) -> list[Top]:
    """The adapters of a tenant, or of all, that come first."""
    row = UsageRankRow
    names = select(row.tenant_id, row.adapter).where(or_(*pieces(row, span.period, span.start, span.end)))
    if tenant_id is not None:
        names = names.where(row.tenant_id == tenant_id)
    names = names.group_by(row.tenant_id, row.adapter).order_by(*_order(row, by), row.tenant_id, row.adapter)
    names = names.limit(_wanted(by, limit))
    async with db.read() as session:
        found = [(one.tenant_id, one.adapter) for one in (await session.execute(names)).all()]
        return await _summed(db, session, UsageRollupRow, span, found, by, limit)


async def top_tenants(db: Database, span: TopSpan, by: By, limit: int) -> list[Top]:
    """The tenants that come first."""
    row = UsageTenantRollupRow
    query = _within(select(row.tenant_id), row, span).where(row.tenant_id != EVERYBODY).group_by(row.tenant_id)
    ids = query.order_by(*_order(row, by), row.tenant_id).limit(_wanted(by, limit))
    async with db.read() as session:
        found = [(tenant, None) for tenant in await session.scalars(ids)]
        return await _summed(db, session, row, span, found, by, limit)


async def _summed(
    db: Database, session: AsyncSession, table: RollUp, span: TopSpan, names: Sequence[Name], by: By, limit: int
) -> list[Top]:
    """What is shown of those that come first. Of candidates only first tokens are read, of the chosen all."""
    if by == "ttft_p99":
        firsts = await session.execute(_of(db, names, table, span, [table.ttft]))
        names = await asyncio.to_thread(_slowest, names, firsts.all(), limit)
    columns = [one for one in table.__table__.c if one.name not in ("period", "starts_at", "tenant_id", "adapter")]
    rows = (await session.execute(_of(db, names, table, span, columns))).all()
    tenants = await _names(session, {tenant for tenant, _ in names})
    sums = await asyncio.to_thread(add_up_by, rows, names, _name_of)
    return [Top(tenants.get(tenant, ""), adapter, usage) for (tenant, adapter), usage in sums.items()]


def _of(
    db: Database, names: Sequence[Any], table: RollUp, span: TopSpan, columns: Sequence[Any]
) -> Select[Any] | CompoundSelect[Any]:
    """Rows of the roll-ups of these adapters or tenants, with their names before ``columns``."""
    if table is UsageTenantRollupRow:
        query = select(table.tenant_id, null().label("adapter"), *columns)
        return _within(query, table, span).where(table.tenant_id.in_([tenant for tenant, _ in names]))
    key = (table.tenant_id, table.adapter)
    return in_pieces(keyed(db, select(*key, *columns), key, names), table, span.period, span.start, span.end)


def _within(query: Select[Any], table: Any, span: TopSpan) -> Select[Any]:
    return query.where(table.period == span.period, table.starts_at >= span.start, table.starts_at < span.end)


def _order(row: Any, by: By) -> list[Any]:
    requests = func.sum(row.requests)
    if by == "hit_rate":
        return [(cast(func.sum(row.cold_starts), Float) / requests).desc(), requests.desc()]
    tokens = row.tokens if row is UsageRankRow else row.prompt_tokens + row.completion_tokens
    columns = {"tokens": tokens, "failures": row.failures, "cold_starts": row.cold_starts}
    return [func.sum(columns.get(by, row.requests)).desc()]


def _wanted(by: By, limit: int) -> int:
    return max(CANDIDATES, limit) if by == "ttft_p99" else limit


async def _names(session: Any, ids: set[int]) -> dict[int, str]:
    found = await session.execute(select(TenantRow.id, TenantRow.name).where(TenantRow.id.in_(ids)))
    return {one.id: one.name for one in found}


def _slowest(names: Sequence[Name], rows: Sequence[Row[Any]], limit: int) -> list[Name]:
    places = {name: place for place, name in enumerate(names)}
    counts = merged([row.ttft for row in rows], [places[_name_of(row)] for row in rows], len(names))
    slowness = [quantiles(one, [0.99])[0] or 0.0 for one in counts]
    return [names[at] for at in sorted(range(len(names)), key=lambda at: -slowness[at])[:limit]]


def _name_of(row: Row[Any]) -> Name:
    return row.tenant_id, row.adapter
