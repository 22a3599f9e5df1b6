"""The tables of alerts: rules that were changed, incidents, webhooks, and what waits to be sent to them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Double, ForeignKey, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from stencilpress.gateway.catalog.models import Table

_Counter = BigInteger().with_variant(Integer, "sqlite")


class AlertRuleRow(Table):
    """What is set of a kind for all (no tenant), for a tenant (no adapter) or for an adapter. Null inherits."""

    __tablename__ = "alert_rules"
    __table_args__: Any = (
        Index("uq_alert_rules_of_tenant", "tenant_id", "adapter", "kind", unique=True),
        Index(
            "uq_alert_rules_of_all",
            "kind",
            unique=True,
            sqlite_where=text("tenant_id IS NULL"),
            postgresql_where=text("tenant_id IS NULL"),
        ),
        CheckConstraint("tenant_id IS NOT NULL OR adapter = ''", "adapter_of_tenant"),
    )

    id: Mapped[int] = mapped_column(_Counter, primary_key=True)
    tenant_id: Mapped[int | None] = mapped_column(ForeignKey("tenants.id"))
    adapter: Mapped[str] = mapped_column(String(63))
    kind: Mapped[str] = mapped_column(String(32))
    enabled: Mapped[bool | None]
    threshold: Mapped[float | None] = mapped_column(Double)
    for_s: Mapped[int | None]
    clear_s: Mapped[int | None]
    min_requests: Mapped[int | None]
    severity: Mapped[str | None] = mapped_column(String(8))
    updated_at: Mapped[datetime]


class IncidentRow(Table):
    """One coming and going of an alert. No foreign keys: it outlives what it is about."""

    __tablename__ = "alert_incidents"
    __table_args__: Any = (
        Index(
            "uq_alert_incidents_open",
            "fingerprint",
            unique=True,
            sqlite_where=text("state <> 'resolved'"),
            postgresql_where=text("state <> 'resolved'"),
        ),
        Index(None, "tenant_id", "id"),
        Index(None, "state", "id"),
        CheckConstraint("state IN ('pending', 'firing', 'resolved')", "state_known"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_Counter, primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(String(32))
    tenant_id: Mapped[int | None]
    adapter: Mapped[str] = mapped_column(String(63))
    item: Mapped[str] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(8))
    severity: Mapped[str] = mapped_column(String(8))
    value: Mapped[float] = mapped_column(Double)
    threshold: Mapped[float] = mapped_column(Double)
    note: Mapped[str] = mapped_column(String(300))
    since: Mapped[datetime]
    fired_at: Mapped[datetime | None]
    good_since: Mapped[datetime | None]
    resolved_at: Mapped[datetime | None]
    acknowledged_at: Mapped[datetime | None]
    acknowledged_by: Mapped[str] = mapped_column(String(100), server_default=text("''"))


class WebhookRow(Table):
    """Where a tenant's alerts are sent. The secret signs them, so it is kept as it is; it is never shown."""

    __tablename__ = "alert_webhooks"

    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"), primary_key=True, autoincrement=False)
    url: Mapped[str] = mapped_column(String(2000))
    secret: Mapped[str] = mapped_column(String(200))
    updated_at: Mapped[datetime]


class DeliveryRow(Table):
    """A notification on its way. ``receiver`` is a tenant's id, 0 for the operator's webhook."""

    __tablename__ = "alert_deliveries"
    __table_args__: Any = (
        Index(
            "ix_alert_deliveries_waiting",
            "receiver",
            "id",
            sqlite_where=text("state = 'waiting'"),
            postgresql_where=text("state = 'waiting'"),
        ),
        Index(None, "receiver", "id"),
        CheckConstraint("state IN ('waiting', 'delivered', 'failed')", "state_known"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_Counter, primary_key=True)
    receiver: Mapped[int]
    body: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(9))
    attempts: Mapped[int]
    created_at: Mapped[datetime]
    due_at: Mapped[datetime]
    done_at: Mapped[datetime | None]
    error: Mapped[str] = mapped_column(String(200))
