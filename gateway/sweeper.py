"""What was taken out of use leaves the engines' memory, whoever did it: a command, or a gateway of another host.

The catalog tells that something was (``catalog/stamps.py``), not what: so each engine is asked what it holds, and the
catalog which of that nobody has in use any more. That costs what is in memory, however many adapters are enrolled, and
is right whatever was missed before: by a gateway that was started anew, or by an engine that did not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stencilpress.gateway.catalog.digests import out_of_use
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.errors import UnavailableError

LOOK_S = 0.5
"""How often it is looked whether anything was taken out of use."""
SWEEP_S = 60.0
"""After so long it is swept in any case: a request that had found its version before may bring it in after a sweep."""
ANSWER_S = 30.0
"""Patience with an engine, whose steps may take seconds on few cores."""

logger = logging.getLogger(__name__)


class Sweeper:
    """Every gateway sweeps by itself; to be told twice costs an engine next to nothing."""

    def __init__(self, db: Database, engines: Engines, changes: Changes) -> None:
        self._db = db
        self._engines = engines
        self._changes = changes

    async def sweep(self, engine: int) -> bool:
        """Have one engine forget what is out of use; False if it does not answer. Raises :class:`UnavailableError`."""
        held = await self._engines.held_by(engine, ANSWER_S)
        if held is None:
            return False
        return await self._engines.forget_on(engine, await out_of_use(self._db, held), ANSWER_S)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Sweep each engine when it is there, and after each deletion, while the block runs."""
        tasks = [asyncio.create_task(self._follow(engine)) for engine in range(self._engines.count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, engine: int) -> None:
        clock = asyncio.get_running_loop().time
        swept, again_at = -1, 0.0
        while True:
            retired = self._changes.retired
            if retired != swept or clock() >= again_at:
                try:
                    if await self.sweep(engine):
                        swept, again_at = retired, clock() + SWEEP_S
                except UnavailableError:
                    pass  # others tell that the catalog is away
                except Exception:
                    logger.exception("engine %d was not swept", engine + 1)
            await asyncio.sleep(LOOK_S)
