"""Erasing a deleted tenant for good: what it owned goes, what it did stays on record without a name.

Its row stays as a tombstone, since an id is an engine's handle and must never be another tenant's; the name is free
again. Roll-ups and the audit log keep the id: sums are what invoices rest on, and the log is what happened. Names in
them, the tenant's own and those that it gave, become pseudonyms; what the log has of people, their e-mail and network
addresses, goes.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.catalog.account_models import OneTimeLinkRow, SessionRow, UserRow
from stencilpress.gateway.catalog.alert_models import AlertRuleRow, DeliveryRow, IncidentRow, WebhookRow
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.lifecycle import OWNED
from stencilpress.gateway.catalog.models import (
    AdapterRow,
    AliasMoveRow,
    AuditRow,
    KeyRow,
    ShareRow,
    TenantRow,
    VersionRow,
)
from stencilpress.gateway.catalog.pseudonyms import (
    ROLL_UPS,
    Pseudonyms,
    rename_entries,
    rename_guest,
    rename_requests,
    rename_sums,
)
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import TOMBSTONE, tenant_row
from stencilpress.gateway.catalog.usage_models import UsageRequestRow
from stencilpress.gateway.errors import ConflictError, NotFoundError

BATCH = 2000
"""Rows of requests that go in one transaction."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What went. ``digests`` are those of the versions: blobs that no other tenant has are garbage now."""

    tenant: str
    tombstone: str
    adapters: int
    versions: int
    keys: int
    users: int
    requests: int
    digests: frozenset[str]


async def purge_tenant(db: Database, name: str, *, actor: Actor = SYSTEM) -> Erased:
    """Erase a deleted tenant: adapters, keys, people, alerts, and the rows of its single requests.

    Raises :class:`NotFoundError`, :class:`ConflictError` for one that is not deleted.
    """
    async with db.read() as session:
        tenant = await _deleted(session, name)
    names, requests = Pseudonyms(tenant), 0
    while gone := await _forget_requests(db, tenant.id):
        requests += gone
    await _rename_usage(db, name, names)
    entry: int | None = await _rename_entries(db, name, names)
    async with db.write() as session:
        row = await _deleted(session, name, lock=True)
        counts = {kind: await _count(session, table, row.id) for kind, table in _COUNTED.items()}
        owned = select(VersionRow.digest).join(AdapterRow, VersionRow.adapter_id == AdapterRow.id)
        digests = list(await session.scalars(owned.where(AdapterRow.tenant_id == row.id)))
        await _forget_people(session, row.id)
        await _forget_adapters(session, row.id)
        await _forget_alerts(session, row.id)
        await session.execute(delete(KeyRow).where(KeyRow.tenant_id == row.id))
        await rename_guest(session, names)
        while entry is not None:  # what came meanwhile
            entry = await rename_entries(session, row.id, names, entry)
        row.name, row.prefix_salt, row.target_modules = names.tombstone, secrets.token_bytes(32), None
        after = {**counts, "versions": len(digests), "requests": requests}
        audit(session, actor, "tenant.purge", Target("tenant", row.name, row.id), after=after)
    return Erased(name, names.tombstone, versions=len(digests), requests=requests, digests=frozenset(digests), **counts)


async def purge_deleted_tenants(db: Database, before: datetime) -> list[Erased]:
    """Erase the tenants that were deleted before then."""
    query = select(TenantRow.name).where(TenantRow.deleted_at < before, ~TenantRow.name.startswith(TOMBSTONE))
    async with db.read() as session:
        names = list(await session.scalars(query.order_by(TenantRow.id)))
    erased = []
    for name in names:
        with suppress(NotFoundError, ConflictError):  # purged by another host, or restored, in this moment
            erased.append(await purge_tenant(db, name))
    return erased


_COUNTED: dict[str, Any] = {"adapters": AdapterRow, "keys": KeyRow, "users": UserRow}


