"""Sums of usage, how a roll-up's row holds one, and adding sums to rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar, cast

import msgspec
from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    column,
    func,
    literal,
    select,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_models import UsageRollupRow, UsageTenantRollupRow, UsageVersionRollupRow
from stencilpress.gateway.usage.histogram import Counts, add, bucket_of, merged, pack, unpack

K = TypeVar("K")
Period = Literal["minute", "hour", "day"]
SECONDS: dict[Period, int] = {"minute": 60, "hour": 3600, "day": 86_400}
BLOCKS: dict[Period, tuple[str, int]] = {"hour": ("6hours", 6 * 3600), "day": ("7days", 7 * 86_400)}
"""Coarser roll-ups of adapters, which are read instead of their hours or days: their name and seconds, from 1970 on."""
EVERYBODY = 0
"""The tenant whose roll-ups are of all tenants together; ids begin at 1."""
KEYS_A_STATEMENT = 200

RollupRow = UsageRollupRow | UsageVersionRollupRow | UsageTenantRollupRow
Key = tuple[Any, ...]
"""The values of a roll-up's primary key, in its order."""

_SUMS = (
    "requests", "failures", "cold_starts", "prompt_tokens", "cached_tokens", "completion_tokens", "undelivered_tokens",
    "duration_ms",
)  # fmt: skip
_HISTOGRAMS = ("ttft", "inter_token", "queue", "cold_start")
_encode = msgspec.msgpack.Encoder().encode
_decode_errors = msgspec.msgpack.Decoder(dict[str, int]).decode


@dataclass(slots=True)
class UsageSum:
    """Usage over some time; histograms as gateway/usage/histogram.py has them."""

    requests: int = 0
    failures: int = 0
    """Ended by an error, or lost with their gateway."""
    cold_starts: int = 0
    """Waited for their adapter to be loaded."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    undelivered_tokens: int = 0
    duration_ms: float = 0.0
    """Of all requests together."""
    ttft: Counts = field(default_factory=dict)
    inter_token: Counts = field(default_factory=dict)
    queue: Counts = field(default_factory=dict)
    cold_start: Counts = field(default_factory=dict)
    """Waits of those that had a cold start."""
    errors: dict[str, int] = field(default_factory=dict)
    """Failures by their error code, ``lost`` for those whose gateway was killed."""

    def merge(self, other: UsageSum) -> None:
        self.count(other, other.errors)
        for name in _HISTOGRAMS:
            add(getattr(self, name), getattr(other, name))

    def count(self, other: UsageSum | RollupRow | Row[Any], errors: Mapping[str, int]) -> None:
        """Add all of another sum, or of a roll-up's row, but its histograms. Written out: thousands of rows a page."""
        self.requests += other.requests
        self.failures += other.failures
        self.cold_starts += other.cold_starts
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.undelivered_tokens += other.undelivered_tokens
        self.duration_ms += other.duration_ms
        for code, failures in errors.items():
            self.errors[code] = self.errors.get(code, 0) + failures

    def take(self, row: Row[Any]) -> None:
        """Add one row of ``usage_requests``."""
        failed = row.status in ("failed", "lost")
        self.requests += 1
        self.failures += failed
        self.prompt_tokens += row.prompt_tokens
        self.cached_tokens += row.cached_tokens
        self.completion_tokens += row.completion_tokens
        self.undelivered_tokens += row.undelivered_tokens
        self.duration_ms += row.duration_ms
        if row.gaps is not None:
            add(self.inter_token, unpack(row.gaps))
        elif row.inter_token_ms is not None:
            _count(self.inter_token, row.inter_token_ms)
        if row.ttft_ms is not None:
            _count(self.ttft, row.ttft_ms)
            _count(self.queue, row.queue_ms)
        if row.cold_start_ms > 0:
            self.cold_starts += 1
            _count(self.cold_start, row.cold_start_ms)
        if failed:
            code = row.error_code or row.status
            self.errors[code] = self.errors.get(code, 0) + 1


def stored_sum(row: RollupRow | Row[Any]) -> UsageSum:
    """The sum that a roll-up's row holds."""
    values: dict[str, Any] = {name: getattr(row, name) for name in _SUMS}
    values |= {name: unpack(getattr(row, name) or _EMPTY) for name in _HISTOGRAMS}
    return UsageSum(**values, errors=_decode_errors(row.errors or _EMPTY))


def add_up(rows: Sequence[RollupRow | Row[Any]], groups: Sequence[int], count: int) -> list[UsageSum]:
    """What roll-ups' rows sum up to, each added to the sum of its group, a number below ``count``."""
    sums = [UsageSum() for _ in range(count)]
    for row, group in zip(rows, groups, strict=True):
        sums[group].count(row, _decode_errors(row.errors) if row.errors is not None else {})
    for name in _HISTOGRAMS:
        counts = merged([getattr(row, name) or _EMPTY for row in rows], groups, count)
        for one, of in zip(sums, counts, strict=True):
            setattr(one, name, of)
    return sums


