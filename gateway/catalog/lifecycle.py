"""Deleting and purging, sharing, and the smoke prompts of adapters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.models import (
    AdapterRow,
    AliasMoveRow,
    AliasRow,
    CanaryRow,
    ShareRow,
    SmokeRunRow,
    SmokeSuiteRow,
    TenantRow,
    VersionFilesRow,
    VersionRow,
)
from stencilpress.gateway.catalog.records import Share, SmokeRun, SmokeSuite
from stencilpress.gateway.catalog.rows import find_adapter, locked_adapter
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.stamps import touch_retired
from stencilpress.gateway.catalog.tenants import tenant_row
from stencilpress.gateway.errors import ConflictError, NotFoundError

OWNED = (SmokeRunRow, SmokeSuiteRow, ShareRow, CanaryRow, AliasRow, AliasMoveRow, VersionFilesRow, VersionRow)
"""What goes with an adapter, in an order that foreign keys allow."""


async def delete_version(db: Database, tenant_id: int, name: str, number: int, *, actor: Actor = SYSTEM) -> None:
    """Take a version out of use; it can be restored until it is purged, and streams that run end on it.

    Raises :class:`NotFoundError`, :class:`ConflictError` while an alias or a canary points at it.
    """
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        version = await _version(session, adapter, number)
        if version.deleted_at is None:
            for table, column in ((AliasRow, AliasRow.name), (CanaryRow, CanaryRow.alias)):
                query = select(column).where(table.adapter_id == adapter.id, table.version == number)
                if alias := await session.scalar(query.limit(1)):
                    raise ConflictError(f"version: {name}@{alias} points at it; move that first", param="version")
            version.deleted_at = datetime.now(UTC)
            touch_retired(session)
            audit(session, actor, "version.delete", Target("version", f"{name}@{number}", tenant_id))


async def restore_version(db: Database, tenant_id: int, name: str, number: int, *, actor: Actor = SYSTEM) -> None:
    """Undo :func:`delete_version`. Raises :class:`NotFoundError`, also for a version that was purged."""
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        version = await _version(session, adapter, number)
        if version.deleted_at is not None:
            version.deleted_at = None
            audit(session, actor, "version.restore", Target("version", f"{name}@{number}", tenant_id))


async def delete_adapter(db: Database, tenant_id: int, name: str, *, actor: Actor = SYSTEM) -> None:
    """Take an adapter out of use with all of it; it can be restored until it is purged. Its name stays taken."""
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name, deleted=True)
        if adapter.deleted_at is None:
            adapter.deleted_at = datetime.now(UTC)
            touch_retired(session)
            audit(session, actor, "adapter.delete", Target("adapter", name, tenant_id))


async def restore_adapter(db: Database, tenant_id: int, name: str, *, actor: Actor = SYSTEM) -> None:
    """Undo :func:`delete_adapter`. Raises :class:`NotFoundError`, also for an adapter that was purged."""
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name, deleted=True)
        if adapter.deleted_at is not None:
            adapter.deleted_at = None
            audit(session, actor, "adapter.restore", Target("adapter", name, tenant_id))


async def list_purgeable(db: Database, before: datetime) -> frozenset[str]:
    """Digests of versions that were deleted, alone or with their adapter, before a moment."""
    query = select(VersionRow.digest).join(AdapterRow, VersionRow.adapter_id == AdapterRow.id)
    query = query.where((VersionRow.deleted_at < before) | (AdapterRow.deleted_at < before))
    async with db.read() as session:
        return frozenset(await session.scalars(query))


async def purge(db: Database, before: datetime, digests: frozenset[str], *, actor: Actor = SYSTEM) -> int:
    """Forget for good the deleted versions with these digests, then deleted adapters that have no version left.

    Returns how many versions went. What was restored meanwhile stays.
    """
    async with db.write() as session:
        query = select(VersionRow, AdapterRow).join(AdapterRow, VersionRow.adapter_id == AdapterRow.id)
        query = query.where((VersionRow.deleted_at < before) | (AdapterRow.deleted_at < before))
        query = query.order_by(VersionRow.adapter_id, VersionRow.number).with_for_update()  # others purge, or restore
        doomed = [(row, owner) for row, owner in await session.execute(query) if row.digest in digests]
        for row, owner in doomed:
            await _forget_traces(session, row)
            await session.delete(row)
            owner.purged_version = max(owner.purged_version, row.number)
            target = Target("version", f"{owner.name}@{row.number}", owner.tenant_id)
            audit(session, actor, "version.purge", target, before={"digest": row.digest})
        await session.flush()
        has_versions = select(VersionRow.adapter_id)
        empty = select(AdapterRow).where(AdapterRow.deleted_at < before, AdapterRow.id.not_in(has_versions))
        for adapter in list(await session.scalars(empty.order_by(AdapterRow.id).with_for_update())):
            for table in OWNED:
                await session.execute(delete(table).where(table.adapter_id == adapter.id))
            await session.delete(adapter)
            audit(session, actor, "adapter.purge", Target("adapter", adapter.name, adapter.tenant_id))
    return len(doomed)


async def digests_in_use(db: Database, digests: frozenset[str]) -> frozenset[str]:
    """Those of the digests that some version has, deleted ones included: their blobs must stay."""
    async with db.read() as session:
        query = select(VersionRow.digest).where(VersionRow.digest.in_(sorted(digests)))
        return frozenset(await session.scalars(query))


async def share_adapter(db: Database, tenant_id: int, name: str, with_tenant: str, *, actor: Actor = SYSTEM) -> Share:
    """Let a tenant use another's adapter under its name; it counts against its owner's limits alone.

    Raises :class:`NotFoundError`, :class:`ConflictError` if the tenant owns or was lent an adapter of that name.
    """
    try:
        async with db.write() as session:
            adapter = await locked_adapter(session, tenant_id, name)
            guest = await tenant_row(session, with_tenant)
            await _check_free(session, guest, adapter)
            row = await session.get(ShareRow, (adapter.id, guest.id))
            if row is None:
                row = ShareRow(adapter_id=adapter.id, tenant_id=guest.id, name=name, created_at=datetime.now(UTC))
                session.add(row)
                await session.flush()
                audit(session, actor, "adapter.share", Target("adapter", name, tenant_id), after={"with": with_tenant})
            return Share(name, with_tenant, row.created_at)
    except IntegrityError:
        raise _name_taken(name, with_tenant) from None


async def unshare_adapter(db: Database, tenant_id: int, name: str, with_tenant: str, *, actor: Actor = SYSTEM) -> None:
    """Take a share back; repeating it changes nothing. Raises :class:`NotFoundError` for adapter or tenant."""
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        guest = await tenant_row(session, with_tenant)
        row = await session.get(ShareRow, (adapter.id, guest.id))
        if row is not None:
            await session.delete(row)
            audit(session, actor, "adapter.unshare", Target("adapter", name, tenant_id), before={"with": with_tenant})


async def list_shares(db: Database, tenant_id: int, name: str) -> tuple[Share, ...]:
    """With whom an adapter is shared. Raises :class:`NotFoundError`."""
    async with db.read() as session:
        adapter = await find_adapter(session, tenant_id, name)
        query = select(TenantRow.name, ShareRow.created_at).join(ShareRow, ShareRow.tenant_id == TenantRow.id)
        found = await session.execute(query.where(ShareRow.adapter_id == adapter.id).order_by(TenantRow.name))
        return tuple(Share(name, tenant, created_at) for tenant, created_at in found)


async def set_suite(
    db: Database, tenant_id: int, name: str, prompts: list[dict[str, Any]], *, actor: Actor = SYSTEM
) -> SmokeSuite | None:
    """Replace an adapter's smoke prompts; none at all takes the gate away. Raises :class:`NotFoundError`."""
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        row = await session.get(SmokeSuiteRow, adapter.id)
        before = {"prompts": row.prompts if row is not None else []}
        audit(session, actor, "adapter.smoke", Target("adapter", name, tenant_id), before, {"prompts": prompts})
        if not prompts:
            if row is not None:
                await session.delete(row)
            return None
        if row is None:
            last = await session.scalar(
                select(func.max(SmokeRunRow.suite_revision)).where(SmokeRunRow.adapter_id == adapter.id)
            )
            row = SmokeSuiteRow(adapter_id=adapter.id, revision=last or 0)
            session.add(row)
        if row.prompts != prompts:
            row.revision += 1
        row.prompts, row.updated_at = prompts, datetime.now(UTC)
        await session.flush()
        return SmokeSuite(row.revision, tuple(row.prompts), row.updated_at)


