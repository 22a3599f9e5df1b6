"""Guards of canaries, and moves of aliases by kind and time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("canaries", sa.Column("guard", sa.JSON))
    op.add_column("alias_moves", sa.Column("canary_guard", sa.JSON))
    op.create_index("ix_alias_moves_kind_at", "alias_moves", ["kind", "at"])


def downgrade() -> None:
    op.drop_index("ix_alias_moves_kind_at", "alias_moves")
    op.drop_column("alias_moves", "canary_guard")
    op.drop_column("canaries", "guard")
