"""What quotas refused, counted here and written behind. A gateway that is killed loses the last seconds of it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from stencilpress.gateway.catalog.refusals import Refusals, Refused, add_refusals
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import UnavailableError

FLUSH_S = 5.0
LAST_FLUSH_S = 1.0
MAX_COUNTS = 100_000
"""Tenants, dimensions and minutes that wait for the catalog; beyond these only the metrics count what comes."""

logger = logging.getLogger(__name__)


class RefusalCounts:
    """Counted on one loop, written on another."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[Refused, Refusals] = {}

    def add(self, tenant_id: int, dimension: str, *, watched: bool) -> None:
        """Count one request over a limit: refused, or only ``watched``."""
        key = Refused(tenant_id, dimension, int(self._clock()) // 60 * 60)
        with self._lock:
            self._merge(key, Refusals(int(not watched), int(watched)))

    async def run(self, db: Database) -> None:
        """Write what comes, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush(db)
            except UnavailableError:
                logger.warning("%d counts of refusals wait for the catalog", len(self._counts))

    async def flush(self, db: Database) -> None:
        """Write what was counted so far. Raises :class:`UnavailableError`; then it is kept."""
        with self._lock:
            counts, self._counts = self._counts, {}
        if not counts:
            return
        try:
            await add_refusals(db, counts)
        except BaseException:
            with self._lock:
                for key, count in counts.items():
                    self._merge(key, count)
            raise

    async def last_flush(self, db: Database) -> None:
        """Write what can be written within a second."""
        try:
            async with asyncio.timeout(LAST_FLUSH_S):
                await self.flush(db)
        except (TimeoutError, UnavailableError):
            logger.warning("%d counts of refusals are lost", len(self._counts))

    def _merge(self, key: Refused, count: Refusals) -> None:
        known = self._counts.get(key)
        if known is not None:
            self._counts[key] = Refusals(known.refused + count.refused, known.watched + count.watched)
        elif len(self._counts) < MAX_COUNTS:
            self._counts[key] = count