async def get_suite(db: Database, tenant_id: int, name: str) -> SmokeSuite | None:
    """An adapter's smoke prompts. Raises :class:`NotFoundError` for the adapter."""
    async with db.read() as session:
        adapter = await find_adapter(session, tenant_id, name)
        row = await session.get(SmokeSuiteRow, adapter.id)
        return None if row is None else SmokeSuite(row.revision, tuple(row.prompts), row.updated_at)


async def record_run(
    db: Database,
    tenant_id: int,
    name: str,
    number: int,
    revision: int,
    results: list[dict[str, Any]],
    *,
    passed: bool,
    actor: Actor = SYSTEM,
) -> SmokeRun:
    """Keep the outcome of a suite. Raises :class:`NotFoundError`."""
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        row = SmokeRunRow(
            adapter_id=adapter.id,
            version=number,
            suite_revision=revision,
            passed=passed,
            results=results,
            at=datetime.now(UTC),
        )
        session.add(row)
        await session.flush()
        after = {"passed": passed, "suite_revision": revision}
        audit(session, actor, "version.smoke", Target("version", f"{name}@{number}", tenant_id), after=after)
        return _to_run(row)


async def count_runs(db: Database, tenant_id: int, since: datetime) -> int:
    """How often versions of a tenant's adapters have been asked since then."""
    query = select(func.count()).select_from(SmokeRunRow).join(AdapterRow, SmokeRunRow.adapter_id == AdapterRow.id)
    async with db.read() as session:
        return await session.scalar(query.where(AdapterRow.tenant_id == tenant_id, SmokeRunRow.at > since)) or 0


