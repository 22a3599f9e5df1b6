"""The highest number of an adapter's versions that were purged: none is given twice."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_KNOWN = """
UPDATE adapters SET purged_version = (
    SELECT coalesce(max(seen.version), 0) FROM (
        SELECT adapter_id, version FROM alias_moves
        UNION ALL SELECT adapter_id, canary_version FROM alias_moves
        UNION ALL SELECT adapter_id, version FROM smoke_runs
    ) AS seen WHERE seen.adapter_id = adapters.id
)
"""
"""What was purged before is known where an alias pointed at it, or where it was tried; numbers in use do no harm."""


def upgrade() -> None:
    op.add_column("adapters", sa.Column("purged_version", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.execute(_KNOWN)


def downgrade() -> None:
    op.drop_column("adapters", "purged_version")
