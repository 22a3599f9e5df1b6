"""The tables. One schema for SQLite and PostgreSQL; the migrations are checked against it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from stencilpress.gateway.catalog.records import Keeping


class UtcDateTime(TypeDecorator[datetime]):
    """An instant. SQLite keeps no zone, so values are stored in UTC and come back aware."""

    impl = DateTime(timezone=True)
    cache_ok = True

    @property
    def python_type(self) -> type[datetime]:
        return datetime

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


class Table(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        datetime: UtcDateTime,
        list[str]: JSON,
        list[int]: JSON,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
    }


def _length(column: str, low: int, high: int) -> CheckConstraint:
    """SQLite ignores the length of a VARCHAR; this holds on both engines."""
    return CheckConstraint(f"length({column}) BETWEEN {low} AND {high}", f"{column}_length")


_BYTEWISE_NAME = String(63).with_variant(String(63, collation="C"), "postgresql")
"""Sorted like SQLite and Python do, whatever the server's locale: pages continue at a name."""
_OptionalJson = JSON(none_as_null=True)


class TenantRow(Table):
    __tablename__ = "tenants"
    __table_args__: Any = (
        _length("name", 1, 63),
        CheckConstraint("max_rank >= 1", "max_rank_positive"),
        CheckConstraint("max_adapters >= 0", "max_adapters_natural"),
        CheckConstraint("max_adapter_bytes >= 1", "max_adapter_bytes_positive"),
        CheckConstraint("weight > 0", "weight_positive"),
        CheckConstraint("max_versions >= 1", "max_versions_positive"),
        CheckConstraint("stored_bytes >= 0", "stored_bytes_natural"),
        CheckConstraint("max_tokens >= 1", "max_tokens_positive"),
        CheckConstraint("default_max_tokens >= 1", "default_max_tokens_positive"),
        CheckConstraint("requests_per_minute >= 1", "requests_per_minute_positive"),
        CheckConstraint("tokens_per_minute >= 1", "tokens_per_minute_positive"),
        CheckConstraint("concurrent_streams >= 1", "concurrent_streams_positive"),
        CheckConstraint("tokens_per_day >= 1", "tokens_per_day_positive"),
        CheckConstraint("tokens_per_month >= 1", "tokens_per_month_positive"),
        {"sqlite_autoincrement": True},  # an id is an engine's handle of the tenant: never reused
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(_BYTEWISE_NAME, unique=True)
    max_rank: Mapped[int]
    max_adapters: Mapped[int]
    max_adapter_bytes: Mapped[int] = mapped_column(BigInteger)
    target_modules: Mapped[list[str] | None] = mapped_column(_OptionalJson)
    weight: Mapped[float] = mapped_column(Double)
    prefix_salt: Mapped[bytes] = mapped_column(LargeBinary(32))
    created_at: Mapped[datetime]
    disabled_at: Mapped[datetime | None]
    max_versions: Mapped[int] = mapped_column(server_default=text("1000"))
    stored_bytes: Mapped[int] = mapped_column(BigInteger, server_default=text("1099511627776"))
    max_tokens: Mapped[int | None]
    default_max_tokens: Mapped[int | None]
    deleted_at: Mapped[datetime | None]
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    concurrent_streams: Mapped[int | None]
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_month: Mapped[int | None] = mapped_column(BigInteger)
    time_zone: Mapped[str] = mapped_column(String(64), server_default=text("'UTC'"))
    quota_shadow: Mapped[bool] = mapped_column(server_default=false())


class KeyRow(Table):
    __tablename__ = "api_keys"
    __table_args__: Any = (
        _length("public_id", 12, 12),
        _length("label", 0, 100),
        _length("last_four", 4, 4),
        CheckConstraint("role IN ('operator', 'admin', 'viewer', 'caller')", "role_known"),
        Index(None, "tenant_id", "created_at", "public_id"),  # a tenant's keys, newest first
    )

    public_id: Mapped[str] = mapped_column(String(12), primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"))
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary(32))
    label: Mapped[str] = mapped_column(String(100))
    last_four: Mapped[str] = mapped_column(String(4))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    role: Mapped[str] = mapped_column(String(10), server_default=text("'caller'"))
    models: Mapped[list[str] | None] = mapped_column(_OptionalJson)
    routes: Mapped[list[str] | None] = mapped_column(_OptionalJson)
    previous_hash: Mapped[bytes | None] = mapped_column(LargeBinary(32))
    previous_expires_at: Mapped[datetime | None]


class AdapterRow(Table):
    __tablename__ = "adapters"
    __table_args__: Any = (
        UniqueConstraint("tenant_id", "name"),
        _length("name", 1, 63),
        Index(
            "ix_adapters_kept", "kept", sqlite_where=text("kept IS NOT NULL"), postgresql_where=text("kept IS NOT NULL")
        ),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(63))
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]
    kept: Mapped[Keeping | None] = mapped_column(String(8))
    """``pin``, ``preload``, or nothing of the kind."""
    purged_version: Mapped[int] = mapped_column(server_default=text("0"))
    """Highest number of a version that was purged: a number means one content for ever."""

    versions: Mapped[list[VersionRow]] = relationship(order_by="VersionRow.number", lazy="raise_on_sql")
    aliases: Mapped[list[AliasRow]] = relationship(order_by="AliasRow.name", lazy="raise_on_sql")
    canaries: Mapped[list[CanaryRow]] = relationship(
        lazy="raise_on_sql", viewonly=True, primaryjoin="AdapterRow.id == foreign(CanaryRow.adapter_id)"
    )


