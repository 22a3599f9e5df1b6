"""Usage of a tenant by adapter: a page of a report reads the roll-ups of its adapters alone."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

_NAME = "ix_usage_rollups_tenant_id_period_adapter_starts_at"


def upgrade() -> None:
    op.create_index(_NAME, "usage_rollups", ["tenant_id", "period", "adapter", "starts_at"])


def downgrade() -> None:
    op.drop_index(_NAME, "usage_rollups")
