"""Adapters, versions and aliases. Every query is filtered by tenant; a foreign object does not exist.

A blob is in its folder before its row is written: an orphan blob is garbage, a row without a blob cannot be.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy import Select, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import selectinload

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.catalog.aliases import guard_of, move_alias, point_first
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.limits import to_limits
from stencilpress.gateway.catalog.models import AdapterRow, AliasRow, CanaryRow, ShareRow, TenantRow, VersionRow
from stencilpress.gateway.catalog.records import (
    Adapter,
    AddedVersion,
    AliasTarget,
    Canary,
    NewVersion,
    Resolved,
    TenantLimits,
    Version,
)
from stencilpress.gateway.catalog.rows import locked_adapter, locked_tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.version_files import keep_files
from stencilpress.gateway.defaults import NO_DEFAULTS, VersionDefaults
from stencilpress.gateway.errors import ConflictError, InvalidRequestError, NotFoundError
from stencilpress.gateway.names import DEFAULT_ALIAS, BaseNames, check_adapter_name, is_name


async def add_version(
    db: Database,
    tenant_id: int,
    name: str,
    new: NewVersion,
    base: BaseNames,
    *,
    promote: bool | None = None,
    actor: Actor = SYSTEM,
) -> AddedVersion:
    """Add the next version of an adapter, which is created with its first one.

    The same digest again is the same version, with the files that it came with; one that was deleted comes back.
    ``promote`` None points ``prod`` at an adapter's first version only; True always, False never; but never past smoke
    prompts. Uploads of one tenant take turns on its row, and no number is given twice. Raises
    :class:`InvalidRequestError` (name, limits), :class:`ConflictError` for a disabled tenant, a deleted adapter, or the
    name of one that is shared with the tenant.
    """
    check_adapter_name(name, base)
    async with db.write() as session:
        tenant = await locked_tenant(session, tenant_id)
        check_limits(new, to_limits(tenant))
        adapter = await _find_or_create(session, tenant, name)
        row = await session.scalar(
            select(VersionRow).where(VersionRow.adapter_id == adapter.id, VersionRow.digest == new.digest)
        )
        created = row is None
        if row is None:
            await _check_room(session, tenant, adapter, new)
            row = await _append(session, adapter, new)
            after = {"digest": new.digest, "size_bytes": new.size_bytes, "base_id": new.base_id}
            audit(session, actor, "version.add", Target("version", f"{name}@{row.number}", tenant_id), after=after)
        elif row.deleted_at is not None:
            row.deleted_at = None
            audit(session, actor, "version.restore", Target("version", f"{name}@{row.number}", tenant_id))
        await keep_files(session, row, new.files)
        first = created and row.number == 1
        promoted = first if promote is None else promote
        if promoted:
            promoted = await point_first(session, adapter, row.number, actor)
    return AddedVersion(_to_version(row, name), created, promoted)


def check_limits(new: NewVersion, limits: TenantLimits) -> None:
    """Raises :class:`InvalidRequestError` naming the first limit that a version breaks."""
    rank = max(new.ranks, default=0)
    if rank > limits.max_rank:
        raise _over_limit("r", f"rank {rank} is above the tenant's max_rank {limits.max_rank}")
    if new.size_bytes > limits.max_adapter_bytes:
        text = f"{new.size_bytes} bytes are more than the tenant's max_adapter_bytes {limits.max_adapter_bytes}"
        raise _over_limit("size_bytes", text)
    allowed = limits.target_modules
    refused = sorted(set(new.target_modules) - set(allowed)) if allowed is not None else []
    if refused:
        text = f"{', '.join(refused)} are not among the tenant's: {', '.join(allowed or ())}"
        raise _over_limit("target_modules", text)


async def promote(
    db: Database, tenant_id: int, name: str, number: int, alias: str = DEFAULT_ALIAS, *, actor: Actor = SYSTEM
) -> Version:
    """Point an alias at a version, wherever it is now. Raises as :func:`move_alias` does."""
    await move_alias(db, tenant_id, name, alias, AliasTarget(number), actor=actor)
    version = await find_version(db, tenant_id, name, number=number)
    if version is None:
        raise NotFoundError(f"version: {name}@{number} does not exist", param="version")
    return version


async def find_version(
    db: Database, tenant_id: int, name: str, *, number: int = 0, alias: str = DEFAULT_ALIAS
) -> Version | None:
    """The version with this number, or with number 0 the one that ``alias`` points at."""
    query = _versions_of(tenant_id, name)
    if number:
        query = query.where(VersionRow.number == number)
    else:
        query = query.join(
            AliasRow, (AliasRow.adapter_id == VersionRow.adapter_id) & (AliasRow.version == VersionRow.number)
        ).where(AliasRow.name == alias)
    async with db.read() as session:
        row = await session.scalar(query) if is_name(name) else None
    return None if row is None else _to_version(row, name)


async def find_target(
    db: Database, tenant_id: int, name: str, *, number: int = 0, alias: str = DEFAULT_ALIAS
) -> Resolved | None:
    """What a tenant's requests for a name get, the tenant's own adapter or one that is shared with it."""
    if not is_name(name):
        return None
    async with db.read() as session:
        adapter = await session.scalar(_usable_by(tenant_id).where(AdapterRow.name == name))
        if adapter is None:
            return None
        pointer = await session.get(AliasRow, (adapter.id, alias)) if not number else None
        stable = await _live(session, adapter, number or (pointer.version if pointer else 0))
        canary = await session.get(CanaryRow, (adapter.id, alias)) if pointer is not None else None
        other = await _live(session, adapter, canary.version) if canary is not None else None
    if stable is None:
        return None
    return Resolved(
        adapter.id, adapter.tenant_id, stable, other, canary.percent if canary is not None and other is not None else 0
    )


async def list_adapters(
    db: Database, tenant_id: int, *, deleted: bool = False, after: str = "", limit: int | None = None
) -> tuple[Adapter, ...]:
    """A tenant's adapters by name, with versions and aliases, from behind ``after``; deleted ones only if asked for."""
    query = _adapters_of(tenant_id, deleted=deleted)
    if after:
        query = query.where(AdapterRow.name > after)
    async with db.read() as session:
        rows = await session.scalars(query.order_by(AdapterRow.name).limit(limit))
        return tuple(_to_adapter(row, deleted) for row in rows)


