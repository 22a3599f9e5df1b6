"""Plans of tenants, roles and scopes of keys, the audit log, stamps of change.

Columns are added and dropped one by one, on SQLite too: copying a table there would delete what refers to it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_QUOTA = (
    "quota_shadow",
    "time_zone",
    "tokens_per_month",
    "tokens_per_day",
    "concurrent_streams",
    "tokens_per_minute",
    "requests_per_minute",
)
_Instant = sa.DateTime(timezone=True)


def upgrade() -> None:
    _tenants()
    _keys()
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("at", _Instant, nullable=False),
        sa.Column("actor", sa.String(100), nullable=False),
        sa.Column("role", sa.String(10), nullable=False),
        sa.Column("tenant_id", sa.Integer),
        sa.Column("action", sa.String(50), nullable=False),
        sa.Column("target", sa.String(200), nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
        sa.Column("source", sa.String(100), nullable=False),
        sa.Column("request_id", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_audit_log_tenant_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_log_tenant_id_id", "audit_log", ["tenant_id", "id"])
    op.create_index("ix_audit_log_target_id", "audit_log", ["target", "id"])
    stamps = op.create_table(
        "catalog_stamps",
        sa.Column("tenant_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("stamp", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_catalog_stamps"),
    )
    op.create_index("ix_catalog_stamps_stamp", "catalog_stamps", ["stamp"])
    op.execute(stamps.insert().values(tenant_id=0, stamp=0))


def _tenants() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("tenants", "name", type_=sa.String(63, collation="C"))
    for column in (
        sa.Column("max_versions", sa.Integer, _check("max_versions", 1), server_default="1000", nullable=False),
        sa.Column(
            "stored_bytes",
            sa.BigInteger,
            _check("stored_bytes", 0, "natural"),
            server_default="1099511627776",
            nullable=False,
        ),
        sa.Column("max_tokens", sa.Integer, _check("max_tokens", 1)),
        sa.Column("default_max_tokens", sa.Integer, _check("default_max_tokens", 1)),
        sa.Column("deleted_at", _Instant),
        sa.Column("requests_per_minute", sa.Integer, _check("requests_per_minute", 1)),
        sa.Column("tokens_per_minute", sa.BigInteger, _check("tokens_per_minute", 1)),
        sa.Column("concurrent_streams", sa.Integer, _check("concurrent_streams", 1)),
        sa.Column("tokens_per_day", sa.BigInteger, _check("tokens_per_day", 1)),
        sa.Column("tokens_per_month", sa.BigInteger, _check("tokens_per_month", 1)),
        sa.Column("time_zone", sa.String(64), server_default="UTC", nullable=False),
        sa.Column("quota_shadow", sa.Boolean, server_default=sa.false(), nullable=False),
    ):
        op.add_column("tenants", column)


def _keys() -> None:
    known = sa.CheckConstraint("role IN ('operator', 'admin', 'viewer', 'caller')", name=op.f("ck_api_keys_role_known"))
    for column in (
        sa.Column("role", sa.String(10), known, server_default="caller", nullable=False),
        sa.Column("models", sa.JSON),
        sa.Column("routes", sa.JSON),
        sa.Column("previous_hash", sa.LargeBinary(32)),
        sa.Column("previous_expires_at", _Instant),
    ):
        op.add_column("api_keys", column)
    op.drop_index("ix_api_keys_tenant_id", "api_keys")
    op.create_index("ix_api_keys_tenant_id_created_at_public_id", "api_keys", ["tenant_id", "created_at", "public_id"])


def downgrade() -> None:
    op.drop_index("ix_catalog_stamps_stamp", "catalog_stamps")
    op.drop_table("catalog_stamps")
    op.drop_index("ix_audit_log_target_id", "audit_log")
    op.drop_index("ix_audit_log_tenant_id_id", "audit_log")
    op.drop_table("audit_log")
    op.drop_index("ix_api_keys_tenant_id_created_at_public_id", "api_keys")
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    for column in ("previous_expires_at", "previous_hash", "routes", "models", "role"):
        op.drop_column("api_keys", column)
    for column in (*_QUOTA, "deleted_at", "default_max_tokens", "max_tokens", "stored_bytes", "max_versions"):
        op.drop_column("tenants", column)
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("tenants", "name", type_=sa.String(63, collation="default"))


def _check(column: str, least: int, kind: str = "positive") -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} >= {least}", name=op.f(f"ck_tenants_{column}_{kind}"))
