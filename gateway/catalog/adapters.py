"""Adapters, versions and aliases. Every query is filtered by tenant; a foreign object does not exist.

A blob is in its folder before its row is written: an orphan blob is garbage, a row without a blob cannot be.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import selectinload

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.limits import to_limits
from stencilpress.gateway.catalog.models import AdapterRow, AliasRow, TenantRow, VersionRow
from stencilpress.gateway.catalog.records import Adapter, AddedVersion, NewVersion, TenantLimits, Version
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import ConflictError, InvalidRequestError, NotFoundError
from stencilpress.gateway.names import DEFAULT_ALIAS, BaseNames, check_adapter_name, check_alias_name, is_name


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

    The same digest again is the same version. ``promote`` None points ``prod`` at an adapter's first version
    only; True always, False never. Uploads of one tenant take turns on its row, so numbers have no gaps.
    Raises :class:`InvalidRequestError` (name, limits), :class:`ConflictError` for a disabled tenant.
    """
    check_adapter_name(name, base)
    async with db.write() as session:
        tenant = await _locked_tenant(session, tenant_id)
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
        first = created and row.number == 1
        promoted = first if promote is None else promote
        if promoted:
            await _point(session, adapter, DEFAULT_ALIAS, row.number, actor)
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
    """Point an alias at a version; requests that start from now on follow it.

    Raises :class:`InvalidRequestError` for the alias, :class:`NotFoundError` for an adapter or version,
    :class:`ConflictError` for a disabled tenant.
    """
    check_alias_name(alias)
    query = _versions_of(tenant_id, name).where(VersionRow.number == number)
    async with db.write() as session:
        await _locked_tenant(session, tenant_id)
        row = await session.scalar(query) if is_name(name) else None
        if row is None:
            raise NotFoundError(f"version: {name}@{number} does not exist", param="version")
        await _point(session, await session.get_one(AdapterRow, row.adapter_id), alias, number, actor)
    return _to_version(row, name)


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


async def list_adapters(db: Database, tenant_id: int) -> tuple[Adapter, ...]:
    """A tenant's adapters by name, with versions and aliases."""
    async with db.read() as session:
        rows = await session.scalars(_adapters_of(tenant_id))
        return tuple(sorted((_to_adapter(row) for row in rows), key=lambda adapter: adapter.name))


async def list_digests(db: Database, base_id: str) -> frozenset[str]:
    """The content of all versions for one base, whoever owns them: the operator's view, for upkeep of the blobs."""
    async with db.read() as session:
        return frozenset(await session.scalars(select(VersionRow.digest).where(VersionRow.base_id == base_id)))


async def get_adapter(db: Database, tenant_id: int, name: str) -> Adapter:
    """Raises :class:`NotFoundError`, also for another tenant's."""
    query = _adapters_of(tenant_id).where(AdapterRow.name == name)
    async with db.read() as session:
        row = await session.scalar(query) if is_name(name) else None
    if row is None:
        raise NotFoundError(f"name: adapter {name!r} does not exist", param="name")
    return _to_adapter(row)


def _over_limit(field: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {text}", param=field, code="limit_exceeded")


def _adapters_of(tenant_id: int) -> Select[AdapterRow]:
    loaded = (selectinload(AdapterRow.versions), selectinload(AdapterRow.aliases))
    return select(AdapterRow).where(AdapterRow.tenant_id == tenant_id).options(*loaded)


def _versions_of(tenant_id: int, name: str) -> Select[VersionRow]:
    joined = select(VersionRow).join(AdapterRow, VersionRow.adapter_id == AdapterRow.id)
    return joined.where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)


async def _locked_tenant(session: AsyncSession, tenant_id: int) -> TenantRow:
    tenant = await session.scalar(select(TenantRow).where(TenantRow.id == tenant_id).with_for_update())
    if tenant is None or tenant.deleted_at is not None:
        raise NotFoundError("tenant: does not exist", param="tenant")
    if tenant.disabled_at is not None:
        raise ConflictError(f"tenant: {tenant.name!r} is disabled", param="tenant")
    return tenant


async def _find_or_create(session: AsyncSession, tenant: TenantRow, name: str) -> AdapterRow:
    mine = AdapterRow.tenant_id == tenant.id
    adapter = await session.scalar(select(AdapterRow).where(mine, AdapterRow.name == name))
    if adapter is not None:
        return adapter
    count = await session.scalar(select(func.count()).select_from(AdapterRow).where(mine)) or 0
    if count >= tenant.max_adapters:
        text = f"the tenant has {count} adapters and its max_adapters is {tenant.max_adapters}"
        raise _over_limit("max_adapters", text)
    adapter = AdapterRow(tenant_id=tenant.id, name=name, created_at=datetime.now(UTC))
    session.add(adapter)
    await session.flush()
    return adapter


async def _check_room(session: AsyncSession, tenant: TenantRow, adapter: AdapterRow, new: NewVersion) -> None:
    """Whether one more version fits the plan. Raises :class:`InvalidRequestError`."""
    count = await session.scalar(select(func.count()).where(VersionRow.adapter_id == adapter.id)) or 0
    if count >= tenant.max_versions:
        text = f"the adapter has {count} versions and the tenant's max_versions is {tenant.max_versions}"
        raise _over_limit("max_versions", text)
    sizes = select(func.coalesce(func.sum(VersionRow.size_bytes), 0)).join(AdapterRow)
    stored = int(await session.scalar(sizes.where(AdapterRow.tenant_id == tenant.id)) or 0)
    if stored + new.size_bytes > tenant.stored_bytes:
        text = (
            f"{new.size_bytes} bytes on top of {stored} stored are more than the tenant's stored_bytes "
            f"{tenant.stored_bytes}"
        )
        raise _over_limit("stored_bytes", text)


async def _append(session: AsyncSession, adapter: AdapterRow, new: NewVersion) -> VersionRow:
    last = await session.scalar(select(func.max(VersionRow.number)).where(VersionRow.adapter_id == adapter.id)) or 0
    row = VersionRow(
        adapter_id=adapter.id,
        number=last + 1,
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


async def _point(session: AsyncSession, adapter: AdapterRow, alias: str, number: int, actor: Actor) -> None:
    known = await session.get(AliasRow, (adapter.id, alias))
    before = None if known is None else {"version": known.version}
    await session.merge(AliasRow(adapter_id=adapter.id, name=alias, version=number, updated_at=datetime.now(UTC)))
    target = Target("alias", f"{adapter.name}@{alias}", adapter.tenant_id)
    audit(session, actor, "alias.point", target, before, {"version": number})


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
    )


def _to_adapter(row: AdapterRow) -> Adapter:
    versions = tuple(_to_version(version, row.name) for version in row.versions)
    return Adapter(row.name, row.created_at, versions, {alias.name: alias.version for alias in row.aliases})
