"""API keys: their form, how they are kept, and who is asking.

A key is ``sp_<public id>_<secret>``: the public id finds the row and may be logged; the secret is 256 random
bits, shown once. Only SHA-256 of both is kept. A slow or salted hash protects secrets that people choose,
because those can be guessed; nobody can search 2^256 values, so it would only make every request slow.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from stencilpress.gateway.cache import AgeingCache
from stencilpress.gateway.catalog.credentials import Credential, find_credential, insert_key
from stencilpress.gateway.catalog.records import Key, TenantLimits
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import AuthenticationError, InvalidRequestError

CACHE_TTL_S = 1.0
"""How long a revoked key may still work in a gateway other than the one that revoked it."""
CACHE_ENTRIES = 10_000
MAX_LABEL_CHARS = 100

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


async def issue_key(db: Database, tenant: str, label: str = "", expires_at: datetime | None = None) -> IssuedKey:
    """Make a key for a tenant; ``expires_at`` is aware.

    Raises :class:`InvalidRequestError` (label), :class:`NotFoundError`, :class:`ConflictError` (tenant disabled).
    """
    if len(label) > MAX_LABEL_CHARS:
        raise InvalidRequestError(f"label: {len(label)} characters are more than {MAX_LABEL_CHARS}", param="label")
    if not label.isprintable():
        raise InvalidRequestError("label: control characters are not allowed", param="label")
    public_id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(_PUBLIC_CHARS))
    secret = "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_CHARS))
    key = Key(public_id, tenant, label, secret[-4:], datetime.now(UTC), expires_at, None)
    await insert_key(db, key, _hash(public_id, secret))
    return IssuedKey(key, f"sp_{public_id}_{secret}")


class KeyRing:
    """Authenticates tokens, remembering good ones for :data:`CACHE_TTL_S` so that a busy key costs no SQL.

    When the database is away, unknown and forgotten keys fail with ``UnavailableError``: closed, not open.
    """

    def __init__(self, db: Database, ttl_s: float = CACHE_TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._known: AgeingCache[bytes, Credential] = AgeingCache(ttl_s, CACHE_ENTRIES, clock)

    async def authenticate(self, token: str) -> Principal:
        """Raises :class:`AuthenticationError`, the same for every reason, or :class:`UnavailableError`."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise _refusal()
        digest = _hash(match[1], match[2])
        credential = self._known.get(digest)
        if credential is None:
            credential = await self._look_up(match[1], digest)
        if not _in_force(credential):
            raise _refusal()
        return _principal(credential)

    async def _look_up(self, public_id: str, digest: bytes) -> Credential:
        credential = await find_credential(self._db, public_id)
        stored = _NO_HASH if credential is None else credential.secret_hash
        if not hmac.compare_digest(stored, digest) or credential is None:
            raise _refusal()
        self._known.put(digest, credential)
        return credential

    def forget(self) -> None:
        """Look everything up again: call it after revoking a key or disabling a tenant."""
        self._known.clear()


def _refusal() -> AuthenticationError:
    return AuthenticationError("Incorrect API key provided.")


def _in_force(credential: Credential) -> bool:
    key = credential.key
    expired = key.expires_at is not None and key.expires_at <= datetime.now(UTC)
    return not expired and key.revoked_at is None and credential.tenant.disabled_at is None


def _principal(credential: Credential) -> Principal:
    tenant = credential.tenant
    return Principal(tenant.id, tenant.name, credential.key.public_id, tenant.limits, tenant.prefix_salt)


def _hash(public_id: str, secret: str) -> bytes:
    """Bound to the public id, so that a hash copied to another row opens nothing."""
    return hashlib.sha256(f"{public_id}_{secret}".encode()).digest()
