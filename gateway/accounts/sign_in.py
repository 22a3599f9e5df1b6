"""Signing in with a password: attempts are limited over all gateways, and a refusal does not tell why.

An account takes :data:`ACCOUNT_ATTEMPTS` in :data:`WINDOW` from anywhere, and an address :data:`ADDRESS_ATTEMPTS` for
any accounts. They are counted before the password is looked at, so that attempts at the same moment count too, and
given back when it is right.
"""

from __future__ import annotations

import hashlib
import ipaddress
from datetime import UTC, datetime, timedelta

from stencilpress.gateway.access import Actor, Role
from stencilpress.gateway.accounts.passwords import MAX_CHARS, Passwords
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.sessions import count_attempt, forgive_attempts, note_refused
from stencilpress.gateway.catalog.users import User, find_account, rehash_password
from stencilpress.gateway.errors import ApiError, InvalidRequestError, RateLimitError

ACCOUNT_ATTEMPTS = 10
ADDRESS_ATTEMPTS = 50
WINDOW = timedelta(minutes=15)
IPV6_BITS = 64
"""What one household or server has for itself."""
REFUSAL = "The e-mail address or the password is not right."


class SignInError(ApiError):
    """The same for an unknown address, a wrong password, and a user or tenant that is disabled."""

    status = 422
    type = "invalid_request_error"
    code = "sign_in_refused"

    def __init__(self) -> None:
        super().__init__(REFUSAL)


async def sign_in(db: Database, passwords: Passwords, email: str, password: str, address: str) -> User:
    """The user of an address and password.

    Raises :class:`SignInError`, :class:`RateLimitError`, :class:`OverloadedError`, :class:`UnavailableError`.
    """
    account_subject, address_subject = (
        _subject("account", email.strip().lower()),
        _subject("address", _network(address)),
    )
    await _admit(db, address_subject, ADDRESS_ATTEMPTS, email, address)
    await _admit(db, account_subject, ACCOUNT_ATTEMPTS, email, address)
    account = await find_account(db, email=email)
    usable = account.password_hash if account is not None and account.in_force else None
    if not await passwords.verify(usable, password[: MAX_CHARS + 1]) or account is None or usable is None:
        raise SignInError
    await forgive_attempts(db, account_subject, address_subject)
    if passwords.is_outdated(usable):
        await rehash_password(db, account.user.public_id, usable, await passwords.hash(password))
    return account.user


async def confirm_password(db: Database, passwords: Passwords, user: User, password: str, address: str) -> None:
    """That it is the user who sits there. Counts as an attempt to sign in.

    Raises :class:`InvalidRequestError` for another password, and otherwise as :func:`sign_in`.
    """
    try:
        await sign_in(db, passwords, user.email, password, address)
    except SignInError:
        raise InvalidRequestError("current: is not your password", param="current") from None


async def admit_identity(db: Database, address: str) -> None:
    """Count an attempt to sign in by what an identity provider says: it is asked for each, so nobody may have it asked
    without end. Raises :class:`RateLimitError`, :class:`UnavailableError`."""
    await _admit(db, _subject("address", _network(address)), ADDRESS_ATTEMPTS, "", address)


async def forgive_identity(db: Database, address: str, email: str) -> None:
    """Give an attempt back that was right, as :func:`sign_in` does."""
    await forgive_attempts(db, _subject("account", email), _subject("address", _network(address)))


async def _admit(db: Database, subject: bytes, limit: int, email: str, address: str) -> None:
    count, until = await count_attempt(db, subject, WINDOW)
    if count <= limit:
        return
    if count == limit + 1:  # once in a window, so that the log cannot be flooded
        account = await find_account(db, email=email)
        actor = Actor("anonymous", Role.VIEWER, source=address)
        await note_refused(db, account.user if account else None, email[:254], actor=actor)
    wait_ms = max(1000, int((until - datetime.now(UTC)).total_seconds() * 1000))
    raise RateLimitError(
        f"Too many attempts to sign in; try again in {-(-wait_ms // 60_000)} minutes.",
        dimension="sign_in_attempts",
        retry_ms=wait_ms,
    )


def _subject(kind: str, name: str) -> bytes:
    return hashlib.sha256(f"{kind}\n{name}".encode()).digest()


def _network(address: str) -> str:
    """The address, or of an IPv6 address its network: who has one has 2^64."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(parsed), IPV6_BITS), strict=False).network_address)
    return str(parsed)
