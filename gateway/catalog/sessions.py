"""Rows of sessions, of links that work once, and of attempts to sign in. Tokens are kept as SHA-256 alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from stencilpress.gateway.access import SYSTEM, Actor, Role
from stencilpress.gateway.catalog.account_models import AttemptRow, OneTimeLinkRow, SessionRow, UserRow
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.records import Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import tenant_row, to_tenant
from stencilpress.gateway.catalog.users import (
    User,
    check_email,
    new_user,
    replace_password,
    to_user,
    user_target,
)
from stencilpress.gateway.errors import ConflictError, NotFoundError

MAX_SESSIONS = 20
"""Of one user; the one that has rested longest makes room."""
LINK_GONE = "The link has been used, has expired, or never existed."


@dataclass(frozen=True, slots=True)
class Session:
    """A signed-in browser."""

    public_id: str
    created_at: datetime
    last_seen_at: datetime
    expires_at: datetime
    address: str
    user_agent: str


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A session with whose it is."""

    session: Session
    user: User
    tenant: Tenant

    @property
    def in_force(self) -> bool:
        return self.user.disabled_at is None and self.tenant.in_force


@dataclass(frozen=True, slots=True)
class Link:
    """A link that sets a password. ``email`` is "" for the one that makes the first user."""

    kind: str
    email: str
    tenant: str
    expires_at: datetime


async def start_session(
    db: Database, user: User, session: Session, token_hash: bytes, idle: timedelta, *, actor: Actor
) -> None:
    """Add a session; those of the user that are over go."""
    async with db.write() as transaction:
        over = or_(SessionRow.expires_at <= session.created_at, SessionRow.last_seen_at <= session.created_at - idle)
        await transaction.execute(delete(SessionRow).where(SessionRow.user_id == user.public_id, over))
        newest = (
            select(SessionRow.public_id)
            .where(SessionRow.user_id == user.public_id)
            .order_by(SessionRow.last_seen_at.desc())
            .limit(MAX_SESSIONS - 1)
        )
        rest = delete(SessionRow).where(SessionRow.user_id == user.public_id, SessionRow.public_id.not_in(newest))
        await transaction.execute(rest)
        transaction.add(
            SessionRow(
                public_id=session.public_id,
                token_hash=token_hash,
                user_id=user.public_id,
                created_at=session.created_at,
                last_seen_at=session.last_seen_at,
                expires_at=session.expires_at,
                address=session.address,
                user_agent=session.user_agent,
            )
        )
        audit(transaction, actor, "user.sign_in", user_target(user), after={"email": user.email})


async def find_session(db: Database, token_hash: bytes) -> SignedIn | None:
    """The session of a token, in whatever state."""
    query = (
        select(SessionRow, UserRow, TenantRow)
        .join(UserRow, SessionRow.user_id == UserRow.public_id)
        .join(TenantRow, UserRow.tenant_id == TenantRow.id)
        .where(SessionRow.token_hash == token_hash)
    )
    async with db.read() as session:
        found = (await session.execute(query)).one_or_none()
    if found is None:
        return None
    row, user, tenant = found
    return SignedIn(_to_session(row), to_user(user, tenant.name), to_tenant(tenant))


async def see_session(db: Database, session_id: str, at: datetime) -> None:
    """Note that a session is in use. No change of the catalog: nothing is forgotten for it."""
    async with db.write() as session:
        await session.execute(update(SessionRow).where(SessionRow.public_id == session_id).values(last_seen_at=at))


async def list_sessions(db: Database, user_id: str) -> tuple[Session, ...]:
    """A user's sessions, the latest used first."""
    query = select(SessionRow).where(SessionRow.user_id == user_id).order_by(SessionRow.last_seen_at.desc())
    async with db.read() as session:
        return tuple(_to_session(row) for row in await session.scalars(query))


async def end_session(db: Database, user: User, session_id: str, *, actor: Actor) -> None:
    """End one of a user's sessions, on every gateway within a second. Raises :class:`NotFoundError`."""
    condition = (SessionRow.user_id == user.public_id, SessionRow.public_id == session_id)
    async with db.write() as session:
        gone = await session.scalar(delete(SessionRow).where(*condition).returning(SessionRow.public_id))
        if gone is None:
            raise NotFoundError("session: does not exist", param="session")
        audit(session, actor, "user.sign_out", user_target(user), after={"email": user.email})


async def end_other_sessions(db: Database, user: User, session_id: str, *, actor: Actor) -> None:
    """End all of a user's sessions but one."""
    others = delete(SessionRow).where(SessionRow.user_id == user.public_id, SessionRow.public_id != session_id)
    async with db.write() as session:
        await session.execute(others)
        audit(session, actor, "user.sign_out_others", user_target(user), after={"email": user.email})


