"""Indexes for the audit log filtered by who and what."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

_FILTERS = (["action"], ["actor", "action"], ["tenant_id", "action"], ["tenant_id", "actor", "action"])


def upgrade() -> None:
    for columns in _FILTERS:
        op.create_index(_name(columns), "audit_log", [*columns, "id"])


def downgrade() -> None:
    for columns in _FILTERS:
        op.drop_index(_name(columns), "audit_log")


def _name(columns: list[str]) -> str:
    return f"ix_audit_log_{'_'.join(columns)}_id"
