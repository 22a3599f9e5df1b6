"""Links that work once: for the first user, for an invitation, for a new password. Each is shown once."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from stencilpress.gateway.access import SYSTEM, Actor, Role
from stencilpress.gateway.accounts.passwords import Passwords, check_password
from stencilpress.gateway.accounts.tokens import hash_token, is_token, new_token
from stencilpress.gateway.catalog import sessions
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.sessions import LINK_GONE, Link, add_link, redeem_link
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.catalog.users import User, add_user, any_user, get_user
from stencilpress.gateway.errors import ConflictError, NotFoundError

SETUP_LASTS = timedelta(days=1)
INVITATION_LASTS = timedelta(days=7)
RESET_LASTS = timedelta(days=1)
START_PATH = "/console/"
SETUP_PATH = "/console/setup/"
OPERATORS = "operators"
"""The tenant of the first operator where there is no demo."""


async def setup_link(db: Database, tenant: str, *, actor: Actor = SYSTEM) -> str:
    """The path of a link that makes the first user, an operator of a tenant. Raises :class:`NotFoundError`."""
    return await _add(db, "setup", tenant, None, SETUP_LASTS, actor)


async def first_path(db: Database, tenant: str | None) -> str:
    """Where people begin: while there is no user a link that makes the first one, else the console itself.

    The first user is an operator of ``tenant``, or with None of a tenant :data:`OPERATORS`, made for it.
    """
    if await any_user(db):
        return START_PATH
    if tenant is None:
        with suppress(ConflictError):  # it is there already
            await create_tenant(db, OPERATORS)
    try:
        return await setup_link(db, tenant or OPERATORS)
    except NotFoundError:  # it has been deleted: `stencilpress user add` makes the first user
        return START_PATH


async def invite(db: Database, tenant: str, email: str, role: Role, *, actor: Actor = SYSTEM) -> tuple[User, str]:
    """A new user and the path of the link that sets its password. Raises as ``add_user`` does."""
    user = await add_user(db, tenant, email, role, actor=actor)
    return user, await _add(db, "invitation", user.tenant, user, INVITATION_LASTS, actor)


async def reset_link(
    db: Database, user_id: str, tenant: str | None = None, *, actor: Actor = SYSTEM
) -> tuple[User, str]:
    """A user and the path of a link that sets a new password; the old one works until then.

    Raises :class:`NotFoundError`.
    """
    user = await get_user(db, user_id, tenant, actor=actor)
    return user, await _add(db, "reset", user.tenant, user, RESET_LASTS, actor)


async def find_link(db: Database, token: str) -> Link:
    """Raises :class:`NotFoundError`."""
    return await sessions.find_link(db, _hash(token))


async def use_link(db: Database, passwords: Passwords, token: str, password: str, email: str, *, source: str) -> str:
    """Use up a link and set the password; returns the user's address. ``email`` is the first user's, else unused.

    Raises :class:`NotFoundError`, :class:`InvalidRequestError` (password, email), :class:`ConflictError`.
    """
    link = await find_link(db, token)
    address = link.email or email
    kept = await passwords.hash(check_password(password, address))
    actor = Actor(f"user:{address}", Role.OPERATOR if not link.email else Role.VIEWER, source=source)
    await redeem_link(db, _hash(token), kept, address, actor=actor)
    return address


async def _add(db: Database, kind: str, tenant: str, user: User | None, lasts: timedelta, actor: Actor) -> str:
    token = new_token()
    await add_link(db, kind, tenant, user, hash_token(token), lasts, actor=actor)
    return SETUP_PATH + token


def _hash(token: str) -> bytes:
    if not is_token(token):
        raise NotFoundError(LINK_GONE, param="link")
    return hash_token(token)