async def _deleted(session: AsyncSession, name: str, *, lock: bool = False) -> TenantRow:
    row = await tenant_row(session, name, deleted=True, lock=lock)
    if row.deleted_at is None:
        raise ConflictError("tenant: is not deleted; delete it first", param="tenant")
    return row


async def _count(session: AsyncSession, table: Any, tenant_id: int) -> int:
    return await session.scalar(select(func.count()).select_from(table).where(table.tenant_id == tenant_id)) or 0


async def _forget_requests(db: Database, tenant_id: int) -> int:
    """Some of the rows that are in the roll-ups; the few that are not yet go when their time is over, as all do."""
    some = select(UsageRequestRow.key).where(UsageRequestRow.tenant_id == tenant_id, UsageRequestRow.rolled_up)
    async with db.write() as session:
        keys = list(await session.scalars(some.limit(BATCH)))
        await session.execute(delete(UsageRequestRow).where(UsageRequestRow.key.in_(keys)))
    return len(keys)


async def _rename_usage(db: Database, name: str, names: Pseudonyms) -> None:
    async with db.write() as session:
        await rename_requests(session, (await _deleted(session, name)).id, names)
    for table in ROLL_UPS:
        last: tuple[Any, ...] | None = ()
        while last is not None:
            async with db.write() as session:
                last = await rename_sums(session, table, (await _deleted(session, name)).id, names, last)


async def _rename_entries(db: Database, name: str, names: Pseudonyms) -> int:
    """All entries of the log that are there by now; returns the last one."""
    entry = 0
    last: int | None = entry
    while last is not None:
        entry = last
        async with db.write() as session:
            last = await rename_entries(session, (await _deleted(session, name)).id, names, entry)
    return entry


async def _forget_people(session: AsyncSession, tenant_id: int) -> None:
    """Users, and what the audit log says of them beside their opaque ids."""
    entries = update(AuditRow).where(AuditRow.tenant_id == tenant_id)
    users = list(await session.scalars(select(UserRow).where(UserRow.tenant_id == tenant_id)))
    await _forget_operators(session, {f"user:{user.email}"[:100]: f"user:{user.public_id}" for user in users})
    for user in users:
        acted = update(AuditRow).where(AuditRow.actor == f"user:{user.email}"[:100])
        await session.execute(acted.values(actor=f"user:{user.public_id}", source=""))
        refused = update(AuditRow).where(AuditRow.target == f"user:{user.email}")  # before the user was there
        await session.execute(refused.values(target=f"user:{user.public_id}", source="", after=None))
        for table in (SessionRow, OneTimeLinkRow):
            await session.execute(delete(table).where(table.user_id == user.public_id))
        await session.delete(user)
    await session.flush()
    await session.execute(delete(OneTimeLinkRow).where(OneTimeLinkRow.tenant_id == tenant_id))
    await session.execute(entries.values(source=""))
    await session.execute(entries.where(AuditRow.target.startswith("user:")).values(before=None, after=None))


async def _forget_operators(session: AsyncSession, ids: Mapping[str, str]) -> None:
    """What people did for other tenants, where these have it beside the log."""
    for column in (AliasMoveRow.actor, IncidentRow.acknowledged_by):
        for name in list(await session.scalars(select(column).where(column.in_(ids)).distinct())):
            await session.execute(update(column.class_).where(column == name).values({column: ids[name]}))


async def _forget_adapters(session: AsyncSession, tenant_id: int) -> None:
    owned = select(AdapterRow.id).where(AdapterRow.tenant_id == tenant_id)
    for table in OWNED:
        await session.execute(delete(table).where(table.adapter_id.in_(owned)))
    await session.execute(delete(ShareRow).where(ShareRow.tenant_id == tenant_id))
    await session.execute(delete(AdapterRow).where(AdapterRow.tenant_id == tenant_id))


async def _forget_alerts(session: AsyncSession, tenant_id: int) -> None:
    await session.execute(delete(DeliveryRow).where(DeliveryRow.receiver == tenant_id))
    for table in (IncidentRow, WebhookRow, AlertRuleRow):
        await session.execute(delete(table).where(table.tenant_id == tenant_id))