class VersionRow(Table):
    """Its content never changes; ``defaults`` and ``deleted_at`` do."""

    __tablename__ = "versions"
    __table_args__: Any = (
        UniqueConstraint("adapter_id", "digest"),
        CheckConstraint("number >= 1", "number_positive"),
        Index(None, "digest"),  # an engine knows nothing else of a version
        _length("digest", 64, 64),
        _length("base_id", 1, 200),
    )

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(String(64))
    base_id: Mapped[str] = mapped_column(String(200))
    base_asserted: Mapped[bool]
    ranks: Mapped[list[int]]
    target_modules: Mapped[list[str]]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    source_files: Mapped[list[str]]
    created_at: Mapped[datetime]
    defaults: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    deleted_at: Mapped[datetime | None]


class VersionFilesRow(Table):
    """What of a version's uploaded files is its own: the blob of its digest has them from whoever came first.

    Both null: it came first, before these were kept, and the blob's are its own. No row: they were not kept.
    """

    __tablename__ = "version_files"
    __table_args__: Any = (
        ForeignKeyConstraint(["adapter_id", "version"], ["versions.adapter_id", "versions.number"]),
        CheckConstraint("(config IS NULL) = (weights_header IS NULL)", "both_or_none"),
    )

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"), primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    config: Mapped[bytes | None] = mapped_column(LargeBinary)
    weights_header: Mapped[bytes | None] = mapped_column(LargeBinary)
    """Deflated (zlib)."""


class AliasRow(Table):
    """Points at a version of its own adapter: the composite foreign key allows no other."""

    __tablename__ = "aliases"
    __table_args__: Any = (
        ForeignKeyConstraint(["adapter_id", "version"], ["versions.adapter_id", "versions.number"]),
        _length("name", 1, 63),
    )

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int]
    updated_at: Mapped[datetime]
    move_id: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """The move that brought it here, 0 for one from before moves were kept. It changes with every move: an ETag."""


