"""What the admin API shows of adapters and takes for them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stencilpress.gateway.catalog.records import (
    Adapter,
    AddedVersion,
    Alias,
    AliasMove,
    AliasTarget,
    Canary,
    CanaryGuard,
    Keeping,
    Share,
    SmokeRun,
    SmokeSuite,
    Version,
)
from stencilpress.gateway.defaults import VersionDefaults
from stencilpress.gateway.intake_records import MatchedProjection
from stencilpress.gateway.lifecycle.smoke import MAX_PROMPTS, SmokePrompt, SmokeResult
from stencilpress.gateway.lifecycle.uploads import Upload

Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Reason = Annotated[str, Meta(max_length=500, description="Why, for the history.")]
Etag = Annotated[str, Meta(pattern=r'^"[0-9]{1,18}"$')]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """One version. `defaults` stand in for what a request leaves out; `aliases` point at it."""

    version: str
    number: int
    digest: str
    base: str
    base_asserted: bool
    ranks: list[int]
    target_modules: list[str]
    size_bytes: int
    source_files: list[str]
    aliases: list[str]
    defaults: VersionDefaults
    created_at: datetime
    deleted_at: datetime | None

    @classmethod
    def of(cls, one: Version, adapter: Adapter) -> VersionView:
        return cls(
            version=one.ref,
            number=one.number,
            digest=one.digest,
            base=one.base_id,
            base_asserted=one.base_asserted,
            ranks=list(one.ranks),
            target_modules=list(one.target_modules),
            size_bytes=one.size_bytes,
            source_files=list(one.source_files),
            aliases=[alias for alias, number in adapter.aliases.items() if number == one.number],
            defaults=one.defaults,
            created_at=one.created_at,
            deleted_at=one.deleted_at,
        )


class CanaryGuardView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a canary is taken back by itself. One of the two limits is needed; null sets none."""

    max_error_share: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="Share of its requests that may fail.")
    ] = None
    max_ttft_ratio: Annotated[
        Annotated[float, Meta(ge=1, le=100)] | None,
        Meta(description="Its p95 of the first token by that of the version beside it."),
    ] = None
    min_requests: Annotated[int, Meta(ge=1, le=1_000_000, description="Fewer decide nothing.")] = 50
    window_s: Annotated[
        int, Meta(ge=60, le=86_400, description="Only requests of so many seconds count, and since the last move.")
    ] = 600


class CanaryView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A second version, the percentage of users that get it, and when it is taken back by itself."""

    version: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    percent: Annotated[int, Meta(ge=1, le=100)]
    guard: CanaryGuardView | None = None

    @classmethod
    def of(cls, canary: Canary | None) -> CanaryView | None:
        if canary is None:
            return None
        guard = None if canary.guard is None else msgspec.convert(canary.guard, CanaryGuardView, from_attributes=True)
        return cls(canary.version, canary.percent, guard)

    @property
    def canary(self) -> Canary:
        guard = None if self.guard is None else CanaryGuard(**msgspec.structs.asdict(self.guard))
        return Canary(self.version, self.percent, guard)


class AliasView(msgspec.Struct, frozen=True, kw_only=True):
    """Where an alias points. `etag` changes with every move and goes into `If-Match`."""

    adapter: str
    alias: str
    version: int
    canary: CanaryView | None
    etag: str

    @classmethod
    def of(cls, one: Alias) -> AliasView:
        return cls.at(one.adapter, one.name, one.target, one.move_id)

    @classmethod
    def at(cls, adapter: str, alias: str, target: AliasTarget, move_id: int) -> AliasView:
        return cls(
            adapter=adapter,
            alias=alias,
            version=target.version,
            canary=CanaryView.of(target.canary),
            etag=f'"{move_id}"',
        )


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter with its versions and aliases.

    `kept`: `pin`, what its `prod` stands for stays in the engines' memory; `preload`, it is brought in at their start.
    """

    name: str
    created_at: datetime
    deleted_at: datetime | None
    kept: Keeping | None
    versions: list[VersionView]
    aliases: list[AliasView]

    @classmethod
    def of(cls, one: Adapter) -> AdapterView:
        return cls(
            name=one.name,
            created_at=one.created_at,
            deleted_at=one.deleted_at,
            kept=one.kept,
            versions=[VersionView.of(version, one) for version in one.versions],
            aliases=[alias_view(one, alias) for alias in one.aliases],
        )


