"""Usage over time, out of roll-ups alone: what is read depends on the span, never on how many requests there were."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from sqlalchemy import Row, Select, select

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRollupRow, UsageTenantRollupRow, UsageVersionRollupRow
from stencilpress.gateway.catalog.usage_sums import (
    EVERYBODY,
    SECONDS,
    Period,
    UsageSum,
    add_up,
    add_up_by,
    instant,
    keyed,
)
from stencilpress.gateway.errors import InvalidRequestError

K = TypeVar("K")

MAX_POINTS = 400
MAX_YEARS = 10
MINUTES_SPAN_S = SECONDS["day"]
"""Longest span that is added up from minutes: 1440 of them, some 20 ms."""
MINUTES_AGE_S = 3 * SECONDS["day"]
"""As long as minutes are kept (gateway/accounting.py)."""
_STEPS_S = (
    *(60, 120, 300, 600, 900, 1800),
    *(hours * 3600 for hours in (1, 2, 3, 6, 12)),
    *(days * 86_400 for days in (1, 2, 5, 10, 30)),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose usage: of everybody unless a tenant is given, of all its adapters, of all versions."""

    tenant_id: int = EVERYBODY
    adapter: str | None = None
    """"" for the base alone."""
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """The points of a series: ``count`` steps of ``step_s`` from ``start_s`` on, each made of roll-ups of a period."""

    period: Period
    start_s: int
    step_s: int
    count: int

    @property
    def end_s(self) -> int:
        return self.start_s + self.step_s * self.count

    @property
    def start(self) -> datetime:
        return instant(self.start_s)

    @property
    def end(self) -> datetime:
        return instant(self.end_s)

    @property
    def times(self) -> list[datetime]:
        """The beginning of each step."""
        return [instant(self.start_s + at * self.step_s) for at in range(self.count)]

    @property
    def before(self) -> Axis:
        """The span of the same length that ends where this one begins."""
        return replace(self, start_s=self.start_s - self.step_s * self.count)

    @property
    def finer_period(self) -> Period:
        """That of roll-ups which are not kept by days."""
        return "hour" if self.period == "day" else self.period

    def index(self, moment: datetime) -> int:
        return (int(moment.timestamp()) - self.start_s) // self.step_s


@dataclass(frozen=True, slots=True)
class Activity:
    """What a list has of each of its lines: requests in each step of an axis, and all of the span together."""

    requests: list[int]
    total: UsageSum


def choose_axis(
    start: datetime,
    end: datetime,
    *,
    points: int = MAX_POINTS,
    previous: bool = False,
    least_s: int = 60,
    now: datetime | None = None,
) -> Axis:
    """The finest steps of at most ``points`` that roll-ups have for a span, and with ``previous`` for the one before.

    Raises :class:`InvalidRequestError` for an empty span, one before 1970, or one of more than ten years.
    """
    start_s, end_s = int(start.timestamp()), int(end.timestamp())
    if start_s >= end_s:
        raise InvalidRequestError("start: is not before the end", param="start")
    if end_s - start_s > MAX_YEARS * 366 * SECONDS["day"] or start_s < 0:
        raise InvalidRequestError(f"start: is more than {MAX_YEARS} years before the end", param="start")
    first_s = start_s - (end_s - start_s) * previous
    age_s = (now or datetime.now(UTC)).timestamp() - first_s
    if end_s - start_s > MINUTES_SPAN_S or age_s > MINUTES_AGE_S:
        least_s = max(least_s, 3600)
    for step_s in _STEPS_S:
        from_s, to_s = start_s // step_s * step_s, -(-math.ceil(end.timestamp()) // step_s) * step_s
        if step_s >= least_s and (to_s - from_s) // step_s <= points:
            return Axis(_coarsest(step_s), from_s, step_s, (to_s - from_s) // step_s)
    raise InvalidRequestError(f"points: {points} are too few for this span", param="points")


def _coarsest(step_s: int) -> Period:
    return "day" if step_s % SECONDS["day"] == 0 else "hour" if step_s % SECONDS["hour"] == 0 else "minute"


async def usage_series(db: Database, subject: Subject, axis: Axis) -> list[UsageSum]:
    """Usage in each step of the axis."""
    async with db.read() as session:
        rows = (await session.execute(_rollups(subject, axis))).all()
    return await asyncio.to_thread(_in_steps, rows, axis)  # tens of milliseconds: streams must not wait for it


async def activity_of_names(
    db: Database, names: Sequence[tuple[int, str]], axis: Axis
) -> dict[tuple[int, str], Activity]:
    """The activity of adapters of several tenants, by tenant and name."""
    table = UsageRollupRow
    query = _within(select(table.__table__), table, axis.period, axis)
    query = keyed(db, query, (table.tenant_id, table.adapter), names)
    async with db.read() as session:
        rows = (await session.execute(query)).all()
    return await asyncio.to_thread(_by_key, rows, names, axis, lambda row: (row.tenant_id, row.adapter))


async def activity_of_versions(
    db: Database, tenant_id: int, adapter: str, numbers: Sequence[int], axis: Axis
) -> dict[int, Activity]:
    """The activity of some versions of an adapter."""
    table = UsageVersionRollupRow
    query = _on_axis(select(table.__table__), table, tenant_id, axis.finer_period, axis)
    query = query.where(table.adapter == adapter, table.version.in_(numbers))
    async with db.read() as session:
        rows = (await session.execute(query)).all()
    return await asyncio.to_thread(_by_key, rows, numbers, axis, lambda row: row.version)


def total(sums: Iterable[UsageSum]) -> UsageSum:
    whole = UsageSum()
    for one in sums:
        whole.merge(one)
    return whole


def _rollups(subject: Subject, axis: Axis) -> Select[Any]:
    table: Any
    period: Period = axis.period
    conditions: list[Any] = []
    if subject.adapter is None:
        table = UsageTenantRollupRow
    elif subject.version is None:
        table = UsageRollupRow
        conditions = [table.adapter == subject.adapter]
    else:
        table = UsageVersionRollupRow
        period = axis.finer_period
        conditions = [table.adapter == subject.adapter, table.version == subject.version]
    return _on_axis(select(table.__table__), table, subject.tenant_id, period, axis).where(*conditions)


def _on_axis(query: Select[Any], table: Any, tenant_id: int, period: Period, axis: Axis) -> Select[Any]:
    return _within(query, table, period, axis).where(table.tenant_id == tenant_id)


def _within(query: Select[Any], table: Any, period: Period, axis: Axis) -> Select[Any]:
    return query.where(table.period == period, table.starts_at >= axis.start, table.starts_at < axis.end)


def _in_steps(rows: Sequence[Row[Any]], axis: Axis) -> list[UsageSum]:
    return add_up(rows, [axis.index(row.starts_at) for row in rows], axis.count)


def _by_key(rows: Sequence[Row[Any]], keys: Sequence[K], axis: Axis, key_of: Callable[[Any], K]) -> dict[K, Activity]:
    found = {key: Activity([0] * axis.count, whole) for key, whole in add_up_by(rows, keys, key_of).items()}
    for row in rows:
        found[key_of(row)].requests[axis.index(row.starts_at)] += row.requests
    return found


def span(start: datetime | None, end: datetime | None, default: timedelta) -> tuple[datetime, datetime]:
    """What is left out is now, and ``default`` before the end."""
    end = end or datetime.now(UTC)
    return start or end - default, end
