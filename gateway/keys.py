"""API keys: their form, how they are kept, and who is asking.

A key is ``sp_<public id>_<secret>``: the public id finds the row and may be logged; the secret is 256 random
bits, shown once. Only SHA-256 of both is kept. A slow or salted hash protects secrets that people choose,
because those can be guessed; nobody can search 2^256 values, so it would only make every request slow.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from weakref import WeakValueDictionary

from stencilpress.gateway.access import (
    ADMIN_PREFIX,
    EVERYTHING,
    SYSTEM,
    Actor,
    Permission,
    Role,
    Scopes,
    check_permission,
    check_scopes,
)
from stencilpress.gateway.catalog import credentials
from stencilpress.gateway.catalog.credentials import Credential, find_credential, insert_key, rotate_secret
from stencilpress.gateway.catalog.records import Key, TenantLimits
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.changes import CatalogCache, Changes
from stencilpress.gateway.errors import (
    AuthenticationError,
    InvalidRequestError,
    ModelNotFoundError,
    PastExpiryError,
    PermissionDeniedError,
)

CACHE_ENTRIES = 50_000
MAX_LABEL_CHARS = 100
MAX_OVERLAP = timedelta(days=30)

_ALPHABET = string.ascii_letters + string.digits
_PUBLIC_CHARS = 12
_SECRET_CHARS = 43  # 62^43 > 2^256
_TOKEN = re.compile(rf"sp_([a-z0-9]{{{_PUBLIC_CHARS}}})_([A-Za-z0-9]{{{_SECRET_CHARS}}})")
_NO_HASH = bytes(32)


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key. ``token`` exists here and nowhere else."""

    key: Key
    token: str


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking. ``tenant_id``, ``limits.weight`` and ``salt`` go to the engine; the rest stays here."""

    tenant_id: int
    tenant: str
    key_id: str
    limits: TenantLimits
    salt: bytes
    role: Role = Role.CALLER
    scopes: Scopes = EVERYTHING


async def issue_key(
    db: Database,
    tenant: str,
    label: str = "",
    expires_at: datetime | None = None,
    *,
    role: Role = Role.CALLER,
    scopes: Scopes = EVERYTHING,
    actor: Actor = SYSTEM,
) -> IssuedKey:
    """Make a key for a tenant; ``expires_at`` is aware.

    Raises :class:`InvalidRequestError` (label, scopes), :class:`PastExpiryError`, :class:`NotFoundError`,
    :class:`ConflictError` (tenant disabled), :class:`PermissionDeniedError` if it would exceed the actor's.
    """
    scopes = check_scopes(scopes.models, scopes.routes)
    _check_expiry(expires_at)
    public_id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(_PUBLIC_CHARS))
    secret = _new_secret()
    key = Key(public_id, tenant, _checked_label(label), secret[-4:], datetime.now(UTC), expires_at, None, role, scopes)
    await insert_key(db, key, _hash(public_id, secret), actor=actor)
    return IssuedKey(key, f"sp_{public_id}_{secret}")


async def rotate_key(
    db: Database, public_id: str, overlap: timedelta, tenant: str | None = None, *, actor: Actor = SYSTEM
) -> IssuedKey:
    """Give a key a new secret; both are taken for ``overlap``. Its id, role and scopes stay.

    Raises :class:`InvalidRequestError` (overlap), :class:`NotFoundError`, :class:`ConflictError` (revoked).
    """
    if not timedelta() <= overlap <= MAX_OVERLAP:
        text = f"must be between 0 and {int(MAX_OVERLAP.total_seconds())} seconds, got {int(overlap.total_seconds())}"
        raise InvalidRequestError(f"overlap_s: {text}", param="overlap_s")
    secret = _new_secret()
    until = datetime.now(UTC) + overlap
    key = await rotate_secret(db, public_id, _hash(public_id, secret), secret[-4:], until, tenant, actor=actor)
    return IssuedKey(key, f"sp_{public_id}_{secret}")


async def change_key(
    db: Database, public_id: str, changes: Mapping[str, Any], tenant: str | None = None, *, actor: Actor = SYSTEM
) -> Key:
    """Change ``label``, ``expires_at``, ``models`` or ``routes`` of a key; what is not in ``changes`` stays.

    Raises :class:`InvalidRequestError` (label, scopes), :class:`PastExpiryError`, :class:`NotFoundError`,
    :class:`PermissionDeniedError` if it would exceed the actor's.
    """
    _check_expiry(changes.get("expires_at"))

    def apply(key: Key) -> Key:
        scopes = check_scopes(changes.get("models", key.scopes.models), changes.get("routes", key.scopes.routes))
        label = _checked_label(changes.get("label", key.label))
        return replace(key, label=label, expires_at=changes.get("expires_at", key.expires_at), scopes=scopes)

    return await credentials.change_key(db, public_id, apply, tenant, actor=actor)


def check_route(principal: Principal, path: str) -> None:
    """Whether the key may use a route at all, by its role and scopes. Raises :class:`PermissionDeniedError`."""
    if not path.startswith(ADMIN_PREFIX):
        check_permission(principal.role, Permission.CALL)
    if not principal.scopes.allows_route(path):
        raise PermissionDeniedError("This key is confined to other routes.")


def check_model(principal: Principal, model: str, adapter: str) -> None:
    """Whether the key's scopes allow what ``model`` resolved to, "" for the base.

    Raises :class:`ModelNotFoundError`, so that a key learns nothing of what it is kept from.
    """
    if not principal.scopes.allows_model(adapter):
        raise ModelNotFoundError(model)


class KeyRing:
    """Authenticates tokens, remembering good ones as long as ``changes`` vouches for them: a busy key costs no SQL.

    When the database is away, unknown and forgotten keys fail with ``UnavailableError``: closed, not open.
    """

    def __init__(self, db: Database, changes: Changes) -> None:
        self._db = db
        self._changes = changes
        self._known: CatalogCache[bytes, tuple[Credential, Principal]] = CatalogCache(changes, CACHE_ENTRIES)
        self._looking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def authenticate(self, token: str) -> Principal:
        """Raises :class:`AuthenticationError`, the same for every reason, or :class:`UnavailableError`."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise _refusal()
        digest = _hash(match[1], match[2])
        known = self._known.get(digest)
        if known is None:
            async with self._looking.setdefault(digest, asyncio.Lock()):  # one query for a burst of requests
                known = self._known.get(digest) or await self._look_up(match[1], digest)
        credential, principal = known
        if not _in_force(credential, digest):
            raise _refusal()
        return principal

    async def _look_up(self, public_id: str, digest: bytes) -> tuple[Credential, Principal]:
        seen = self._changes.seen
        credential = await find_credential(self._db, public_id)
        if not _opens(digest, credential) or credential is None:
            raise _refusal()
        known = credential, _principal(credential)
        self._known.put(digest, credential.tenant.id, seen, known)
        return known


