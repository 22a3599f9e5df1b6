"""People who use the console: users, their sessions, links that work once, attempts to sign in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("public_id", sa.String(12), nullable=False),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column("email", sa.String(254), nullable=False),
        sa.Column("role", sa.String(10), nullable=False),
        sa.Column("password_hash", sa.String(255)),
        sa.Column("oidc_subject", sa.String(255)),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("disabled_at", _INSTANT),
        sa.PrimaryKeyConstraint("public_id", name="pk_users"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_users_tenant_id"),
        sa.UniqueConstraint("email", name="uq_users_email"),
        sa.UniqueConstraint("oidc_subject", name="uq_users_oidc_subject"),
        sa.CheckConstraint("length(public_id) BETWEEN 12 AND 12", name=op.f("ck_users_public_id_length")),
        sa.CheckConstraint("role IN ('operator', 'admin', 'viewer')", name=op.f("ck_users_role_known")),
    )
    op.create_index("ix_users_tenant_id_email", "users", ["tenant_id", "email"])
    op.create_table(
        "console_sessions",
        sa.Column("public_id", sa.String(12), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("user_id", sa.String(12), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("last_seen_at", _INSTANT, nullable=False),
        sa.Column("expires_at", _INSTANT, nullable=False),
        sa.Column("address", sa.String(100), nullable=False),
        sa.Column("user_agent", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("public_id", name="pk_console_sessions"),
        sa.ForeignKeyConstraint(["user_id"], ["users.public_id"], name="fk_console_sessions_user_id"),
        sa.UniqueConstraint("token_hash", name="uq_console_sessions_token_hash"),
        sa.CheckConstraint("length(public_id) BETWEEN 12 AND 12", name=op.f("ck_console_sessions_public_id_length")),
    )
    op.create_index("ix_console_sessions_user_id", "console_sessions", ["user_id"])
    op.create_table(
        "one_time_links",
        sa.Column("token_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("kind", sa.String(10), nullable=False),
        sa.Column("user_id", sa.String(12)),
        sa.Column("tenant_id", sa.Integer(), nullable=False),
        sa.Column("created_at", _INSTANT, nullable=False),
        sa.Column("expires_at", _INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("token_hash", name="pk_one_time_links"),
        sa.ForeignKeyConstraint(["user_id"], ["users.public_id"], name="fk_one_time_links_user_id"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_one_time_links_tenant_id"),
        sa.CheckConstraint("kind IN ('setup', 'invitation', 'reset')", name=op.f("ck_one_time_links_kind_known")),
    )
    op.create_index("ix_one_time_links_user_id", "one_time_links", ["user_id"])
    op.create_table(
        "sign_in_attempts",
        sa.Column("subject", sa.LargeBinary(32), nullable=False),
        sa.Column("window_ends_at", _INSTANT, nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("subject", name="pk_sign_in_attempts"),
    )
    op.create_index("ix_sign_in_attempts_window_ends_at", "sign_in_attempts", ["window_ends_at"])


def downgrade() -> None:
    for table in ("sign_in_attempts", "one_time_links", "console_sessions", "users"):
        op.drop_table(table)