async def list_runs(db: Database, tenant_id: int, name: str, number: int, limit: int = 20) -> tuple[SmokeRun, ...]:
    """The outcomes for one version, newest first. Raises :class:`NotFoundError` for the adapter."""
    async with db.read() as session:
        adapter = await find_adapter(session, tenant_id, name)
        query = select(SmokeRunRow).where(SmokeRunRow.adapter_id == adapter.id, SmokeRunRow.version == number)
        return tuple(_to_run(row) for row in await session.scalars(query.order_by(SmokeRunRow.id.desc()).limit(limit)))


async def last_runs(db: Database, tenant_id: int, name: str) -> dict[int, SmokeRun]:
    """The last run of each version of an adapter that has had one. Raises :class:`NotFoundError`."""
    async with db.read() as session:
        adapter = await find_adapter(session, tenant_id, name, deleted=True)
        mine = SmokeRunRow.adapter_id == adapter.id
        newest = select(func.max(SmokeRunRow.id)).where(mine).group_by(SmokeRunRow.version)
        rows = await session.scalars(select(SmokeRunRow).where(SmokeRunRow.id.in_(newest)))
        return {row.version: _to_run(row) for row in rows}


def _to_run(row: SmokeRunRow) -> SmokeRun:
    return SmokeRun(row.version, row.suite_revision, row.passed, tuple(row.results), row.at)


async def _version(session: AsyncSession, adapter: AdapterRow, number: int) -> VersionRow:
    row = await session.get(VersionRow, (adapter.id, number)) if 0 < number < 2**31 else None
    if row is None:
        raise NotFoundError(f"version: {adapter.name}@{number} does not exist", param="version")
    return row


async def _forget_traces(session: AsyncSession, version: VersionRow) -> None:
    """Its files and smoke runs, and what points at it: only of a deleted adapter, a version alone cannot be deleted
    before."""
    at, number = version.adapter_id, version.number
    aliases = select(AliasRow.name).where(AliasRow.adapter_id == at, AliasRow.version == number)
    canaries = (CanaryRow.version == number) | CanaryRow.alias.in_(aliases)
    await session.execute(delete(CanaryRow).where(CanaryRow.adapter_id == at, canaries))
    await session.execute(delete(AliasRow).where(AliasRow.adapter_id == at, AliasRow.version == number))
    for table in (SmokeRunRow, VersionFilesRow):
        await session.execute(delete(table).where(table.adapter_id == at, table.version == number))


async def _check_free(session: AsyncSession, guest: TenantRow, adapter: AdapterRow) -> None:
    if guest.id == adapter.tenant_id:
        raise ConflictError(f"tenant: {guest.name!r} owns the adapter", param="tenant")
    own = select(AdapterRow.id).where(AdapterRow.tenant_id == guest.id, AdapterRow.name == adapter.name)
    if await session.scalar(own) is not None:
        raise _name_taken(adapter.name, guest.name)


def _name_taken(name: str, tenant: str) -> ConflictError:
    return ConflictError(f"name: tenant {tenant!r} has an adapter {name!r} already", param="name")
