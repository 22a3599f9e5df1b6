"""Tenants: create, list, find, disable."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.records import Tenant, TenantLimits
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import ConflictError, InvalidRequestError, NotFoundError
from stencilpress.gateway.names import check_tenant_name, is_name

SALT_BYTES = 32
MAX_COUNT = 2**31 - 1
MAX_BYTES = 2**63 - 1


async def create_tenant(db: Database, name: str, limits: TenantLimits | None = None) -> Tenant:
    """Raises :class:`InvalidRequestError` for the name or a limit, :class:`ConflictError` if it exists."""
    limits = limits or TenantLimits()
    _check_limits(limits)
    row = TenantRow(
        name=check_tenant_name(name),
        max_rank=limits.max_rank,
        max_adapters=limits.max_adapters,
        max_adapter_bytes=limits.max_adapter_bytes,
        target_modules=None if limits.target_modules is None else list(limits.target_modules),
        weight=limits.weight,
        prefix_salt=secrets.token_bytes(SALT_BYTES),
        created_at=datetime.now(UTC),
    )
    try:
        async with db.write() as session:
            session.add(row)
    except IntegrityError:
        raise ConflictError(f"tenant: {name!r} exists already", param="tenant") from None
    return to_tenant(row)


async def list_tenants(db: Database) -> tuple[Tenant, ...]:
    """All tenants by name, disabled ones included."""
    async with db.read() as session:
        rows = await session.scalars(select(TenantRow))
        return tuple(sorted((to_tenant(row) for row in rows), key=lambda tenant: tenant.name))


async def get_tenant(db: Database, name: str) -> Tenant:
    """Raises :class:`NotFoundError`."""
    async with db.read() as session:
        return to_tenant(await tenant_row(session, name))


async def disable_tenant(db: Database, name: str) -> Tenant:
    """Refuse a tenant's keys and uploads from now on. Repeating it changes nothing. Raises :class:`NotFoundError`."""
    async with db.write() as session:
        row = await tenant_row(session, name)
        row.disabled_at = row.disabled_at or datetime.now(UTC)
    return to_tenant(row)


async def tenant_row(session: AsyncSession, name: str) -> TenantRow:
    """Raises :class:`NotFoundError`; a malformed name is one that does not exist."""
    row = await session.scalar(select(TenantRow).where(TenantRow.name == name)) if is_name(name) else None
    if row is None:
        raise NotFoundError(f"tenant: {name!r} does not exist", param="tenant")
    return row


def to_tenant(row: TenantRow) -> Tenant:
    return Tenant(row.id, row.name, to_limits(row), row.prefix_salt, row.created_at, row.disabled_at)


def to_limits(row: TenantRow) -> TenantLimits:
    modules = None if row.target_modules is None else tuple(row.target_modules)
    return TenantLimits(row.max_rank, row.max_adapters, row.max_adapter_bytes, modules, row.weight)


def _check_limits(limits: TenantLimits) -> None:
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_rank", limits.max_rank, 1, MAX_COUNT),
        ("max_adapters", limits.max_adapters, 0, MAX_COUNT),
        ("max_adapter_bytes", limits.max_adapter_bytes, 1, MAX_BYTES),
        ("weight", limits.weight, 0.001, 1000.0),
    )
    for field, value, low, high in ranges:
        if not low <= value <= high:
            raise InvalidRequestError(f"{field}: must be between {low} and {high}, got {value}", param=field)
