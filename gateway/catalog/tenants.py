"""Tenants: create, find, list, change, disable, delete."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.limits import changed, checked, flat, to_limits
from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.records import Tenant, TenantLimits
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.stamps import touch_retired
from stencilpress.gateway.errors import ConflictError, NotFoundError
from stencilpress.gateway.names import check_tenant_name, is_name

SALT_BYTES = 32
TOMBSTONE = "purged:"
"""How the name of a row begins whose tenant was erased: no name that anybody may give or ask for has a colon."""


async def create_tenant(
    db: Database, name: str, limits: TenantLimits | None = None, *, actor: Actor = SYSTEM
) -> Tenant:
    """Raises :class:`InvalidRequestError` for the name or a limit, :class:`ConflictError` if it exists."""
    row = TenantRow(
        name=check_tenant_name(name),
        prefix_salt=secrets.token_bytes(SALT_BYTES),
        created_at=datetime.now(UTC),
        **flat(checked(limits or TenantLimits())),
    )
    try:
        async with db.write() as session:
            session.add(row)
            await session.flush()
            audit(session, actor, "tenant.create", _target(row), after=_facts(row))
    except IntegrityError:
        raise ConflictError(
            f"tenant: {name!r} exists already, or was deleted and keeps its name", param="name"
        ) from None
    return to_tenant(row)


async def list_tenants(
    db: Database, *, after: str = "", prefix: str = "", limit: int | None = None, deleted: bool = False
) -> tuple[Tenant, ...]:
    """Tenants by name, those after ``after`` whose name begins with ``prefix``; disabled ones included."""
    query = select(TenantRow).where(TenantRow.name > after, ~TenantRow.name.startswith(TOMBSTONE))
    query = query.order_by(TenantRow.name).limit(limit)
    if prefix:
        query = query.where(TenantRow.name >= prefix, TenantRow.name < prefix + "\x7f")  # names are ASCII
    if not deleted:
        query = query.where(TenantRow.deleted_at.is_(None))
    async with db.read() as session:
        return tuple(to_tenant(row) for row in await session.scalars(query))


async def get_tenant(db: Database, name: str, *, deleted: bool = False) -> Tenant:
    """Raises :class:`NotFoundError`; a deleted tenant is found only on request."""
    async with db.read() as session:
        return to_tenant(await tenant_row(session, name, deleted=deleted))


async def change_tenant(db: Database, name: str, changes: Mapping[str, Any], *, actor: Actor = SYSTEM) -> Tenant:
    """Change some limits, which hold for what starts from now on. ``changes`` are fields of :class:`TenantLimits`.

    Raises :class:`NotFoundError`, :class:`InvalidRequestError` naming the field.
    """
    async with db.write() as session:
        row = await tenant_row(session, name, lock=True)
        before = _facts(row)
        for column, value in flat(changed(to_limits(row), changes)).items():
            setattr(row, column, value)
        audit(session, actor, "tenant.change", _target(row), before, _facts(row))
    return to_tenant(row)


async def disable_tenant(db: Database, name: str, *, actor: Actor = SYSTEM) -> Tenant:
    """Refuse a tenant's keys and uploads from now on. Repeating it changes nothing. Raises :class:`NotFoundError`."""
    return await _mark(db, name, "disable", actor, "disabled_at", on=True)


async def enable_tenant(db: Database, name: str, *, actor: Actor = SYSTEM) -> Tenant:
    """Take a tenant's keys and uploads again. Raises :class:`NotFoundError`."""
    return await _mark(db, name, "enable", actor, "disabled_at", on=False)


async def delete_tenant(db: Database, name: str, *, actor: Actor = SYSTEM) -> Tenant:
    """From now on the tenant, its keys and its adapters do not exist for anybody; nothing is erased.

    Its name stays taken, so that :func:`restore_tenant` can bring it back. Raises :class:`NotFoundError`.
    """
    return await _mark(db, name, "delete", actor, "deleted_at", on=True)


async def restore_tenant(db: Database, name: str, *, actor: Actor = SYSTEM) -> Tenant:
    """Undo :func:`delete_tenant`. Raises :class:`NotFoundError`."""
    return await _mark(db, name, "restore", actor, "deleted_at", on=False)


async def tenant_row(session: AsyncSession, name: str, *, deleted: bool = False, lock: bool = False) -> TenantRow:
    """Raises :class:`NotFoundError`; a malformed name is one that does not exist."""
    query = select(TenantRow).where(TenantRow.name == name)
    row = await session.scalar(query.with_for_update() if lock else query) if is_name(name) else None
    if row is None or (row.deleted_at is not None and not deleted):
        raise NotFoundError(f"tenant: {name!r} does not exist", param="tenant")
    return row


def to_tenant(row: TenantRow) -> Tenant:
    return Tenant(row.id, row.name, to_limits(row), row.prefix_salt, row.created_at, row.disabled_at, row.deleted_at)


async def _mark(db: Database, name: str, verb: str, actor: Actor, column: str, *, on: bool) -> Tenant:
    async with db.write() as session:
        row = await tenant_row(session, name, deleted=column == "deleted_at", lock=True)
        before = _facts(row)
        setattr(row, column, (getattr(row, column) or datetime.now(UTC)) if on else None)
        if row.deleted_at is not None:
            touch_retired(session)
        audit(session, actor, f"tenant.{verb}", _target(row), before, _facts(row))
    return to_tenant(row)


def _target(row: TenantRow) -> Target:
    return Target("tenant", row.name, row.id)


def _facts(row: TenantRow) -> dict[str, Any]:
    """What an audit entry shows of a tenant."""
    return {**flat(to_limits(row)), "disabled_at": row.disabled_at, "deleted_at": row.deleted_at}
