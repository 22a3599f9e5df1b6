"""Whether what a gateway remembers of the catalog is still so: one small question a moment instead of one per request.

A background task asks which tenants' stamps have moved (``catalog/stamps.py``). What was read before a tenant's last
change is not used again, and nothing is while the last answer is older than :data:`STALE_S`: a revocation holds on
every gateway within that time, and while the catalog is away nobody is served from memory for longer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from stencilpress.gateway.cache import BoundedCache
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.stamps import COUNTER, RETIRED, read_stamps
from stencilpress.gateway.errors import UnavailableError

POLL_S = 0.4
STALE_S = 1.0
"""From a change to the moment when no gateway acts on what was before it."""

LAST_ANSWER_S = 0.5
"""How long the end waits for a question that is still open."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

logger = logging.getLogger(__name__)


class Changes:
    """Follows the stamps. Until the first :meth:`poll` nothing counts as current."""

    def __init__(self, db: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._clock = clock
        self._asked_at = float("-inf")
        self._changed: dict[int, int] = {}
        self.seen = 0
        """The highest stamp so far."""
        self.retired = 0
        """The stamp of the last change that took something out of use, whoever's."""

    async def poll(self) -> None:
        """Ask once. Raises :class:`UnavailableError`."""
        asked_at = self._clock()
        async with self._db.read() as session:
            stamps = await read_stamps(session, self.seen)
        self.seen = max(self.seen, stamps.pop(COUNTER, 0))
        self.retired = max(self.retired, stamps.pop(RETIRED, 0))
        self._changed.update(stamps)
        self._asked_at = max(self._asked_at, asked_at)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Polls once, then in the background while the block runs. Raises :class:`UnavailableError`."""
        await self.poll()
        stop = asyncio.Event()
        task = asyncio.create_task(self._follow(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=LAST_ANSWER_S)  # a question that is cut short costs its connection
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _follow(self, stop: asyncio.Event) -> None:
        available = True
        while not await _set_within(stop, POLL_S):
            try:
                await self.poll()
                available = True
            except UnavailableError:
                if available:
                    logger.warning("the catalog does not answer; nothing is served from memory")
                available = False

    def is_current(self, tenant_id: int, seen: int) -> bool:
        """Whether what was read of a tenant when ``seen`` was the highest stamp still holds."""
        return self._changed.get(tenant_id, 0) <= seen and self._clock() - self._asked_at < STALE_S


async def _set_within(event: asyncio.Event, limit_s: float) -> bool:
    """Wait for an event; False if it has not come after ``limit_s``."""
    try:
        async with asyncio.timeout(limit_s):
            return await event.wait()
    except TimeoutError:
        return False


class CatalogCache(Generic[K, V]):
    """What was read of the catalog, each entry for one tenant, at most ``max_entries``."""

    def __init__(self, changes: Changes, max_entries: int) -> None:
        self._changes = changes
        self._entries: BoundedCache[K, tuple[int, int, V]] = BoundedCache(max_entries)

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        if entry is None or not self._changes.is_current(entry[0], entry[1]):
            return None
        return entry[2]

    def put(self, key: K, tenant_id: int, seen: int, value: V) -> None:
        """``seen`` is ``changes.seen`` from before the value was read: a change meanwhile makes it old."""
        self._entries.put(key, (tenant_id, seen, value))
