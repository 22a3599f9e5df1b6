"""How many alerts fire, for the menu: known for a while, so that no page asks the database for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from time import monotonic

from aiohttp import web

from stencilpress.gateway.catalog.alerts import count_firing
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.services import SERVICES

FRESH_S = 15.0

logger = logging.getLogger(__name__)


class Firing:
    """The counts of alerts that nobody has acknowledged. Whoever looks when they are old has them asked for anew, and
    does not wait for that."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._counts: Mapping[str, int] = {}
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def counts(self) -> Mapping[str, int]:
        """By tenant; "" has all of them and the installation's."""
        if monotonic() - self._asked_at >= FRESH_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self.refresh())
        return self._counts

    async def refresh(self) -> None:
        """Ask now; while the catalog is away the old counts stay."""
        self._asked_at = monotonic()
        try:
            self._counts = await count_firing(self._db)
        except UnavailableError:
            logger.debug("the count of alerts waits for the catalog")

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])


FIRING = web.AppKey("firing", Firing)


async def firing_of(app: web.Application) -> AsyncIterator[None]:
    """A cleanup context: nothing is asked after the application has ended."""
    yield
    await app[FIRING].close()


def mount_firing(app: web.Application) -> None:
    app[FIRING] = Firing(app[SERVICES].db)
    app.cleanup_ctx.append(firing_of)
