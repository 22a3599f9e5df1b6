"""The bodies of the admin API: what it shows of tenants, keys and the audit log, and what it takes.

The `stencilpress` command prints the same. Limits and their ranges are those of ``catalog/limits.py``, which checks.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stencilpress.gateway.access import MAX_SCOPES, Role
from stencilpress.gateway.catalog.limits import MAX_BYTES, MAX_COUNT, flat
from stencilpress.gateway.catalog.records import AuditEntry, Key, Tenant, TenantLimits
from stencilpress.gateway.keys import MAX_LABEL_CHARS, MAX_OVERLAP, IssuedKey
from stencilpress.gateway.quota.terms import DIMENSIONS, Levels

Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Natural = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Tokens = Annotated[int, Meta(ge=1, le=MAX_BYTES)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Names = Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_SCOPES)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS, description="What the key is for.")]
Models = Annotated[Names | None, Meta(description="Adapters that the key is confined to; `base` is the base alone.")]
Routes = Annotated[Names | None, Meta(description="Routes that the key is confined to.")]
Instant = Annotated[datetime, Meta(tz=True)]


class LimitChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a tenant; what is left out stays as it is. Null is no limit."""

    max_rank: Annotated[Positive, Meta(description="Largest rank of an adapter.")] | UnsetType = UNSET
    max_adapters: Annotated[Natural, Meta(description="Number of adapters.")] | UnsetType = UNSET
    max_adapter_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES, description="Size of one version.")] | UnsetType = UNSET
    target_modules: Annotated[Names | None, Meta(description="Projections to adapt.")] | UnsetType = UNSET
    weight: Annotated[float, Meta(ge=0.001, le=1000, description="Share beside other tenants.")] | UnsetType = UNSET
    max_versions: Annotated[Positive, Meta(description="Versions of one adapter.")] | UnsetType = UNSET
    stored_bytes: Annotated[Bytes, Meta(description="Size of all versions together.")] | UnsetType = UNSET
    max_tokens: Annotated[Positive | None, Meta(description="Longest answer to ask for.")] | UnsetType = UNSET
    default_max_tokens: (
        Annotated[Positive | None, Meta(description="Longest answer of a request that does not say.")] | UnsetType
    ) = UNSET

    requests_per_minute: Annotated[Positive | None, Meta(description="Requests in a minute.")] | UnsetType = UNSET
    tokens_per_minute: (
        Annotated[Tokens | None, Meta(description="Prompt and answer tokens in a minute.")] | UnsetType
    ) = UNSET
    concurrent_streams: Annotated[Positive | None, Meta(description="Requests in progress.")] | UnsetType = UNSET
    tokens_per_day: Annotated[Tokens | None, Meta(description="Tokens from midnight.")] | UnsetType = UNSET
    tokens_per_month: Annotated[Tokens | None, Meta(description="Tokens from the first.")] | UnsetType = UNSET
    time_zone: Annotated[str, Meta(max_length=64, description="Whose midnight: an IANA name.")] | UnsetType = UNSET
    quota_shadow: Annotated[bool, Meta(description="Report what would be refused, refuse nothing.")] | UnsetType = UNSET


class Purge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What cannot be undone is said twice."""

    confirm: Annotated[str, Meta(max_length=64, description="The tenant's name.")]


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased. The audit log and the roll-ups know the tenant as `tombstone` from now on."""

    tenant: str
    tombstone: str
    adapters: int
    versions: int
    keys: int
    users: int
    requests: int


