"""Tenants, API keys, adapters, versions, aliases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_Instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("max_rank", sa.Integer, nullable=False),
        sa.Column("max_adapters", sa.Integer, nullable=False),
        sa.Column("max_adapter_bytes", sa.BigInteger, nullable=False),
        sa.Column("target_modules", sa.JSON),
        sa.Column("weight", sa.Double, nullable=False),
        sa.Column("prefix_salt", sa.LargeBinary(32), nullable=False),
        sa.Column("created_at", _Instant, nullable=False),
        sa.Column("disabled_at", _Instant),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
        _length("tenants", "name", 1, 63),
        sa.CheckConstraint("max_rank >= 1", name=op.f("ck_tenants_max_rank_positive")),
        sa.CheckConstraint("max_adapters >= 0", name=op.f("ck_tenants_max_adapters_natural")),
        sa.CheckConstraint("max_adapter_bytes >= 1", name=op.f("ck_tenants_max_adapter_bytes_positive")),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight_positive")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "api_keys",
        sa.Column("public_id", sa.String(12), nullable=False),
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("label", sa.String(100), nullable=False),
        sa.Column("last_four", sa.String(4), nullable=False),
        sa.Column("created_at", _Instant, nullable=False),
        sa.Column("expires_at", _Instant),
        sa.Column("revoked_at", _Instant),
        sa.PrimaryKeyConstraint("public_id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id"),
        _length("api_keys", "public_id", 12, 12),
        _length("api_keys", "label", 0, 100),
        _length("api_keys", "last_four", 4, 4),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "adapters",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("tenant_id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("created_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
        _length("adapters", "name", 1, 63),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "versions",
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("base_id", sa.String(200), nullable=False),
        sa.Column("base_asserted", sa.Boolean, nullable=False),
        sa.Column("ranks", sa.JSON, nullable=False),
        sa.Column("target_modules", sa.JSON, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("source_files", sa.JSON, nullable=False),
        sa.Column("created_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "number", name="pk_versions"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_versions_adapter_id"),
        sa.UniqueConstraint("adapter_id", "digest", name="uq_versions_adapter_id_digest"),
        sa.CheckConstraint("number >= 1", name=op.f("ck_versions_number_positive")),
        _length("versions", "digest", 64, 64),
        _length("versions", "base_id", 1, 200),
    )
    op.create_table(
        "aliases",
        sa.Column("adapter_id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("updated_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("adapter_id", "name", name="pk_aliases"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_aliases_adapter_id"),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"], ["versions.adapter_id", "versions.number"], name="fk_aliases_adapter_id_version"
        ),
        _length("aliases", "name", 1, 63),
    )


def downgrade() -> None:
    for table in ("aliases", "versions", "adapters"):
        op.drop_table(table)
    op.drop_index("ix_api_keys_tenant_id", "api_keys")
    op.drop_table("api_keys")
    op.drop_table("tenants")


def _length(table: str, column: str, low: int, high: int) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"length({column}) BETWEEN {low} AND {high}", name=op.f(f"ck_{table}_{column}_length"))
