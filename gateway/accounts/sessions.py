"""Who a session's token belongs to, remembered as keys are: a page costs no SQL while nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from stencilpress.gateway.access import Actor
from stencilpress.gateway.accounts.tokens import hash_token, is_token, new_token
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.sessions import Session, SignedIn, find_session, see_session, start_session
from stencilpress.gateway.catalog.users import User, public_id
from stencilpress.gateway.changes import CatalogCache, Changes
from stencilpress.gateway.errors import UnavailableError

CACHE_ENTRIES = 10_000
SEEN_EVERY = timedelta(minutes=1)
"""How exactly a session's last use is known, unless it may not rest for much longer."""


class SessionRing:
    """Starts and finds sessions. A change of the user or tenant, or the end of a session, holds within a second."""

    def __init__(
        self,
        db: Database,
        changes: Changes,
        lasts: timedelta,
        idle: timedelta,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """A session ends ``lasts`` after its start, and earlier when it has not been used for ``idle``."""
        self._db = db
        self._changes = changes
        self._lasts = lasts
        self._idle = idle
        self._seen_every = min(SEEN_EVERY, idle / 4)
        self._clock = clock
        self._known: CatalogCache[bytes, SignedIn] = CatalogCache(changes, CACHE_ENTRIES)

    async def start(self, user: User, address: str, user_agent: str, *, actor: Actor) -> str:
        """The token of a new session. Raises :class:`UnavailableError`."""
        token, now = new_token(), self._clock()
        session = Session(public_id(), now, now, now + self._lasts, address[:100], user_agent[:200])
        await start_session(self._db, user, session, hash_token(token), self._idle, actor=actor)
        return token

    async def find(self, token: str) -> SignedIn | None:
        """Whose session it is, if it is in force. Raises :class:`UnavailableError`."""
        if not is_token(token):
            return None
        digest, now = hash_token(token), self._clock()
        known = self._known.get(digest)
        if known is None or not self._is_open(known.session, now):  # another gateway may have seen it meanwhile
            known = await self._look_up(digest)
        if known is None or not known.in_force or not self._is_open(known.session, now):
            return None
        if now - known.session.last_seen_at >= self._seen_every:
            await self._see(digest, known, now)
        return known

    async def _look_up(self, digest: bytes) -> SignedIn | None:
        seen = self._changes.seen
        found = await find_session(self._db, digest)
        if found is not None:
            self._known.put(digest, found.tenant.id, seen, found)
        return found

    async def _see(self, digest: bytes, known: SignedIn, now: datetime) -> None:
        seen = self._changes.seen
        with suppress(UnavailableError):  # noted the next time
            await see_session(self._db, known.session.public_id, now)
        if self._known.get(digest) is known:
            fresh = replace(known, session=replace(known.session, last_seen_at=now))
            self._known.put(digest, known.tenant.id, seen, fresh)

    def _is_open(self, session: Session, now: datetime) -> bool:
        return now < session.expires_at and now - session.last_seen_at < self._idle
