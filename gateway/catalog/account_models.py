"""The tables of people: users of the console, their sessions, links that work once, attempts to sign in."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from stencilpress.gateway.catalog.models import Table

MAX_EMAIL_CHARS = 254


class UserRow(Table):
    """A person. ``email`` is kept in lower case, so that it is unique whatever its case."""

    __tablename__ = "users"
    __table_args__: Any = (
        CheckConstraint("length(public_id) BETWEEN 12 AND 12", "public_id_length"),
        CheckConstraint("role IN ('operator', 'admin', 'viewer')", "role_known"),
        Index(None, "tenant_id", "email"),
    )

    public_id: Mapped[str] = mapped_column(String(12), primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"))
    email: Mapped[str] = mapped_column(String(MAX_EMAIL_CHARS), unique=True)
    role: Mapped[str] = mapped_column(String(10))
    password_hash: Mapped[str | None] = mapped_column(String(255))
    oidc_subject: Mapped[str | None] = mapped_column(String(255), unique=True)
    created_at: Mapped[datetime]
    disabled_at: Mapped[datetime | None]


class SessionRow(Table):
    """A signed-in browser. It is over when the row is gone, at ``expires_at``, or after some idle time."""

    __tablename__ = "console_sessions"
    __table_args__: Any = (CheckConstraint("length(public_id) BETWEEN 12 AND 12", "public_id_length"),)

    public_id: Mapped[str] = mapped_column(String(12), primary_key=True)
    token_hash: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("users.public_id"), index=True)
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    address: Mapped[str] = mapped_column(String(100))
    user_agent: Mapped[str] = mapped_column(String(200))


class OneTimeLinkRow(Table):
    """A link that sets a password, once. ``user_id`` is None for the one that makes the first user."""

    __tablename__ = "one_time_links"
    __table_args__: Any = (CheckConstraint("kind IN ('setup', 'invitation', 'reset')", "kind_known"),)

    token_hash: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(10))
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.public_id"), index=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class AttemptRow(Table):
    """How often somebody has tried to sign in, by a hash of the account or of the address, in one window."""

    __tablename__ = "sign_in_attempts"

    subject: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    window_ends_at: Mapped[datetime] = mapped_column(index=True)
    count: Mapped[int]