async def add_link(
    db: Database, kind: str, tenant: str, user: User | None, token_hash: bytes, lasts: timedelta, *, actor: Actor
) -> None:
    """Add a link; the user's earlier ones end. Of the first user's link the earlier ones stay."""
    now = datetime.now(UTC)
    async with db.write() as session:
        owner = await tenant_row(session, tenant)
        await session.execute(delete(OneTimeLinkRow).where(OneTimeLinkRow.expires_at <= now))
        if user is not None:
            await session.execute(delete(OneTimeLinkRow).where(OneTimeLinkRow.user_id == user.public_id))
        row = OneTimeLinkRow(token_hash=token_hash, kind=kind, tenant_id=owner.id, created_at=now)
        row.user_id, row.expires_at = (user.public_id if user else None), now + lasts
        session.add(row)
        target = user_target(user) if user else Target("tenant", owner.name, owner.id)
        audit(session, actor, f"user.{kind}_link", target, after={"email": user.email if user else None})


async def find_link(db: Database, token_hash: bytes) -> Link:
    """Raises :class:`NotFoundError`."""
    query = (
        select(OneTimeLinkRow, TenantRow, UserRow)
        .join(TenantRow, OneTimeLinkRow.tenant_id == TenantRow.id)
        .outerjoin(UserRow, OneTimeLinkRow.user_id == UserRow.public_id)
        .where(OneTimeLinkRow.token_hash == token_hash)
    )
    async with db.read() as session:
        found = (await session.execute(query)).one_or_none()
    if found is None or found[0].expires_at <= datetime.now(UTC):
        raise NotFoundError(LINK_GONE, param="link")
    row, tenant, user = found
    return Link(row.kind, "" if user is None else user.email, tenant.name, row.expires_at)


async def redeem_link(
    db: Database, token_hash: bytes, password_hash: str, email: str = "", *, actor: Actor = SYSTEM
) -> None:
    """Use up a link and set the password, of its user or of the first one, who then has the address ``email``.

    Raises :class:`NotFoundError` if it is gone, :class:`ConflictError` if others are there by now, and
    :class:`InvalidRequestError` for the address.
    """
    try:
        async with db.write() as session:
            link = await session.get(OneTimeLinkRow, token_hash, with_for_update=True)
            if link is None or link.expires_at <= datetime.now(UTC):
                raise NotFoundError(LINK_GONE, param="link")
            tenant = await session.get_one(TenantRow, link.tenant_id)
            user = None if link.user_id is None else await session.get(UserRow, link.user_id, with_for_update=True)
            await session.delete(link)
            if user is None:
                if await session.scalar(select(UserRow.public_id).limit(1)) is not None:
                    raise ConflictError("The first user has been made already: sign in, or ask for an invitation.")
                await session.execute(delete(OneTimeLinkRow).where(OneTimeLinkRow.kind == "setup"))
                user = new_user(session, tenant, check_email(email), Role.OPERATOR, actor)
                await session.flush()
            await replace_password(session, user, password_hash, actor)
    except IntegrityError:
        raise ConflictError(f"email: {email[:64]!r} belongs to a user already", param="email") from None


async def count_attempt(db: Database, subject: bytes, window: timedelta) -> tuple[int, datetime]:
    """Count one more attempt of a subject; how many there are in its window, and when that ends."""
    now = datetime.now(UTC)
    async with db.write() as session:
        await session.execute(delete(AttemptRow).where(AttemptRow.window_ends_at <= now))
        insert = postgresql.insert if db.is_postgresql else sqlite.insert
        new = insert(AttemptRow).values(subject=subject, window_ends_at=now + window, count=1)
        counted = new.on_conflict_do_update(index_elements=["subject"], set_={"count": AttemptRow.count + 1})
        found = (await session.execute(counted.returning(AttemptRow.count, AttemptRow.window_ends_at))).one()
    return found[0], found[1]


async def forgive_attempts(db: Database, account: bytes, address: bytes) -> None:
    """An account that has shown who it is: its attempts are forgotten, and the address has the last one back."""
    async with db.write() as session:
        await session.execute(delete(AttemptRow).where(AttemptRow.subject == account))
        given_back = update(AttemptRow).where(AttemptRow.subject == address, AttemptRow.count > 0)
        await session.execute(given_back.values(count=AttemptRow.count - 1))


async def note_refused(db: Database, user: User | None, email: str, *, actor: Actor) -> None:
    """Tell the audit log that attempts have reached their limit."""
    target = user_target(user) if user else Target("user", email, None)
    async with db.write() as session:
        audit(session, actor, "user.attempts_refused", target, after={"email": email})


def _to_session(row: SessionRow) -> Session:
    return Session(row.public_id, row.created_at, row.last_seen_at, row.expires_at, row.address, row.user_agent)
