"""Roll-ups and ranks of adapters in blocks of six hours and of seven days, out of those of their hours and days."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"

_BLOCKS = {"6hours": ("hour", 6 * 3600), "7days": ("day", 7 * 86_400)}
_KNOWN = {
    "usage_rollups": ("'minute', 'hour', 'day'", "'minute', 'hour', '6hours', 'day', '7days'"),
    "usage_ranks": ("'hour', 'day'", "'hour', '6hours', 'day', '7days'"),
}
_COUNTS = (
    "requests", "failures", "cold_starts", "prompt_tokens", "cached_tokens", "completion_tokens", "undelivered_tokens",
    "duration_ms",
)  # fmt: skip
_HISTOGRAMS = ("ttft", "inter_token", "queue", "cold_start")
_Histogram = msgspec.msgpack.Decoder(dict[int, int])
_Errors = msgspec.msgpack.Decoder(dict[str, int])
_BATCH = 1000
"""Rows of one statement."""


def upgrade() -> None:
    for table, (_, known) in _KNOWN.items():
        _check_period(table, known)
    connection = op.get_bind()
    rollups = sa.Table("usage_rollups", sa.MetaData(), autoload_with=connection)
    for block, (period, seconds) in _BLOCKS.items():
        for start in _starts(connection, rollups, period, seconds):
            _sum_up(connection, rollups, block, start, period, seconds)
    op.execute(
        "INSERT INTO usage_ranks (period, starts_at, tenant_id, adapter, requests, failures, cold_starts, tokens) "
        "SELECT period, starts_at, tenant_id, adapter, requests, failures, cold_starts, prompt_tokens + "
        "completion_tokens FROM usage_rollups WHERE period IN ('6hours', '7days')"
    )


def downgrade() -> None:
    for table, (known, _) in _KNOWN.items():
        rows = sa.table(table, sa.column("period", sa.String))
        op.execute(sa.delete(rows).where(rows.c.period.in_(tuple(_BLOCKS))))
        _check_period(table, known)


def _check_period(table: str, known: str) -> None:
    """SQLite makes a new table for that, and the old check is not in it."""
    name = op.f(f"ck_{table}_period_known")
    with op.batch_alter_table(table) as batch:
        if op.get_context().dialect.name != "sqlite":
            batch.drop_constraint(name, type_="check")
        batch.create_check_constraint(name, f"period IN ({known})")


def _starts(connection: sa.Connection, rollups: sa.Table, period: str, seconds: int) -> list[datetime]:
    """Of the blocks that something is in."""
    query = sa.select(rollups.c.starts_at).where(rollups.c.period == period).distinct()
    moments = [one if one.tzinfo is not None else one.replace(tzinfo=UTC) for one in connection.scalars(query)]
    return [
        datetime.fromtimestamp(one, UTC)
        for one in sorted({int(one.timestamp()) // seconds * seconds for one in moments})
    ]


def _sum_up(
    connection: sa.Connection, rollups: sa.Table, block: str, start: datetime, period: str, seconds: int
) -> None:
    end = datetime.fromtimestamp(start.timestamp() + seconds, UTC)
    columns = rollups.c
    query = sa.select(rollups).where(columns.period == period, columns.starts_at >= start, columns.starts_at < end)
    rows = connection.execute(query.order_by(columns.tenant_id, columns.adapter)).mappings()
    added: list[dict[str, Any]] = []
    for tenant_id, adapter, total in _totals(rows):
        added.append({"tenant_id": tenant_id, "adapter": adapter, "period": block, "starts_at": start, **total})
        if len(added) == _BATCH:
            connection.execute(sa.insert(rollups), added)
            added = []
    if added:
        connection.execute(sa.insert(rollups), added)


def _totals(rows: Any) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """What the rows of each tenant and adapter, which come one behind the other, add up to."""
    key: tuple[int, str] | None = None
    counts: Counter[str] = Counter()
    histograms: dict[str, Counter[Any]] = {}
    for row in rows:
        if key != (row["tenant_id"], row["adapter"]):
            if key is not None:
                yield *key, _packed(counts, histograms)
            key = (row["tenant_id"], row["adapter"])
            counts, histograms = Counter(), {name: Counter() for name in (*_HISTOGRAMS, "errors")}
        for name in _COUNTS:
            counts[name] += row[name]
        for name in _HISTOGRAMS:
            histograms[name].update(_Histogram.decode(row[name]) if row[name] is not None else {})
        histograms["errors"].update(_Errors.decode(row["errors"]) if row["errors"] is not None else {})
    if key is not None:
        yield *key, _packed(counts, histograms)


def _packed(counts: Counter[str], histograms: dict[str, Counter[Any]]) -> dict[str, Any]:
    packed = {name: msgspec.msgpack.encode(dict(sorted(one.items()))) for name, one in histograms.items()}
    return {**{name: counts[name] for name in _COUNTS}, **packed}
