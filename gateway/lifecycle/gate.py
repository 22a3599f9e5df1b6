"""How many uploads are checked at once: each takes a core for seconds, and a tenant must not take them all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from stencilpress.gateway.errors import TooManyUploadsError

WORKERS = 2
WORKERS_PER_TENANT = 1
UPLOADS_PER_TENANT = 4
"""In progress, those that wait for their turn included."""


class IntakeGate:
    """Turns at the intake workers of this process, first come, first served within a tenant."""

    def __init__(
        self,
        workers: int = WORKERS,
        per_tenant: int = WORKERS_PER_TENANT,
        uploads_per_tenant: int = UPLOADS_PER_TENANT,
    ) -> None:
        self._workers = asyncio.Semaphore(workers)
        self._per_tenant = per_tenant
        self._uploads_per_tenant = uploads_per_tenant
        self._turns: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        self._uploads: Counter[int] = Counter()

    @asynccontextmanager
    async def upload(self, tenant_id: int) -> AsyncIterator[None]:
        """Wraps a whole upload. Raises :class:`TooManyUploadsError`, since each holds a connection and disk space."""
        if self._uploads[tenant_id] >= self._uploads_per_tenant:
            raise TooManyUploadsError(
                f"This tenant has {self._uploads_per_tenant} uploads in progress, the most it may have at once."
            )
        self._uploads[tenant_id] += 1
        try:
            yield
        finally:
            self._uploads[tenant_id] -= 1
            if not self._uploads[tenant_id]:
                del self._uploads[tenant_id]

    @asynccontextmanager
    async def turn(self, tenant_id: int) -> AsyncIterator[None]:
        """Wraps the work of one worker; waits for the tenant's turn, then for a free worker."""
        own = self._turns.setdefault(tenant_id, asyncio.Semaphore(self._per_tenant))
        async with own, self._workers:
            yield
