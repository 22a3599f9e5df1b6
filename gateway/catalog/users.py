"""Users of the console: add, find, list, change their role, disable, set their password.

As with keys, a user that an actor may not know of does not exist for it: another tenant's, and an operator for whoever
is none. A change of role or password, and disabling, end the user's sessions and links in the same transaction.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import EVERYTHING, SYSTEM, Actor, Role, check_grant
from stencilpress.gateway.catalog.account_models import MAX_EMAIL_CHARS, OneTimeLinkRow, SessionRow, UserRow
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.records import Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import tenant_row, to_tenant
from stencilpress.gateway.errors import ConflictError, InvalidRequestError, NotFoundError

MAX_USERS = 1000
"""Of one tenant: an address belongs to one user of all, so nobody may take them without end."""
_PUBLIC_CHARS = 12
_EMAIL = re.compile(r"[^\s@<>\"'(),:;\\\[\]]{1,64}@[^\s@<>\"'(),:;\\\[\]]+")


@dataclass(frozen=True, slots=True)
class User:
    """A person who may sign in, without the hash of the password."""

    public_id: str
    email: str
    tenant: str
    tenant_id: int
    role: Role
    created_at: datetime
    disabled_at: datetime | None
    has_password: bool
    oidc_subject: str | None


@dataclass(frozen=True, slots=True)
class Account:
    """A user with what is needed to check who signs in."""

    user: User
    password_hash: str | None
    tenant: Tenant

    @property
    def in_force(self) -> bool:
        return self.user.disabled_at is None and self.tenant.in_force


def check_email(email: str) -> str:
    """The address as it is kept. Raises :class:`InvalidRequestError`."""
    kept = email.strip().lower()
    if not kept.isprintable() or len(kept) > MAX_EMAIL_CHARS or not _EMAIL.fullmatch(kept):
        raise InvalidRequestError(f"email: {email[:64]!r} is no e-mail address", param="email")
    return kept


def public_id() -> str:
    """A fresh one, of the kind that keys have: usage rows name either."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(_PUBLIC_CHARS))


async def add_user(db: Database, tenant: str, email: str, role: Role, *, actor: Actor = SYSTEM) -> User:
    """A user without a password: a link sets it, or another service signs the person in.

    An address that is taken tells that somebody has an account here, so operators see in the audit log who was told.
    Raises :class:`InvalidRequestError` (email, role), :class:`NotFoundError`, :class:`ConflictError` (email, tenant),
    :class:`PermissionDeniedError` if the role exceeds the actor's.
    """
    kept = check_email(email)
    check_role(actor, role)
    try:
        async with db.write() as session:
            owner = await tenant_row(session, tenant)
            if owner.disabled_at is not None:
                raise ConflictError(f"tenant: {tenant!r} is disabled", param="tenant")
            await _check_room(session, owner)
            row = new_user(session, owner, kept, role, actor)
            await session.flush()
    except IntegrityError:
        async with db.write() as session:
            audit(session, actor, "user.address_taken", Target("user", kept, None))
        raise ConflictError(f"email: {kept!r} belongs to a user already", param="email") from None
    return to_user(row, owner.name)


async def _check_room(session: AsyncSession, owner: TenantRow) -> None:
    """Raises :class:`ConflictError`."""
    count = await session.scalar(select(func.count()).where(UserRow.tenant_id == owner.id))
    if (count or 0) >= MAX_USERS:
        raise ConflictError(f"tenant: {owner.name!r} has {MAX_USERS} users already", param="tenant")


def new_user(session: AsyncSession, owner: TenantRow, email: str, role: Role, actor: Actor) -> UserRow:
    """Add the row within a transaction that is under way. ``email`` has been checked."""
    row = UserRow(public_id=public_id(), tenant_id=owner.id, email=email, role=role.value, created_at=datetime.now(UTC))
    session.add(row)
    audit(session, actor, "user.create", _target(row), after=_facts(row))
    return row


def check_role(actor: Actor, role: Role) -> None:
    """Raises :class:`InvalidRequestError` for a role that no person has, :class:`PermissionDeniedError`."""
    if role is Role.CALLER:
        raise InvalidRequestError("role: a user is 'operator', 'admin' or 'viewer'", param="role")
    check_grant(actor, role, EVERYTHING)


