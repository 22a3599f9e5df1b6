"""What the catalog hands out: immutable records, never rows, so nothing outside can touch a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from stencilpress.gateway.access import EVERYTHING, Role, Scopes
from stencilpress.gateway.defaults import NO_DEFAULTS, VersionDefaults
from stencilpress.gateway.errors import NotFoundError
from stencilpress.gateway.intake_records import MatchedProjection
from stencilpress.gateway.quota.plan import UNLIMITED, Quota

Keeping = Literal["pin", "preload"]
"""What an operator may do about an adapter: keep it in the engines' memory, or have it brought in at their start."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may use: its plan. None is no limit of its own."""

    max_rank: int = 64
    max_adapters: int = 1000
    max_adapter_bytes: int = 1 << 30
    """Of one version, all files together."""
    target_modules: tuple[str, ...] | None = None
    """The projections that its adapters may adapt."""
    weight: float = 1.0
    """Its share beside others when engines are full."""
    max_versions: int = 1000
    """Of one adapter."""
    stored_bytes: int = 1 << 40
    """Of all versions of all its adapters together."""
    max_tokens: int | None = None
    """Longest answer that a request may ask for."""
    default_max_tokens: int | None = None
    """Longest answer of a request that does not say."""
    quota: Quota = UNLIMITED


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer. ``prefix_salt`` is a secret that keys its prefix cache; never shown."""

    id: int
    name: str
    limits: TenantLimits
    prefix_salt: bytes
    created_at: datetime
    disabled_at: datetime | None
    deleted_at: datetime | None = None

    @property
    def in_force(self) -> bool:
        return self.disabled_at is None and self.deleted_at is None


@dataclass(frozen=True, slots=True)
class Key:
    """An API key without its secret."""

    public_id: str
    tenant: str
    label: str
    last_four: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    role: Role = Role.CALLER
    scopes: Scopes = EVERYTHING
    previous_expires_at: datetime | None = None
    """Until when the secret before the last rotation is taken as well."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change. ``before`` and ``after`` hold the fields that it changed."""

    id: int
    at: datetime
    actor: str
    role: str
    tenant: str | None
    action: str
    target: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    source: str
    request_id: str


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """What of a version's two files is its uploader's alone, while the tensors are those of its digest."""

    config: bytes = field(repr=False)
    """``adapter_config.json``, byte by byte."""
    weights_header: bytes = field(repr=False)
    """The JSON at the head of ``adapter_model.safetensors``, deflated (zlib)."""


StoredFiles = VersionFiles | Literal["in blob"] | None
"""What is kept of a version's files. In the blob: it is from before they were kept, and was the first with its content.
None: nothing."""


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What intake found in an upload whose blob already lies in its folder."""

    digest: str
    base_id: str
    base_asserted: bool
    """The upload names no base; its owner vouched that it fits."""
    ranks: tuple[int, ...]
    """Distinct ranks, ascending."""
    target_modules: tuple[str, ...]
    size_bytes: int
    source_files: tuple[str, ...]
    files: VersionFiles | None = None
    """None keeps nothing of them."""


@dataclass(frozen=True, slots=True)
class Version:
    """One immutable version of an adapter. ``defaults`` stand in for what a request leaves out."""

    adapter: str
    number: int
    digest: str
    base_id: str
    base_asserted: bool
    ranks: tuple[int, ...]
    target_modules: tuple[str, ...]
    size_bytes: int
    source_files: tuple[str, ...]
    created_at: datetime
    defaults: VersionDefaults = NO_DEFAULTS
    deleted_at: datetime | None = None

    @property
    def ref(self) -> str:
        return f"{self.adapter}@{self.number}"


@dataclass(frozen=True, slots=True)
class AddedVersion:
    """``created`` is False when the adapter had this digest already. ``promoted``: ``prod`` points at it.

    ``modules`` is what intake found, where it was intake that added it.
    """

    version: Version
    created: bool
    promoted: bool
    modules: tuple[MatchedProjection, ...] = ()


@dataclass(frozen=True, slots=True)
class CanaryGuard:
    """When a canary is taken back by itself; None sets no limit. See gateway/lifecycle/canary.py."""

    max_error_share: float | None = None
    """Share of its requests that may fail."""
    max_ttft_ratio: float | None = None
    """Its p95 of the first token by that of the version beside it."""
    min_requests: int = 50
    """Fewer decide nothing."""
    window_s: int = 600
    """Only requests of the last seconds count, and only since the alias was moved."""


@dataclass(frozen=True, slots=True)
class Canary:
    """The version that ``percent`` of an alias's users get in place of its own."""

    version: int
    percent: int
    guard: CanaryGuard | None = None


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """What an alias points at."""

    version: int
    canary: Canary | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of a version. ``move_id`` changes with every move; ``changed`` is False if a move found it there."""

    adapter: str
    name: str
    target: AliasTarget
    move_id: int
    updated_at: datetime
    changed: bool = True


@dataclass(frozen=True, slots=True)
class AliasMove:
    """One entry of an alias's history. ``target`` None: the alias was removed."""

    id: int
    alias: str
    kind: str
    """``move``, ``rollback`` or ``remove``."""
    target: AliasTarget | None
    actor: str
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Expected:
    """What a compare-and-set expects of an alias; None is not compared. ``version`` 0: the alias does not exist."""

    version: int | None = None
    move_id: int | None = None


@dataclass(frozen=True, slots=True)
class SmokeSuite:
    """The smoke prompts of an adapter, as the service wrote them; ``revision`` changes whenever they do."""

    revision: int
    prompts: tuple[dict[str, Any], ...]
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class SmokeRun:
    """The outcome of a suite for one version."""

    version: int
    suite_revision: int
    passed: bool
    results: tuple[dict[str, Any], ...]
    at: datetime


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a request's adapter name stands for: a version, or two that share its users by ``percent``."""

    adapter_id: int
    owner_id: int
    """The tenant whose adapter it is."""
    version: Version
    canary: Version | None = None
    percent: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant that may use another's adapter."""

    adapter: str
    tenant: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter with its versions (ascending) and aliases (name to version number)."""

    name: str
    created_at: datetime
    versions: tuple[Version, ...]
    aliases: Mapping[str, int]
    canaries: Mapping[str, Canary] = field(default_factory=dict)
    moves: Mapping[str, int] = field(default_factory=dict)
    """By alias the ``move_id`` in effect."""
    deleted_at: datetime | None = None
    kept: Keeping | None = None


def find_version_of(adapter: Adapter, number: int) -> Version:
    """Raises :class:`NotFoundError`."""
    for version in adapter.versions:
        if version.number == number:
            return version
    raise NotFoundError(f"version: {adapter.name}@{number} does not exist", param="version")
