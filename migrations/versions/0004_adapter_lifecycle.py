"""Adapters: canaries, history of aliases, shares, smoke prompts, defaults of versions, soft deletion."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_Instant = sa.DateTime(timezone=True)
_Counter = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("adapters", sa.Column("deleted_at", _Instant))
    op.add_column("versions", sa.Column("defaults", sa.JSON))
    op.add_column("versions", sa.Column("deleted_at", _Instant))
    op.add_column("aliases", sa.Column("move_id", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "canaries",
        sa.Column("adapter_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("percent", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "alias", name="pk_canaries"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_canaries_adapter_id"),
        sa.ForeignKeyConstraint(
            ["adapter_id", "alias"], ["aliases.adapter_id", "aliases.name"], name="fk_canaries_adapter_id_alias"
        ),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"], ["versions.adapter_id", "versions.number"], name="fk_canaries_adapter_id_version"
        ),
        sa.CheckConstraint("percent BETWEEN 1 AND 100", name=op.f("ck_canaries_percent_range")),
    )
    op.create_table(
        "alias_moves",
        sa.Column("id", _Counter, nullable=False),
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("alias", sa.String(63), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("canary_version", sa.Integer),
        sa.Column("canary_percent", sa.Integer),
        sa.Column("parent_id", sa.BigInteger),
        sa.Column("actor", sa.String(100), nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_alias_moves"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_alias_moves_adapter_id"),
    )
    op.create_index("ix_alias_moves_adapter_id_alias", "alias_moves", ["adapter_id", "alias"])
    op.execute(
        "INSERT INTO alias_moves (adapter_id, alias, kind, version, actor, reason, at) "
        "SELECT adapter_id, name, 'move', version, '', '', updated_at FROM aliases"
    )
    op.execute(
        "UPDATE aliases SET move_id = (SELECT id FROM alias_moves "
        "WHERE alias_moves.adapter_id = aliases.adapter_id AND alias_moves.alias = aliases.name)"
    )
    op.create_table(
        "adapter_shares",
        sa.Column("adapter_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("created_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "tenant_id", name="pk_adapter_shares"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_adapter_shares_adapter_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_adapter_shares_tenant_id"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapter_shares_tenant_id_name"),
    )
    op.create_table(
        "smoke_suites",
        sa.Column("adapter_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("prompts", sa.JSON, nullable=False),
        sa.Column("updated_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", name="pk_smoke_suites"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_smoke_suites_adapter_id"),
    )
    op.create_table(
        "smoke_runs",
        sa.Column("id", _Counter, nullable=False),
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("suite_revision", sa.Integer, nullable=False),
        sa.Column("passed", sa.Boolean, nullable=False),
        sa.Column("results", sa.JSON, nullable=False),
        sa.Column("at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_smoke_runs"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_smoke_runs_adapter_id"),
    )
    op.create_index("ix_smoke_runs_adapter_id_version", "smoke_runs", ["adapter_id", "version"])


def downgrade() -> None:
    for table in ("smoke_runs", "smoke_suites", "adapter_shares", "alias_moves", "canaries"):
        op.drop_table(table)
    op.drop_column("aliases", "move_id")
    op.drop_column("versions", "deleted_at")
    op.drop_column("versions", "defaults")
    op.drop_column("adapters", "deleted_at")