async def any_user(db: Database) -> bool:
    """Whether anybody has been added yet."""
    async with db.read() as session:
        return await session.scalar(select(UserRow.public_id).limit(1)) is not None


async def find_account(db: Database, *, email: str = "", oidc_subject: str = "") -> Account | None:
    """The user with this address or subject, in whatever state."""
    kept = email.strip().lower()
    condition = UserRow.oidc_subject == oidc_subject if oidc_subject else UserRow.email == kept
    async with db.read() as session:
        found = (await session.execute(_with_tenant().where(condition))).one_or_none()
    if found is None:
        return None
    row, tenant = found
    return Account(to_user(row, tenant.name), row.password_hash, to_tenant(tenant))


async def list_users(
    db: Database, tenant: str | None = None, *, actor: Actor = SYSTEM, after: str = "", limit: int | None = None
) -> tuple[User, ...]:
    """Users by address; of one tenant, or of all that the actor may know of. Raises :class:`NotFoundError`."""
    async with db.read() as session:
        query = _visible(actor).where(UserRow.email > after)
        if tenant is not None:
            query = query.where(UserRow.tenant_id == (await tenant_row(session, tenant)).id)
        rows = await session.execute(query.order_by(UserRow.email).limit(limit))
        return tuple(to_user(row, owner.name) for row, owner in rows)


async def get_user(db: Database, user_id: str, tenant: str | None = None, *, actor: Actor = SYSTEM) -> User:
    """Raises :class:`NotFoundError`."""
    async with db.read() as session:
        row, owner = await _visible_row(session, user_id, tenant, actor)
        return to_user(row, owner.name)


async def change_role(
    db: Database, user_id: str, role: Role, tenant: str | None = None, *, actor: Actor = SYSTEM
) -> User:
    """Whoever becomes an operator needs a link for a new password, which then only operators can make.

    Raises :class:`NotFoundError`, :class:`InvalidRequestError`, :class:`PermissionDeniedError`.
    """
    check_role(actor, role)

    async def apply(session: AsyncSession, row: UserRow) -> None:
        if row.role != role.value:
            if role is Role.OPERATOR:  # others could make links for this account, and may know the password
                row.password_hash = None
            row.role = role.value
            await end_access(session, row.public_id)  # whoever holds a link of theirs must not come by the new role

    return await _update(db, user_id, tenant, actor, "user.role", apply)


async def disable_user(db: Database, user_id: str, tenant: str | None = None, *, actor: Actor = SYSTEM) -> User:
    """Refuse a user from now on, on every gateway within a second. Raises :class:`NotFoundError`."""

    async def apply(session: AsyncSession, row: UserRow) -> None:
        row.disabled_at = row.disabled_at or datetime.now(UTC)
        await end_access(session, row.public_id)

    return await _update(db, user_id, tenant, actor, "user.disable", apply)


async def enable_user(db: Database, user_id: str, tenant: str | None = None, *, actor: Actor = SYSTEM) -> User:
    """Raises :class:`NotFoundError`."""

    async def apply(_session: AsyncSession, row: UserRow) -> None:
        row.disabled_at = None

    return await _update(db, user_id, tenant, actor, "user.enable", apply)


async def set_password(
    db: Database, user_id: str, password_hash: str, *, keep_session: str = "", actor: Actor = SYSTEM
) -> None:
    """A new password; ends all sessions but ``keep_session``. Raises :class:`NotFoundError`."""
    async with db.write() as session:
        row, _ = await _visible_row(session, user_id, None, SYSTEM, lock=True)
        await replace_password(session, row, password_hash, actor, keep_session=keep_session)


async def replace_password(
    session: AsyncSession, row: UserRow, password_hash: str, actor: Actor, *, keep_session: str = ""
) -> None:
    """As :func:`set_password`, within a transaction that is under way; links that lie about end too."""
    row.password_hash = password_hash
    await end_access(session, row.public_id, keep_session=keep_session)
    audit(session, actor, "user.password", _target(row), after={"email": row.email})