def _refusal() -> AuthenticationError:
    return AuthenticationError("Incorrect API key provided.")


def _opens(digest: bytes, credential: Credential | None) -> bool:
    """Whether the digest is that of the secret or of the one before; always two comparisons."""
    current = _NO_HASH if credential is None else credential.secret_hash
    previous = _NO_HASH if credential is None or credential.previous_hash is None else credential.previous_hash
    return hmac.compare_digest(current, digest) | hmac.compare_digest(previous, digest)


def _in_force(credential: Credential, digest: bytes) -> bool:
    key, now = credential.key, datetime.now(UTC)
    until = key.expires_at
    if digest != credential.secret_hash and key.previous_expires_at is not None:
        until = min(key.previous_expires_at, until or key.previous_expires_at)
    return (until is None or until > now) and key.revoked_at is None and credential.tenant.in_force


def _principal(credential: Credential) -> Principal:
    tenant, key = credential.tenant, credential.key
    return Principal(tenant.id, tenant.name, key.public_id, tenant.limits, tenant.prefix_salt, key.role, key.scopes)


def _new_secret() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_CHARS))


def _check_expiry(expires_at: datetime | None) -> None:
    """A key is ended by revoking it, which says so."""
    now = datetime.now(UTC)
    if expires_at is not None and expires_at <= now:
        given, limit = (one.astimezone(UTC).isoformat(timespec="seconds") for one in (expires_at, now))
        text = f"{given} has passed; it must be later than {limit}"
        raise PastExpiryError(f"expires_at: {text}", param="expires_at")


def _checked_label(label: str) -> str:
    if len(label) > MAX_LABEL_CHARS:
        raise InvalidRequestError(f"label: {len(label)} characters are more than {MAX_LABEL_CHARS}", param="label")
    if not label.isprintable():
        raise InvalidRequestError("label: control characters are not allowed", param="label")
    return label


def _hash(public_id: str, secret: str) -> bytes:
    """Bound to the public id, so that a hash copied to another row opens nothing."""
    return hashlib.sha256(f"{public_id}_{secret}".encode()).digest()
