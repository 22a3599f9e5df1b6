"""API key rows: insert, look up, list, revoke. The form of a key is gateway/keys.py's affair."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import select

from stencilpress.gateway.catalog.models import KeyRow, TenantRow
from stencilpress.gateway.catalog.records import Key, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import tenant_row, to_tenant
from stencilpress.gateway.errors import ConflictError, NotFoundError


@dataclass(frozen=True, slots=True)
class Credential:
    """A stored key with what is needed to check it."""

    key: Key
    secret_hash: bytes
    tenant: Tenant


async def insert_key(db: Database, key: Key, secret_hash: bytes) -> None:
    """Raises :class:`NotFoundError` for an unknown tenant, :class:`ConflictError` for a disabled one."""
    async with db.write() as session:
        tenant = await tenant_row(session, key.tenant)
        if tenant.disabled_at is not None:
            raise ConflictError(f"tenant: {key.tenant!r} is disabled", param="tenant")
        session.add(
            KeyRow(
                public_id=key.public_id,
                tenant_id=tenant.id,
                secret_hash=secret_hash,
                label=key.label,
                last_four=key.last_four,
                created_at=key.created_at,
                expires_at=key.expires_at,
            )
        )


async def find_credential(db: Database, public_id: str) -> Credential | None:
    """The key with this public id and its tenant, in whatever state they are."""
    query = (
        select(KeyRow, TenantRow).join(TenantRow, KeyRow.tenant_id == TenantRow.id).where(KeyRow.public_id == public_id)
    )
    async with db.read() as session:
        found = (await session.execute(query)).one_or_none()
    if found is None:
        return None
    key, tenant = found
    return Credential(_to_key(key, tenant.name), key.secret_hash, to_tenant(tenant))


async def list_keys(db: Database, tenant: str) -> tuple[Key, ...]:
    """A tenant's keys, oldest first, revoked ones included. Raises :class:`NotFoundError`."""
    async with db.read() as session:
        owner = await tenant_row(session, tenant)
        query = select(KeyRow).where(KeyRow.tenant_id == owner.id).order_by(KeyRow.created_at, KeyRow.public_id)
        return tuple(_to_key(row, owner.name) for row in await session.scalars(query))


async def revoke_key(db: Database, public_id: str, tenant: str | None = None) -> Key:
    """Refuse a key from now on. Repeating it changes nothing. Raises :class:`NotFoundError`, also for a foreign key."""
    query = (
        select(KeyRow, TenantRow).join(TenantRow, KeyRow.tenant_id == TenantRow.id).where(KeyRow.public_id == public_id)
    )
    if tenant is not None:
        query = query.where(TenantRow.name == tenant)
    async with db.write() as session:
        found = (await session.execute(query)).one_or_none() if public_id.isalnum() else None
        if found is None:
            raise NotFoundError(f"key: {public_id!r} does not exist", param="key")
        row, owner = found
        row.revoked_at = row.revoked_at or datetime.now(UTC)
    return _to_key(row, owner.name)


def _to_key(row: KeyRow, tenant: str) -> Key:
    return Key(row.public_id, tenant, row.label, row.last_four, row.created_at, row.expires_at, row.revoked_at)
