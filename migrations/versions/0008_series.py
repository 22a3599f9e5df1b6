"""Series: usage by version and by tenant, ranks, refusals by quota, samples of engines; versions by digest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_Instant = sa.DateTime(timezone=True)
_COUNTS = (
    "requests", "failures", "cold_starts", "prompt_tokens", "cached_tokens", "completion_tokens", "undelivered_tokens"
)  # fmt: skip
_HISTOGRAMS = ("ttft", "inter_token", "queue")
_Histogram = msgspec.msgpack.Decoder(dict[int, int])


def upgrade() -> None:
    op.add_column("usage_rollups", sa.Column("duration_ms", sa.Double, nullable=False, server_default=sa.text("0")))
    op.add_column("usage_rollups", sa.Column("cold_start", sa.LargeBinary))
    op.add_column("usage_rollups", sa.Column("errors", sa.LargeBinary))
    _create_rollups(
        "usage_version_rollups",
        [sa.Column("adapter", sa.String(63), nullable=False), sa.Column("version", sa.Integer, nullable=False)],
        ["tenant_id", "period", "adapter", "version", "starts_at"],
        "'minute', 'hour'",
    )
    tenants = _create_rollups(
        "usage_tenant_rollups", [], ["tenant_id", "period", "starts_at"], "'minute', 'hour', 'day'"
    )
    _create_ranks()
    _create_refusals()
    _create_samples()
    op.create_index("ix_versions_digest", "versions", ["digest"])
    _sum_up_tenants(op.get_bind(), tenants)
    op.execute(
        "INSERT INTO usage_ranks (period, starts_at, tenant_id, adapter, requests, failures, cold_starts, tokens) "
        "SELECT period, starts_at, tenant_id, adapter, requests, failures, cold_starts, prompt_tokens + "
        "completion_tokens FROM usage_rollups WHERE period <> 'minute'"
    )


def downgrade() -> None:
    op.drop_index("ix_versions_digest", "versions")
    tables = ("engine_samples", "quota_refusals", "usage_ranks", "usage_tenant_rollups", "usage_version_rollups")
    for name in tables:
        op.drop_index(
            f"ix_{name}_period_starts_at" if name != "usage_ranks" else f"ix_{name}_tenant_id_period_starts_at", name
        )
        op.drop_table(name)
    for column in ("errors", "cold_start", "duration_ms"):
        op.drop_column("usage_rollups", column)


def _create_rollups(name: str, more: list[sa.Column[Any]], key: list[str], periods: str) -> sa.Table:
    table = op.create_table(
        name,
        sa.Column("tenant_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("period", sa.String(6), nullable=False),
        sa.Column("starts_at", _Instant, nullable=False),
        *more,
        *(sa.Column(count, sa.BigInteger, nullable=False) for count in _COUNTS),
        sa.Column("duration_ms", sa.Double, nullable=False, server_default=sa.text("0")),
        *(sa.Column(histogram, sa.LargeBinary, nullable=False) for histogram in _HISTOGRAMS),
        sa.Column("cold_start", sa.LargeBinary),
        sa.Column("errors", sa.LargeBinary),
        sa.PrimaryKeyConstraint(*key, name=f"pk_{name}"),
        sa.CheckConstraint(f"period IN ({periods})", name=op.f(f"ck_{name}_period_known")),
    )
    op.create_index(f"ix_{name}_period_starts_at", name, ["period", "starts_at"])
    return table


def _create_ranks() -> None:
    op.create_table(
        "usage_ranks",
        sa.Column("period", sa.String(6), nullable=False),
        sa.Column("starts_at", _Instant, nullable=False),
        sa.Column("tenant_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("adapter", sa.String(63), nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("requests", "failures", "cold_starts", "tokens")),
        sa.PrimaryKeyConstraint("period", "starts_at", "tenant_id", "adapter", name="pk_usage_ranks"),
        sa.CheckConstraint("period IN ('hour', 'day')", name=op.f("ck_usage_ranks_period_known")),
    )
    op.create_index("ix_usage_ranks_tenant_id_period_starts_at", "usage_ranks", ["tenant_id", "period", "starts_at"])


def _create_refusals() -> None:
    op.create_table(
        "quota_refusals",
        sa.Column("tenant_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("period", sa.String(6), nullable=False),
        sa.Column("starts_at", _Instant, nullable=False),
        sa.Column("dimension", sa.String(24), nullable=False),
        sa.Column("refused", sa.BigInteger, nullable=False),
        sa.Column("watched", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "period", "starts_at", "dimension", name="pk_quota_refusals"),
        sa.CheckConstraint("period IN ('minute', 'hour')", name=op.f("ck_quota_refusals_period_known")),
    )
    op.create_index("ix_quota_refusals_period_starts_at", "quota_refusals", ["period", "starts_at"])


def _create_samples() -> None:
    op.create_table(
        "engine_samples",
        sa.Column("server", sa.String(63), nullable=False),
        sa.Column("engine", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("period", sa.String(6), nullable=False),
        sa.Column("starts_at", _Instant, nullable=False),
        sa.Column("sums", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("server", "engine", "period", "starts_at", name="pk_engine_samples"),
        sa.CheckConstraint("period IN ('minute', 'hour')", name=op.f("ck_engine_samples_period_known")),
    )
    op.create_index("ix_engine_samples_period_starts_at", "engine_samples", ["period", "starts_at"])


def _sum_up_tenants(connection: sa.Connection, tenants: sa.Table) -> None:
    """From the roll-ups by adapter, one minute, hour or day after the other."""
    rollups = sa.Table("usage_rollups", sa.MetaData(), autoload_with=connection)
    times = sa.select(rollups.c.period, rollups.c.starts_at).distinct()
    for period, starts_at in connection.execute(times).all():
        sums: dict[int, dict[str, Any]] = {}
        query = sa.select(rollups).where(rollups.c.period == period, rollups.c.starts_at == starts_at)
        for row in connection.execute(query).mappings():
            for tenant_id in (row["tenant_id"], 0):
                _add(sums.setdefault(tenant_id, _nothing()), row)
        values = [
            {**one, **{name: msgspec.msgpack.encode(dict(sorted(one[name].items()))) for name in _HISTOGRAMS}}
            | {"tenant_id": tenant_id, "period": period, "starts_at": starts_at}
            for tenant_id, one in sums.items()
        ]
        connection.execute(sa.insert(tenants), values)


def _nothing() -> dict[str, Any]:
    return {**dict.fromkeys(_COUNTS, 0), **{name: Counter() for name in _HISTOGRAMS}}


def _add(total: dict[str, Any], row: sa.RowMapping) -> None:
    for name in _COUNTS:
        total[name] += row[name]
    for name in _HISTOGRAMS:
        total[name].update(_Histogram.decode(row[name]))