async def list_shared(db: Database, tenant_id: int) -> tuple[Adapter, ...]:
    """Adapters of others that a tenant may use, by name."""
    query = select(AdapterRow).join(ShareRow, ShareRow.adapter_id == AdapterRow.id)
    query = query.join(TenantRow, TenantRow.id == AdapterRow.tenant_id).where(TenantRow.deleted_at.is_(None))
    query = query.where(ShareRow.tenant_id == tenant_id, AdapterRow.deleted_at.is_(None)).options(*_LOADED)
    async with db.read() as session:
        rows = await session.scalars(query)
        return tuple(sorted((_to_adapter(row) for row in rows), key=lambda adapter: adapter.name))


async def set_defaults(
    db: Database, tenant_id: int, name: str, number: int, defaults: VersionDefaults, *, actor: Actor = SYSTEM
) -> Version:
    """Replace what a version brings along. Raises :class:`NotFoundError`."""
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        row = await _live_row(session, adapter, number)
        if row is None:
            raise NotFoundError(f"version: {name}@{number} does not exist", param="version")
        before, after = row.defaults or {}, msgspec.to_builtins(defaults)
        row.defaults = after or None
        target = Target("version", f"{name}@{number}", tenant_id)
        audit(session, actor, "version.defaults", target, {"defaults": before}, {"defaults": after})
    return _to_version(row, name)


async def list_digests(db: Database, base_id: str) -> frozenset[str]:
    """The content of all versions for one base, whoever owns them: the operator's view, for upkeep of the blobs."""
    async with db.read() as session:
        return frozenset(await session.scalars(select(VersionRow.digest).where(VersionRow.base_id == base_id)))


async def get_adapter(db: Database, tenant_id: int, name: str, *, deleted: bool = False) -> Adapter:
    """Raises :class:`NotFoundError`, also for another tenant's, and for a deleted one unless it is asked for."""
    query = _adapters_of(tenant_id, deleted=deleted).where(AdapterRow.name == name)
    async with db.read() as session:
        row = await session.scalar(query) if is_name(name) else None
    if row is None:
        raise NotFoundError(f"name: adapter {name!r} does not exist", param="name")
    return _to_adapter(row, deleted)


def _over_limit(field: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {text}", param=field, code="limit_exceeded")


_LOADED = (
    selectinload(AdapterRow.versions),
    selectinload(AdapterRow.aliases),
    selectinload(AdapterRow.canaries),
)


def _adapters_of(tenant_id: int, *, deleted: bool = False) -> Select[AdapterRow]:
    query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id).options(*_LOADED)
    return query if deleted else query.where(AdapterRow.deleted_at.is_(None))


def _usable_by(tenant_id: int) -> Select[AdapterRow]:
    """What a tenant may name in a request; its own first."""
    shared = select(ShareRow.adapter_id).where(ShareRow.tenant_id == tenant_id)
    mine = AdapterRow.tenant_id == tenant_id
    query = select(AdapterRow).join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
    query = query.where(or_(mine, AdapterRow.id.in_(shared)), AdapterRow.deleted_at.is_(None))
    query = query.where(TenantRow.deleted_at.is_(None))
    return query.order_by(case((mine, 0), else_=1)).limit(1)


def _versions_of(tenant_id: int, name: str) -> Select[VersionRow]:
    joined = select(VersionRow).join(AdapterRow, VersionRow.adapter_id == AdapterRow.id)
    live = (AdapterRow.deleted_at.is_(None), VersionRow.deleted_at.is_(None))
    return joined.where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name, *live)