class AddedVersionView(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload became. `created` is false for content that the adapter had already; `promoted`: it is `prod` now.

    `modules` are the projections that matched, with their ranks and scales.
    """

    version: VersionView
    created: bool
    promoted: bool
    modules: list[MatchedProjection]

    @classmethod
    def of(cls, one: AddedVersion, adapter: Adapter) -> AddedVersionView:
        return cls(
            version=VersionView.of(one.version, adapter),
            created=one.created,
            promoted=one.promoted,
            modules=list(one.modules),
        )


class AliasChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an alias is to point.

    `expected_version` is where you believe that it points now, 0 that there is none; the `etag` that you have seen, in
    `expected_etag` or in the header `If-Match`, does as well. One of them is needed.
    """

    version: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    canary: CanaryView | None = None
    expected_version: Number | UnsetType = UNSET
    expected_etag: Etag | UnsetType = UNSET
    reason: Reason = ""

    @property
    def target(self) -> AliasTarget:
        return AliasTarget(self.version, self.canary.canary if self.canary is not None else None)


class Rollback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take back the last move; with `expected_version` or `expected_etag` only if the alias is still so."""

    expected_version: Number | UnsetType = UNSET
    expected_etag: Etag | UnsetType = UNSET
    reason: Reason = ""


class AliasMoveView(msgspec.Struct, frozen=True, kw_only=True):
    """One move of an alias. `version` is null where it was removed."""

    id: int
    alias: str
    kind: str
    version: int | None
    canary: CanaryView | None
    actor: str
    reason: str
    at: datetime

    @classmethod
    def of(cls, one: AliasMove) -> AliasMoveView:
        return cls(
            id=one.id,
            alias=one.alias,
            kind=one.kind,
            version=one.target.version if one.target is not None else None,
            canary=CanaryView.of(one.target.canary) if one.target is not None else None,
            actor=one.actor,
            reason=one.reason,
            at=one.at,
        )


class SmokePrompts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompts that a version must answer before `prod` points at it; none take the gate away."""

    prompts: Annotated[list[SmokePrompt], Meta(max_length=MAX_PROMPTS)]


class SmokeSuiteView(msgspec.Struct, frozen=True, kw_only=True):
    """The smoke prompts of an adapter. A run counts only for the `revision` that it was made with."""

    revision: int | None
    prompts: list[SmokePrompt]
    updated_at: datetime | None

    @classmethod
    def of(cls, one: SmokeSuite | None) -> SmokeSuiteView:
        if one is None:
            return cls(revision=None, prompts=[], updated_at=None)
        prompts = msgspec.convert(one.prompts, list[SmokePrompt])
        return cls(revision=one.revision, prompts=prompts, updated_at=one.updated_at)


class SmokeRunView(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a suite for one version, with the result of each prompt."""

    version: int
    suite_revision: int
    passed: bool
    results: list[SmokeResult]
    at: datetime

    @classmethod
    def of(cls, one: SmokeRun) -> SmokeRunView:
        return cls(
            version=one.version,
            suite_revision=one.suite_revision,
            passed=one.passed,
            results=msgspec.convert(one.results, list[SmokeResult]),
            at=one.at,
        )


class ShareView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that may use another's adapter under its name."""

    adapter: str
    tenant: str
    created_at: datetime

    @classmethod
    def of(cls, one: Share) -> ShareView:
        return cls(adapter=one.adapter, tenant=one.tenant, created_at=one.created_at)


class NewUpload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An upload in parts that is to become the next version of an adapter."""

    adapter: Annotated[str, Meta(max_length=64)]
    assert_base: Annotated[bool, Meta(description="Vouch that it fits the base, if its config names none.")] = False
    promote: Annotated[bool | None, Meta(description="Point `prod` at it; null: if it is the first version.")] = None


class UploadView(msgspec.Struct, frozen=True, kw_only=True):
    """How far an upload is: the next part of a file begins at its `received_bytes`. `result` is what it became."""

    id: str
    adapter: str
    received_bytes: dict[str, int]
    max_bytes: int
    expires_at: datetime
    result: str | None

    @classmethod
    def of(cls, one: Upload) -> UploadView:
        return cls(
            id=one.id,
            adapter=one.adapter,
            received_bytes=one.received_bytes,
            max_bytes=one.max_bytes,
            expires_at=one.expires,
            result=one.result or None,
        )


class UploadDigests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SHA-256 of each file as a whole."""

    sha256: dict[str, Sha256]


def alias_view(adapter: Adapter, alias: str) -> AliasView:
    target = AliasTarget(adapter.aliases[alias], adapter.canaries.get(alias))
    return AliasView.at(adapter.name, alias, target, adapter.moves[alias])