class NewTenant(LimitChanges, frozen=True, kw_only=True):
    """A tenant to add; limits that are left out take their defaults."""

    name: Annotated[str, Meta(max_length=64)]


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant with its limits."""

    name: str
    created_at: datetime
    disabled_at: datetime | None
    deleted_at: datetime | None
    max_rank: int
    max_adapters: int
    max_adapter_bytes: int
    target_modules: list[str] | None
    weight: float
    max_versions: int
    stored_bytes: int
    max_tokens: int | None
    default_max_tokens: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_streams: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    time_zone: str
    quota_shadow: bool

    @classmethod
    def of(cls, one: Tenant) -> TenantView:
        return cls(
            name=one.name,
            created_at=one.created_at,
            disabled_at=one.disabled_at,
            deleted_at=one.deleted_at,
            **flat(one.limits),
        )


class Level(msgspec.Struct, frozen=True):
    """Of one dimension. `used` includes what running requests have reserved; null is not counted. Null is no limit."""

    used: int | None
    limit: int | None


class QuotaView(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant uses now, beside its limits."""

    concurrent_streams: Level
    requests_per_minute: Level
    tokens_per_minute: Level
    tokens_per_day: Level
    tokens_per_month: Level
    adapters: Level
    stored_bytes: Level
    time_zone: str
    shadow: bool

    @classmethod
    def of(cls, limits: TenantLimits, levels: Levels, adapters: int, stored_bytes: int) -> QuotaView:
        quota = limits.quota
        pairs = {name: Level(getattr(levels, name), getattr(quota, name)) for name in DIMENSIONS}
        return cls(
            **pairs,
            adapters=Level(adapters, limits.max_adapters),
            stored_bytes=Level(stored_bytes, limits.stored_bytes),
            time_zone=quota.time_zone,
            shadow=quota.shadow,
        )


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to make. Null confines it to nothing. Without `expires_at`, which must lie ahead, it does not expire."""

    role: Role = Role.CALLER
    label: Label = ""
    expires_at: Instant | None = None
    models: Models = None
    routes: Routes = None


class KeyChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be changed of a key; what is left out stays as it is."""

    label: Label | UnsetType = UNSET
    expires_at: Instant | UnsetType | None = UNSET
    models: Models | UnsetType = UNSET
    routes: Routes | UnsetType = UNSET


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the old secret is taken beside the new one."""

    overlap_s: Annotated[int, Meta(ge=0, le=int(MAX_OVERLAP.total_seconds()))] = 3600


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. `id` is its middle part."""

    id: str
    tenant: str
    role: Role
    label: str
    last_four: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    models: list[str] | None
    routes: list[str] | None
    previous_expires_at: datetime | None
    """Until when the secret before the last rotation is taken as well."""

    @classmethod
    def of(cls, one: Key) -> KeyView:
        return cls(**_key_fields(one))


class IssuedKeyView(KeyView, frozen=True, kw_only=True):
    """A new key or secret. `token` is what a client sends; it is not kept and cannot be shown again."""

    token: str

    @classmethod
    def of_issued(cls, issued: IssuedKey) -> IssuedKeyView:
        return cls(**_key_fields(issued.key), token=issued.token)


class AuditView(msgspec.Struct, frozen=True, kw_only=True):
    """One change: who made it, with which role, to what, from where. `before` and `after` hold what it changed."""

    id: int
    at: datetime
    actor: str
    role: str
    tenant: str | None
    action: str
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    source: str
    request_id: str

    @classmethod
    def of(cls, one: AuditEntry) -> AuditView:
        return msgspec.convert(one, cls, from_attributes=True)


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """The key that asks."""

    key: str
    tenant: str
    role: Role
    permissions: list[str]
    models: list[str] | None
    routes: list[str] | None


def given(changes: msgspec.Struct) -> dict[str, Any]:
    """The fields that a body names."""
    values = {name: getattr(changes, name) for name in changes.__struct_fields__}
    return {name: value for name, value in values.items() if value is not UNSET}


def _key_fields(one: Key) -> dict[str, Any]:
    models, routes = one.scopes.models, one.scopes.routes
    return {
        "id": one.public_id,
        "tenant": one.tenant,
        "role": one.role,
        "label": one.label,
        "last_four": one.last_four,
        "created_at": one.created_at,
        "expires_at": one.expires_at,
        "revoked_at": one.revoked_at,
        "models": None if models is None else list(models),
        "routes": None if routes is None else list(routes),
        "previous_expires_at": one.previous_expires_at,
    }