async def rehash_password(db: Database, user_id: str, old_hash: str, new_hash: str) -> None:
    """Keep the same password by newer parameters, unless it has changed meanwhile. No change that anybody sees."""
    async with db.write() as session:
        row = await session.get(UserRow, user_id, with_for_update=True)
        if row is not None and row.password_hash == old_hash:
            row.password_hash = new_hash


async def bind_subject(db: Database, user_id: str, oidc_subject: str, *, actor: Actor = SYSTEM) -> None:
    """Remember whom the identity provider means, from the first sign-in on.

    Until then nobody had shown that the address is theirs: whoever sent the invitation may have used it. So what was
    set by links ends, but not what operators set for operators. Raises :class:`NotFoundError`.
    """
    async with db.write() as session:
        row, _ = await _visible_row(session, user_id, None, SYSTEM, lock=True)
        before = _facts(row)
        row.oidc_subject = oidc_subject
        if row.role != Role.OPERATOR.value:
            row.password_hash = None
            await end_access(session, row.public_id)
        audit(session, actor, "user.bind", _target(row), before, _facts(row))


async def end_sessions(session: AsyncSession, user_id: str, *, keep_session: str = "") -> None:
    """Within a transaction that is under way."""
    ended = delete(SessionRow).where(SessionRow.user_id == user_id, SessionRow.public_id != keep_session)
    await session.execute(ended)


async def end_access(session: AsyncSession, user_id: str, *, keep_session: str = "") -> None:
    """Remove a user's sessions and links."""
    await end_sessions(session, user_id, keep_session=keep_session)
    await session.execute(delete(OneTimeLinkRow).where(OneTimeLinkRow.user_id == user_id))


def user_target(user: User) -> Target:
    return Target("user", user.public_id, user.tenant_id)


def to_user(row: UserRow, tenant: str) -> User:
    return User(
        public_id=row.public_id,
        email=row.email,
        tenant=tenant,
        tenant_id=row.tenant_id,
        role=Role(row.role),
        created_at=row.created_at,
        disabled_at=row.disabled_at,
        has_password=row.password_hash is not None,
        oidc_subject=row.oidc_subject,
    )


async def _update(
    db: Database,
    user_id: str,
    tenant: str | None,
    actor: Actor,
    action: str,
    apply: Callable[[AsyncSession, UserRow], Awaitable[None]],
) -> User:
    async with db.write() as session:
        row, owner = await _visible_row(session, user_id, tenant, actor, lock=True)
        check_grant(actor, Role(row.role), EVERYTHING)
        before = _facts(row)
        await apply(session, row)
        audit(session, actor, action, _target(row), before, _facts(row))
    return to_user(row, owner.name)


async def _visible_row(
    session: AsyncSession, user_id: str, tenant: str | None, actor: Actor, *, lock: bool = False
) -> tuple[UserRow, TenantRow]:
    query = _visible(actor).where(UserRow.public_id == user_id)
    if tenant is not None:
        query = query.where(TenantRow.name == tenant)
    if lock:
        query = query.with_for_update(of=UserRow)
    found = (await session.execute(query)).one_or_none() if user_id.isalnum() else None
    if found is None:
        raise NotFoundError(f"user: {user_id[:64]!r} does not exist", param="user")
    row, owner = found
    return row, owner


def _visible(actor: Actor) -> Select[UserRow, TenantRow]:
    query = _with_tenant().where(TenantRow.deleted_at.is_(None))
    if actor.role is not Role.OPERATOR:
        query = query.where(UserRow.tenant_id == actor.tenant_id, UserRow.role != Role.OPERATOR.value)
    return query


def _with_tenant() -> Select[UserRow, TenantRow]:
    return select(UserRow, TenantRow).join(TenantRow, UserRow.tenant_id == TenantRow.id)


def _target(row: UserRow) -> Target:
    return Target("user", row.public_id, row.tenant_id)


def _facts(row: UserRow) -> dict[str, Any]:
    """What an audit entry shows of a user."""
    return {field: getattr(row, field) for field in ("email", "role", "disabled_at", "oidc_subject")}
