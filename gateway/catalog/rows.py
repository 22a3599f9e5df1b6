"""The rows that most changes begin with: a tenant's and its adapter's, found, or locked until the transaction ends."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import AdapterRow, TenantRow
from stencilpress.gateway.errors import ConflictError, NotFoundError
from stencilpress.gateway.names import is_name


async def find_adapter(session: AsyncSession, tenant_id: int, name: str, *, deleted: bool = False) -> AdapterRow:
    """Raises :class:`NotFoundError`; a deleted adapter does not exist unless it is asked for."""
    query = select(AdapterRow).where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
    row = await session.scalar(query) if is_name(name) else None
    if row is None or (row.deleted_at is not None and not deleted):
        raise NotFoundError(f"name: adapter {name!r} does not exist", param="name")
    return row


async def locked_adapter(session: AsyncSession, tenant_id: int, name: str, *, deleted: bool = False) -> AdapterRow:
    """As :func:`find_adapter`, with the tenant's row locked until the end of the transaction."""
    await locked_tenant(session, tenant_id)
    return await find_adapter(session, tenant_id, name, deleted=deleted)


async def locked_tenant(session: AsyncSession, tenant_id: int) -> TenantRow:
    """Raises :class:`NotFoundError`, :class:`ConflictError` for a disabled tenant."""
    tenant = await session.scalar(select(TenantRow).where(TenantRow.id == tenant_id).with_for_update())
    if tenant is None or tenant.deleted_at is not None:
        raise NotFoundError("tenant: does not exist", param="tenant")
    if tenant.disabled_at is not None:
        raise ConflictError(f"tenant: {tenant.name!r} is disabled", param="tenant")
    return tenant
