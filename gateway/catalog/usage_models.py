"""The tables of usage: admitted requests, their roll-ups, and what stands beside them: refusals, samples of engines."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Double, Index, LargeBinary, String, text
from sqlalchemy.orm import Mapped, mapped_column

from stencilpress.gateway.catalog.models import Table


class UsageRequestRow(Table):
    """One admitted request. Written once, never updated but for ``rolled_up``. No foreign keys: it outlives them."""

    __tablename__ = "usage_requests"
    __table_args__: Any = (
        Index("ix_usage_requests_tenant_id_admitted_at", "tenant_id", "admitted_at"),
        Index(
            "ix_usage_requests_to_roll_up",
            "key",
            sqlite_where=text("rolled_up = 0"),
            postgresql_where=text("NOT rolled_up"),
        ),
        CheckConstraint("length(key) BETWEEN 16 AND 16", "key_length"),
    )

    key: Mapped[bytes] = mapped_column(LargeBinary(16), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(64))
    tenant_id: Mapped[int]
    key_id: Mapped[str] = mapped_column(String(12))
    adapter: Mapped[str] = mapped_column(String(63))
    version: Mapped[int]
    admitted_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    status: Mapped[str] = mapped_column(String(16))
    error_code: Mapped[str] = mapped_column(String(24))
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    undelivered_tokens: Mapped[int] = mapped_column(BigInteger)
    ttft_ms: Mapped[float | None] = mapped_column(Double)
    inter_token_ms: Mapped[float | None] = mapped_column(Double)
    queue_ms: Mapped[float] = mapped_column(Double)
    cold_start_ms: Mapped[float] = mapped_column(Double)
    duration_ms: Mapped[float] = mapped_column(Double)
    gaps: Mapped[bytes | None] = mapped_column(LargeBinary)
    rolled_up: Mapped[bool] = mapped_column(default=False)


class _UsageSums:
    """What all roll-ups of usage sum up: histograms and errors as gateway/catalog/usage_sums.py packs them."""

    requests: Mapped[int] = mapped_column(BigInteger)
    failures: Mapped[int] = mapped_column(BigInteger)
    cold_starts: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    completion_tokens: Mapped[int] = mapped_column(BigInteger)
    undelivered_tokens: Mapped[int] = mapped_column(BigInteger)
    duration_ms: Mapped[float] = mapped_column(Double, server_default=text("0"))
    ttft: Mapped[bytes] = mapped_column(LargeBinary)
    inter_token: Mapped[bytes] = mapped_column(LargeBinary)
    queue: Mapped[bytes] = mapped_column(LargeBinary)
    cold_start: Mapped[bytes | None] = mapped_column(LargeBinary)
    errors: Mapped[bytes | None] = mapped_column(LargeBinary)


class UsageRollupRow(_UsageSums, Table):
    """Sums over the requests of one tenant and adapter that were admitted in one minute, hour or day (UTC), or in a
    block of six hours or seven days, since 1970: a month is a dozen rows instead of thirty."""

    __tablename__ = "usage_rollups"
    __table_args__: Any = (
        Index("ix_usage_rollups_period_starts_at", "period", "starts_at"),
        Index(None, "tenant_id", "period", "adapter", "starts_at"),
        CheckConstraint("period IN ('minute', 'hour', '6hours', 'day', '7days')", "period_known"),
    )

    tenant_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    period: Mapped[str] = mapped_column(String(6), primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)
    adapter: Mapped[str] = mapped_column(String(63), primary_key=True)


class UsageVersionRollupRow(_UsageSums, Table):
    """The same of one version of an adapter, for minutes and hours: versions are compared, not billed."""

    __tablename__ = "usage_version_rollups"
    __table_args__: Any = (
        Index("ix_usage_version_rollups_period_starts_at", "period", "starts_at"),
        CheckConstraint("period IN ('minute', 'hour')", "period_known"),
    )

    tenant_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    period: Mapped[str] = mapped_column(String(6), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)


class UsageTenantRollupRow(_UsageSums, Table):
    """The same of all of a tenant's requests, and, as tenant 0, of everybody's."""

    __tablename__ = "usage_tenant_rollups"
    __table_args__: Any = (
        Index("ix_usage_tenant_rollups_period_starts_at", "period", "starts_at"),
        CheckConstraint("period IN ('minute', 'hour', 'day')", "period_known"),
    )

    tenant_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    period: Mapped[str] = mapped_column(String(6), primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)


class UsageRankRow(Table):
    """Some numbers of the roll-ups of hours, days and blocks once more, in narrow rows in the order of time: who is on
    top of a month is found among a hundred thousand of them."""

    __tablename__ = "usage_ranks"
    __table_args__: Any = (
        Index("ix_usage_ranks_tenant_id_period_starts_at", "tenant_id", "period", "starts_at"),
        CheckConstraint("period IN ('hour', '6hours', 'day', '7days')", "period_known"),
    )

    period: Mapped[str] = mapped_column(String(6), primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)
    tenant_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    adapter: Mapped[str] = mapped_column(String(63), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    failures: Mapped[int] = mapped_column(BigInteger)
    cold_starts: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)


class QuotaRefusalRow(Table):
    """Requests that a tenant's quota refused in a minute or an hour; as tenant 0 everybody's."""

    __tablename__ = "quota_refusals"
    __table_args__: Any = (
        Index("ix_quota_refusals_period_starts_at", "period", "starts_at"),
        CheckConstraint("period IN ('minute', 'hour')", "period_known"),
    )

    tenant_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    period: Mapped[str] = mapped_column(String(6), primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)
    dimension: Mapped[str] = mapped_column(String(24), primary_key=True)
    refused: Mapped[int] = mapped_column(BigInteger)
    watched: Mapped[int] = mapped_column(BigInteger)
    """Over a limit that was only watched."""


class EngineSampleRow(Table):
    """What one engine did in a minute or an hour; see gateway/usage/engine_sums.py. Always read as a whole."""

    __tablename__ = "engine_samples"
    __table_args__: Any = (
        Index("ix_engine_samples_period_starts_at", "period", "starts_at"),
        CheckConstraint("period IN ('minute', 'hour')", "period_known"),
    )

    server: Mapped[str] = mapped_column(String(63), primary_key=True)
    engine: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    period: Mapped[str] = mapped_column(String(6), primary_key=True)
    starts_at: Mapped[datetime] = mapped_column(primary_key=True)
    sums: Mapped[bytes] = mapped_column(LargeBinary)