async def stored(db: Database, tenant_id: int) -> tuple[int, int]:
    """What counts against a tenant's ``max_adapters`` and ``stored_bytes``, what is not purged yet included."""
    async with db.read() as session:
        return await _adapter_count(session, tenant_id), await _stored_bytes(session, tenant_id)


async def _live_row(session: AsyncSession, adapter: AdapterRow, number: int) -> VersionRow | None:
    row = await session.get(VersionRow, (adapter.id, number)) if 0 < number < 2**31 else None
    return row if row is not None and row.deleted_at is None else None


async def _live(session: AsyncSession, adapter: AdapterRow, number: int) -> Version | None:
    row = await _live_row(session, adapter, number)
    return _to_version(row, adapter.name) if row is not None else None


async def _find_or_create(session: AsyncSession, tenant: TenantRow, name: str) -> AdapterRow:
    mine = AdapterRow.tenant_id == tenant.id
    adapter = await session.scalar(select(AdapterRow).where(mine, AdapterRow.name == name))
    if adapter is not None and adapter.deleted_at is not None:
        raise ConflictError(f"name: adapter {name!r} was deleted; restore it, or wait until it is purged", param="name")
    if adapter is not None:
        return adapter
    if await session.scalar(select(ShareRow.name).where(ShareRow.tenant_id == tenant.id, ShareRow.name == name)):
        raise ConflictError(f"name: an adapter {name!r} is shared with this tenant; take another name", param="name")
    count = await _adapter_count(session, tenant.id)
    if count >= tenant.max_adapters:
        text = f"the tenant has {count} adapters and its max_adapters is {tenant.max_adapters}"
        raise _over_limit("max_adapters", text)
    adapter = AdapterRow(tenant_id=tenant.id, name=name, created_at=datetime.now(UTC), purged_version=0)
    session.add(adapter)
    await session.flush()
    return adapter


async def _check_room(session: AsyncSession, tenant: TenantRow, adapter: AdapterRow, new: NewVersion) -> None:
    """Whether one more version fits the plan. Raises :class:`InvalidRequestError`."""
    count = await session.scalar(select(func.count()).where(VersionRow.adapter_id == adapter.id)) or 0
    if count >= tenant.max_versions:
        text = f"the adapter has {count} versions and the tenant's max_versions is {tenant.max_versions}"
        raise _over_limit("max_versions", text)
    stored = await _stored_bytes(session, tenant.id)
    if stored + new.size_bytes > tenant.stored_bytes:
        text = (
            f"{new.size_bytes} bytes on top of {stored} stored are more than the tenant's stored_bytes "
            f"{tenant.stored_bytes}"
        )
        raise _over_limit("stored_bytes", text)


async def _adapter_count(session: AsyncSession, tenant_id: int) -> int:
    counted = select(func.count()).select_from(AdapterRow).where(AdapterRow.tenant_id == tenant_id)
    return await session.scalar(counted) or 0


async def _stored_bytes(session: AsyncSession, tenant_id: int) -> int:
    sizes = select(func.coalesce(func.sum(VersionRow.size_bytes), 0)).join(AdapterRow)
    return int(await session.scalar(sizes.where(AdapterRow.tenant_id == tenant_id)) or 0)


async def _append(session: AsyncSession, adapter: AdapterRow, new: NewVersion) -> VersionRow:
    last = await session.scalar(select(func.max(VersionRow.number)).where(VersionRow.adapter_id == adapter.id)) or 0
    row = VersionRow(
        adapter_id=adapter.id,
        number=max(last, adapter.purged_version) + 1,
        digest=new.digest,
        base_id=new.base_id,
        base_asserted=new.base_asserted,
        ranks=list(new.ranks),
        target_modules=list(new.target_modules),
        size_bytes=new.size_bytes,
        source_files=list(new.source_files),
        created_at=datetime.now(UTC),
    )
    session.add(row)
    await session.flush()
    return row


def _to_version(row: VersionRow, adapter: str) -> Version:
    return Version(
        adapter=adapter,
        number=row.number,
        digest=row.digest,
        base_id=row.base_id,
        base_asserted=row.base_asserted,
        ranks=tuple(row.ranks),
        target_modules=tuple(row.target_modules),
        size_bytes=row.size_bytes,
        source_files=tuple(row.source_files),
        created_at=row.created_at,
        defaults=msgspec.convert(row.defaults, VersionDefaults) if row.defaults else NO_DEFAULTS,
        deleted_at=row.deleted_at,
    )


def _to_adapter(row: AdapterRow, deleted: bool = False) -> Adapter:
    return Adapter(
        name=row.name,
        created_at=row.created_at,
        versions=tuple(_to_version(one, row.name) for one in row.versions if deleted or one.deleted_at is None),
        aliases={alias.name: alias.version for alias in row.aliases},
        canaries={
            canary.alias: Canary(canary.version, canary.percent, guard_of(canary.guard)) for canary in row.canaries
        },
        moves={alias.name: alias.move_id for alias in row.aliases},
        deleted_at=row.deleted_at,
        kept=row.kept,
    )
