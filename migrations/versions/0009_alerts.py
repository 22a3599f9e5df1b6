"""Alerts: changed rules, incidents, webhooks, notifications on their way."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_Instant = sa.DateTime(timezone=True)
_Counter = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _rules()
    _incidents()
    op.create_table(
        "alert_webhooks",
        sa.Column("tenant_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("url", sa.String(2000), nullable=False),
        sa.Column("secret", sa.String(200), nullable=False),
        sa.Column("updated_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_alert_webhooks"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_alert_webhooks_tenant_id"),
    )
    _deliveries()


def downgrade() -> None:
    for table in ("alert_deliveries", "alert_webhooks", "alert_incidents", "alert_rules"):
        op.drop_table(table)


def _rules() -> None:
    op.create_table(
        "alert_rules",
        sa.Column("id", _Counter, nullable=False),
        sa.Column("tenant_id", sa.Integer),
        sa.Column("adapter", sa.String(63), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("enabled", sa.Boolean),
        sa.Column("threshold", sa.Double),
        sa.Column("for_s", sa.Integer),
        sa.Column("clear_s", sa.Integer),
        sa.Column("min_requests", sa.Integer),
        sa.Column("severity", sa.String(8)),
        sa.Column("updated_at", _Instant, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_alert_rules"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_alert_rules_tenant_id"),
        sa.CheckConstraint("tenant_id IS NOT NULL OR adapter = ''", name=op.f("ck_alert_rules_adapter_of_tenant")),
    )
    op.create_index("uq_alert_rules_of_tenant", "alert_rules", ["tenant_id", "adapter", "kind"], unique=True)
    _partial("uq_alert_rules_of_all", "alert_rules", ["kind"], "tenant_id IS NULL", unique=True)


def _incidents() -> None:
    op.create_table(
        "alert_incidents",
        sa.Column("id", _Counter, nullable=False),
        sa.Column("fingerprint", sa.String(16), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.Integer),
        sa.Column("adapter", sa.String(63), nullable=False),
        sa.Column("item", sa.String(63), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("severity", sa.String(8), nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("threshold", sa.Double, nullable=False),
        sa.Column("note", sa.String(300), nullable=False),
        sa.Column("since", _Instant, nullable=False),
        sa.Column("fired_at", _Instant),
        sa.Column("good_since", _Instant),
        sa.Column("resolved_at", _Instant),
        sa.Column("acknowledged_at", _Instant),
        sa.Column("acknowledged_by", sa.String(100), nullable=False, server_default=sa.text("''")),
        sa.PrimaryKeyConstraint("id", name="pk_alert_incidents"),
        sa.CheckConstraint("state IN ('pending', 'firing', 'resolved')", name=op.f("ck_alert_incidents_state_known")),
        sqlite_autoincrement=True,
    )
    _partial("uq_alert_incidents_open", "alert_incidents", ["fingerprint"], "state <> 'resolved'", unique=True)
    op.create_index("ix_alert_incidents_tenant_id_id", "alert_incidents", ["tenant_id", "id"])
    op.create_index("ix_alert_incidents_state_id", "alert_incidents", ["state", "id"])


def _deliveries() -> None:
    op.create_table(
        "alert_deliveries",
        sa.Column("id", _Counter, nullable=False),
        sa.Column("receiver", sa.Integer, nullable=False),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("state", sa.String(9), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("created_at", _Instant, nullable=False),
        sa.Column("due_at", _Instant, nullable=False),
        sa.Column("done_at", _Instant),
        sa.Column("error", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_alert_deliveries"),
        sa.CheckConstraint("state IN ('waiting', 'delivered', 'failed')", name=op.f("ck_alert_deliveries_state_known")),
        sqlite_autoincrement=True,
    )
    _partial("ix_alert_deliveries_waiting", "alert_deliveries", ["receiver", "id"], "state = 'waiting'")
    op.create_index("ix_alert_deliveries_receiver_id", "alert_deliveries", ["receiver", "id"])


def _partial(name: str, table: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    text = sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=text, postgresql_where=text)
