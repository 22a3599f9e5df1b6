"""Adapters that operators have pinned or preloaded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_KEPT = sa.text("kept IS NOT NULL")


def upgrade() -> None:
    op.add_column("adapters", sa.Column("kept", sa.String(8)))
    op.create_index("ix_adapters_kept", "adapters", ["kept"], sqlite_where=_KEPT, postgresql_where=_KEPT)


def downgrade() -> None:
    op.drop_index("ix_adapters_kept", "adapters")
    op.drop_column("adapters", "kept")
