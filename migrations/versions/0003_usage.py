"""Usage rows and their roll-ups; leases of periodic jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_Instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "usage_requests",
        sa.Column("key", sa.LargeBinary(16), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("key_id", sa.String(12), nullable=False),
        sa.Column("adapter", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("admitted_at", _Instant, nullable=False),
        sa.Column("finished_at", _Instant, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("error_code", sa.String(24), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("undelivered_tokens", sa.BigInteger, nullable=False),
        sa.Column("ttft_ms", sa.Double),
        sa.Column("inter_token_ms", sa.Double),
        sa.Column("queue_ms", sa.Double, nullable=False),
        sa.Column("cold_start_ms", sa.Double, nullable=False),
        sa.Column("duration_ms", sa.Double, nullable=False),
        sa.Column("gaps", sa.LargeBinary),
        sa.Column("rolled_up", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_usage_requests"),
        sa.CheckConstraint("length(key) BETWEEN 16 AND 16", name=op.f("ck_usage_requests_key_length")),
    )
    op.create_index("ix_usage_requests_tenant_id_admitted_at", "usage_requests", ["tenant_id", "admitted_at"])
    op.create_index(
        "ix_usage_requests_to_roll_up",
        "usage_requests",
        ["key"],
        sqlite_where=sa.text("rolled_up = 0"),
        postgresql_where=sa.text("NOT rolled_up"),
    )
    op.create_table(
        "usage_rollups",
        sa.Column("tenant_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("period", sa.String(6), nullable=False),
        sa.Column("starts_at", _Instant, nullable=False),
        sa.Column("adapter", sa.String(63), nullable=False),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("failures", sa.BigInteger, nullable=False),
        sa.Column("cold_starts", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("undelivered_tokens", sa.BigInteger, nullable=False),
        sa.Column("ttft", sa.LargeBinary, nullable=False),
        sa.Column("inter_token", sa.LargeBinary, nullable=False),
        sa.Column("queue", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "period", "starts_at", "adapter", name="pk_usage_rollups"),
        sa.CheckConstraint("period IN ('minute', 'hour', 'day')", name=op.f("ck_usage_rollups_period_known")),
    )
    op.create_index("ix_usage_rollups_period_starts_at", "usage_rollups", ["period", "starts_at"])
    op.create_table(
        "job_leases",
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("holder", sa.String(63), nullable=False),
        sa.Column("expires_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_job_leases"),
    )


def downgrade() -> None:
    op.drop_table("job_leases")
    op.drop_index("ix_usage_rollups_period_starts_at", "usage_rollups")
    op.drop_table("usage_rollups")
    op.drop_index("ix_usage_requests_to_roll_up", "usage_requests")
    op.drop_index("ix_usage_requests_tenant_id_admitted_at", "usage_requests")
    op.drop_table("usage_requests")
