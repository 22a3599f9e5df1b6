"""API key rows: insert, look up, list, change, rotate, revoke. The form of a key is gateway/keys.py's affair.

A key that an actor may not know of does not exist for it: another tenant's, and an operator's for whoever is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor, Role, Scopes, check_grant
from stencilpress.gateway.catalog.audit import Target, audit
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
    previous_hash: bytes | None = None
    """Of the secret before the last rotation; taken until ``key.previous_expires_at``."""


async def insert_key(db: Database, key: Key, secret_hash: bytes, *, actor: Actor = SYSTEM) -> None:
    """Raises :class:`NotFoundError` for an unknown tenant, :class:`ConflictError` for a disabled one,
    :class:`PermissionDeniedError` for a key that would exceed the actor's.
    """
    check_grant(actor, key.role, key.scopes)
    async with db.write() as session:
        tenant = await tenant_row(session, key.tenant)
        if tenant.disabled_at is not None:
            raise ConflictError(f"tenant: {key.tenant!r} is disabled", param="tenant")
        row = KeyRow(
            public_id=key.public_id,
            tenant_id=tenant.id,
            secret_hash=secret_hash,
            last_four=key.last_four,
            created_at=key.created_at,
            role=key.role.value,
        )
        _set_changeable(row, key)
        session.add(row)
        audit(session, actor, "key.create", _target(row), after=_facts(row))


async def find_credential(db: Database, public_id: str) -> Credential | None:
    """The key with this public id and its tenant, in whatever state they are."""
    async with db.read() as session:
        found = (await session.execute(_with_tenant().where(KeyRow.public_id == public_id))).one_or_none()
    if found is None:
        return None
    key, tenant = found
    return Credential(_to_key(key, tenant.name), key.secret_hash, to_tenant(tenant), key.previous_hash)


async def list_keys(
    db: Database,
    tenant: str,
    *,
    actor: Actor = SYSTEM,
    after: tuple[datetime, str] | None = None,
    limit: int | None = None,
) -> tuple[Key, ...]:
    """A tenant's keys, newest first, revoked ones included; those behind ``after``, a key's time and id.

    Raises :class:`NotFoundError`.
    """
    async with db.read() as session:
        owner = await tenant_row(session, tenant)
        query = select(KeyRow).where(KeyRow.tenant_id == owner.id)
        if actor.role is not Role.OPERATOR:
            query = query.where(KeyRow.role != Role.OPERATOR.value)
        if after is not None:
            query = query.where(tuple_(KeyRow.created_at, KeyRow.public_id) < tuple_(*after))
        query = query.order_by(KeyRow.created_at.desc(), KeyRow.public_id.desc()).limit(limit)
        return tuple(_to_key(row, owner.name) for row in await session.scalars(query))


async def get_key(db: Database, public_id: str, tenant: str | None = None, *, actor: Actor = SYSTEM) -> Key:
    """Raises :class:`NotFoundError`."""
    async with db.read() as session:
        row, owner = await _visible(session, public_id, tenant, actor)
        return _to_key(row, owner.name)


async def change_key(
    db: Database, public_id: str, change: Callable[[Key], Key], tenant: str | None = None, *, actor: Actor = SYSTEM
) -> Key:
    """Replace label, expiry and scopes by those that ``change`` returns.

    Raises :class:`NotFoundError`, :class:`PermissionDeniedError` for a key that would exceed the actor's.
    """

    def apply(row: KeyRow, owner: TenantRow) -> None:
        wanted = change(_to_key(row, owner.name))
        check_grant(actor, wanted.role, wanted.scopes)
        _set_changeable(row, wanted)

    return await _update(db, public_id, tenant, actor, "key.change", apply)


async def rotate_secret(
    db: Database,
    public_id: str,
    secret_hash: bytes,
    last_four: str,
    old_until: datetime,
    tenant: str | None = None,
    *,
    actor: Actor = SYSTEM,
) -> Key:
    """Give a key a new secret; the old one is taken until ``old_until``, the one before it no longer.

    Raises :class:`NotFoundError`, :class:`ConflictError` for a revoked key.
    """

    def apply(row: KeyRow, owner: TenantRow) -> None:
        check_grant(actor, Role(row.role), _scopes(row))
        if row.revoked_at is not None:
            raise ConflictError(f"key: {public_id!r} of tenant {owner.name!r} is revoked", param="key")
        row.previous_hash, row.previous_expires_at = row.secret_hash, old_until
        row.secret_hash, row.last_four = secret_hash, last_four

    return await _update(db, public_id, tenant, actor, "key.rotate", apply)


async def revoke_key(db: Database, public_id: str, tenant: str | None = None, *, actor: Actor = SYSTEM) -> Key:
    """Refuse a key from now on. Repeating it changes nothing. Raises :class:`NotFoundError`, also for a foreign key."""

    def apply(row: KeyRow, _owner: TenantRow) -> None:
        row.revoked_at = row.revoked_at or datetime.now(UTC)

    return await _update(db, public_id, tenant, actor, "key.revoke", apply)


async def _update(
    db: Database,
    public_id: str,
    tenant: str | None,
    actor: Actor,
    action: str,
    apply: Callable[[KeyRow, TenantRow], None],
) -> Key:
    async with db.write() as session:
        row, owner = await _visible(session, public_id, tenant, actor, lock=True)
        before = _facts(row)
        apply(row, owner)
        audit(session, actor, action, _target(row), before, _facts(row))
    return _to_key(row, owner.name)


async def _visible(
    session: AsyncSession, public_id: str, tenant: str | None, actor: Actor, *, lock: bool = False
) -> tuple[KeyRow, TenantRow]:
    query = _with_tenant().where(KeyRow.public_id == public_id, TenantRow.deleted_at.is_(None))
    if tenant is not None:
        query = query.where(TenantRow.name == tenant)
    if actor.role is not Role.OPERATOR:
        query = query.where(KeyRow.tenant_id == actor.tenant_id, KeyRow.role != Role.OPERATOR.value)
    if lock:
        query = query.with_for_update(of=KeyRow)
    found = (await session.execute(query)).one_or_none() if public_id.isalnum() else None
    if found is None:
        raise NotFoundError(f"key: {public_id!r} does not exist", param="key")
    row, owner = found
    return row, owner


def _with_tenant() -> Select[KeyRow, TenantRow]:
    return select(KeyRow, TenantRow).join(TenantRow, KeyRow.tenant_id == TenantRow.id)


def _set_changeable(row: KeyRow, key: Key) -> None:
    row.label, row.expires_at = key.label, key.expires_at
    row.models = None if key.scopes.models is None else list(key.scopes.models)
    row.routes = None if key.scopes.routes is None else list(key.scopes.routes)


def _target(row: KeyRow) -> Target:
    return Target("key", row.public_id, row.tenant_id)


def _facts(row: KeyRow) -> dict[str, Any]:
    """What an audit entry shows of a key."""
    fields = ("label", "role", "models", "routes", "last_four", "expires_at", "revoked_at", "previous_expires_at")
    return {field: getattr(row, field) for field in fields}


def _scopes(row: KeyRow) -> Scopes:
    return Scopes(*(None if names is None else tuple(names) for names in (row.models, row.routes)))


def _to_key(row: KeyRow, tenant: str) -> Key:
    bare = Key(row.public_id, tenant, row.label, row.last_four, row.created_at, row.expires_at, row.revoked_at)
    return replace(bare, role=Role(row.role), scopes=_scopes(row), previous_expires_at=row.previous_expires_at)