def add_up_by(rows: Sequence[RollupRow | Row[Any]], keys: Iterable[K], key_of: Callable[[Any], K]) -> dict[K, UsageSum]:
    """What roll-ups' rows sum up to by key, in the order of the keys; each row must have one of them."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    sums = add_up(rows, [numbers[key_of(row)] for row in rows], len(numbers))
    return dict(zip(numbers, sums, strict=True))


def keyed(db: Database, query: Select[Any], columns: Sequence[Any], keys: Sequence[Key]) -> Select[Any]:
    """Only the rows in which these columns have one of these values.

    PostgreSQL steps along an index for each; out of a list behind ``IN`` it would make as many conditions, plan for
    long, and read much beside: 25 ms instead of 2 for a hundred adapters.
    """
    if not db.is_postgresql:
        return query.where(tuple_(*columns).in_(keys))
    lists = zip(*dict.fromkeys(keys), strict=True) if keys else [()] * len(columns)
    arrays = [literal(list(one), postgresql.ARRAY(of.type)) for one, of in zip(lists, columns, strict=True)]
    wanted = func.unnest(*arrays).table_valued(*(column(one.key, one.type) for one in columns)).render_derived()
    return query.join(wanted, and_(*(one == wanted.c[one.key] for one in columns)))


async def add_to_rollups(
    db: Database, session: AsyncSession, kind: type[RollupRow], groups: Mapping[Key, UsageSum]
) -> None:
    """Add sums to the roll-ups of their keys, in one order everywhere, so that two writers cannot lock crosswise."""
    insert = postgresql.insert if db.is_postgresql else sqlite.insert
    table = cast("Table", kind.__table__)
    columns = list(table.primary_key)
    names = [str(column.key) for column in columns]
    fresh = insert(table).on_conflict_do_nothing().returning(*columns)
    change = update(table).where(*(column == bindparam(f"of_{column.key}") for column in columns))
    for keys in parts(sorted(groups)):
        new = [dict(zip(names, key, strict=True)) | _columns(groups[key]) for key in keys]
        made = {tuple(row) for row in (await session.execute(fresh, new)).all()}
        known = [key for key in keys if key not in made]
        query = keyed(db, select(table), columns, known).order_by(*columns).with_for_update(of=table)
        changed = []
        for row in (await session.execute(query)).all() if known else ():
            key = tuple(getattr(row, name) for name in names)
            total = stored_sum(row)
            total.merge(groups[key])
            changed.append({f"of_{name}": value for name, value in zip(names, key, strict=True)} | _columns(total))
        if changed:
            await session.execute(change, changed)


def _columns(usage: UsageSum) -> dict[str, Any]:
    """Inverse of :func:`stored_sum`."""
    values: dict[str, Any] = {name: getattr(usage, name) for name in _SUMS}
    values |= {name: pack(getattr(usage, name)) for name in _HISTOGRAMS}
    return values | {"errors": _encode(dict(sorted(usage.errors.items())))}


def _count(counts: Counts, ms: float) -> None:
    bucket = bucket_of(ms)
    counts[bucket] = counts.get(bucket, 0) + 1


def floor(moment: datetime, seconds: int) -> datetime:
    """The beginning of the span of so many seconds since the epoch that a moment is in."""
    return instant(int(moment.timestamp()) // seconds * seconds)


def instant(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def pieces(table: Any, period: Period, start: datetime, end: datetime) -> list[ColumnElement[bool]]:
    """Which of an adapters' table's rows make up the hours or days that begin in a span, each row in one condition.

    Where a block is whole, it stands for its hours or days.
    """
    return [
        and_(table.period == name, table.starts_at >= first, table.starts_at < last)
        for name, first, last in split(period, start, end)
    ]


def in_pieces(query: Select[Any], table: Any, period: Period, start: datetime, end: datetime) -> CompoundSelect[Any]:
    """The rows of a query in :func:`pieces`, each along an index of its own."""
    return union_all(*(query.where(piece) for piece in pieces(table, period, start, end)))


def split(period: Period, start: datetime, end: datetime) -> list[tuple[str, datetime, datetime]]:
    """Names of periods, and spans in which they begin, that make up the hours or days that begin in a span."""
    if period not in BLOCKS:
        return [(period, start, end)]
    (block, seconds), unit = BLOCKS[period], SECONDS[period]
    over_s = math.ceil(end.timestamp() / unit) * unit  # of the hour or day that begins last
    first = instant(math.ceil(start.timestamp() / seconds) * seconds)
    last = instant(over_s // seconds * seconds)
    if first >= last:
        return [(period, start, end)]
    spans = [(period, start, first), (block, first, last), (period, last, end)]
    return [one for one in spans if one[1] < one[2]]


def parts(items: Sequence[Any], size: int = KEYS_A_STATEMENT) -> list[Sequence[Any]]:
    """So that a statement has a bounded number of parameters."""
    return [items[start : start + size] for start in range(0, len(items), size)]


_EMPTY = pack({})