class CanaryRow(Table):
    """A second version to which an alias sends some of its users."""

    __tablename__ = "canaries"
    __table_args__: Any = (
        ForeignKeyConstraint(["adapter_id", "alias"], ["aliases.adapter_id", "aliases.name"]),
        ForeignKeyConstraint(["adapter_id", "version"], ["versions.adapter_id", "versions.number"]),
        CheckConstraint("percent BETWEEN 1 AND 100", "percent_range"),
    )

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"), primary_key=True, autoincrement=False)
    alias: Mapped[str] = mapped_column(String(63), primary_key=True)
    version: Mapped[int]
    percent: Mapped[int]
    guard: Mapped[dict[str, Any] | None] = mapped_column(_OptionalJson)
    """A :class:`CanaryGuard`."""


class AliasMoveRow(Table):
    """The history of an alias. ``parent_id`` is the move whose state a rollback of this one restores; ``version`` 0
    says that the alias was removed."""

    __tablename__ = "alias_moves"
    __table_args__: Any = (
        Index("ix_alias_moves_adapter_id_alias", "adapter_id", "alias"),
        Index("ix_alias_moves_kind_at", "kind", "at"),
    )

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"))
    alias: Mapped[str] = mapped_column(String(63))
    kind: Mapped[str] = mapped_column(String(16))
    version: Mapped[int]
    canary_version: Mapped[int | None]
    canary_percent: Mapped[int | None]
    canary_guard: Mapped[dict[str, Any] | None] = mapped_column(_OptionalJson)
    parent_id: Mapped[int | None] = mapped_column(BigInteger)
    actor: Mapped[str] = mapped_column(String(100))
    reason: Mapped[str] = mapped_column(String(500))
    at: Mapped[datetime]


class ShareRow(Table):
    """A tenant may use another's adapter under its name. Names stay unique among all that a tenant may use."""

    __tablename__ = "adapter_shares"
    __table_args__: Any = (UniqueConstraint("tenant_id", "name"),)

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"), primary_key=True, autoincrement=False)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"), primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(63))
    created_at: Mapped[datetime]


class SmokeSuiteRow(Table):
    """The prompts that a version must answer before ``prod`` points at it."""

    __tablename__ = "smoke_suites"

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"), primary_key=True, autoincrement=False)
    revision: Mapped[int]
    prompts: Mapped[list[dict[str, Any]]]
    updated_at: Mapped[datetime]


class SmokeRunRow(Table):
    """One run of a suite against a version."""

    __tablename__ = "smoke_runs"
    __table_args__: Any = (Index("ix_smoke_runs_adapter_id_version", "adapter_id", "version"),)

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapters.id"))
    version: Mapped[int]
    suite_revision: Mapped[int]
    passed: Mapped[bool]
    results: Mapped[list[dict[str, Any]]]
    at: Mapped[datetime]


class AuditRow(Table):
    """Who changed what. Only ever added to; names of an erased tenant become pseudonyms."""

    __tablename__ = "audit_log"
    __table_args__: Any = (
        Index(None, "tenant_id", "id"),
        Index(None, "target", "id"),
        Index(None, "action", "id"),
        Index(None, "actor", "action", "id"),
        Index(None, "tenant_id", "action", "id"),
        Index(None, "tenant_id", "actor", "action", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    at: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(10))
    tenant_id: Mapped[int | None] = mapped_column(ForeignKey("tenants.id"))
    action: Mapped[str] = mapped_column(String(50))
    target: Mapped[str] = mapped_column(String(200))
    before: Mapped[dict[str, Any] | None] = mapped_column(_OptionalJson)
    after: Mapped[dict[str, Any] | None] = mapped_column(_OptionalJson)
    source: Mapped[str] = mapped_column(String(100))
    request_id: Mapped[str] = mapped_column(String(40))


class StampRow(Table):
    """When a tenant's part of the catalog changed last, by a counter that row 0 keeps; row -1 is of deletions,
    whoever's. See ``stamps.py``."""

    __tablename__ = "catalog_stamps"

    tenant_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    stamp: Mapped[int] = mapped_column(BigInteger, index=True)


class JobLeaseRow(Table):
    """Who runs a periodic job, and until when."""

    __tablename__ = "job_leases"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    holder: Mapped[str] = mapped_column(String(63))
    expires_at: Mapped[datetime]
