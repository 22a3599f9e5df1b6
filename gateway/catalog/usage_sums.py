"""Sums of usage, how a roll-up's row holds one, and adding sums to rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast

import msgspec
from sqlalchemy import Row, Table, bindparam, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import UsageRollupRow, UsageTenantRollupRow, UsageVersionRollupRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.usage.histogram import Counts, add, bucket_of, pack, unpack

Period = Literal["minute", "hour", "day"]
SECONDS: dict[Period, int] = {"minute": 60, "hour": 3600, "day": 86_400}
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
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HISTOGRAMS:
            add(getattr(self, name), getattr(other, name))
        for code, count in other.errors.items():
            self.errors[code] = self.errors.get(code, 0) + count

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
        query = select(table).where(tuple_(*columns).in_(known)).order_by(*columns).with_for_update()
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


def parts(items: Sequence[Any], size: int = KEYS_A_STATEMENT) -> list[Sequence[Any]]:
    """So that a statement has a bounded number of parameters."""
    return [items[start : start + size] for start in range(0, len(items), size)]


_EMPTY = pack({})
