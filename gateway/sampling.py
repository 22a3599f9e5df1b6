"""Samples of the engines for their series: of a server's gateways one asks every few seconds."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b

from stencilpress.engine.messages import Stats
from stencilpress.gateway.catalog.engine_samples import Sampled, add_engine_samples
from stencilpress.gateway.catalog.leases import run_periodically
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.engine_reader import EngineNow, EngineReader
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.usage.engine_sums import NOTHING, EngineSum

SAMPLE_S = 5.0
SAMPLES_A_WRITE = 3
MAX_GAP_S = 60.0
"""What an engine counted over a longer gap, while another gateway sampled, is not counted once more."""
LAST_WRITE_S = 1.0
MAX_WAITING = 10_000
"""Minutes of engines that wait for the catalog; beyond these samples are dropped."""

logger = logging.getLogger(__name__)


def server_name(settings: GatewaySettings) -> str:
    """Tells this server's engines from those of others that share its database."""
    socket_digest = blake2b(settings.engine_socket.encode(), digest_size=4).hexdigest()
    return f"{socket.gethostname()[:54]}/{socket_digest}"


class EngineSampler:
    """Asks, adds up by minute, writes. What is not written yet is lost with a process that is killed."""

    def __init__(self, view: EngineReader, db: Database, server: str, clock: Callable[[], float] = time.time) -> None:
        self._view = view
        self._db = db
        self._server = server
        self._clock = clock
        self._last: dict[int, tuple[float, int | None, Stats]] = {}
        self._sums: dict[Sampled, EngineSum] = {}
        self._samples = 0

    async def sample(self) -> None:
        """Ask every engine once, and write now and then. Raises :class:`UnavailableError`."""
        minute_s = int(self._clock()) // 60 * 60
        for now in await self._view.stats():
            key = Sampled(self._server, now.engine, minute_s)
            if key in self._sums or len(self._sums) < MAX_WAITING:
                self._sums.setdefault(key, EngineSum()).merge(self._since_last(now))
        self._samples += 1
        if self._samples % SAMPLES_A_WRITE == 0:
            await self.write()

    async def write(self) -> None:
        """Write what was added up. Raises :class:`UnavailableError`; then it is kept."""
        sums, self._sums = self._sums, {}
        if not sums:
            return
        try:
            await add_engine_samples(self._db, sums)
        except BaseException:
            for key, one in self._sums.items():
                sums.setdefault(key, EngineSum()).merge(one)
            self._sums = sums
            raise

    async def last_write(self) -> None:
        """Write what can be written within a second."""
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self.write()
        except (TimeoutError, UnavailableError):
            logger.warning("the last samples of engines are lost")

    def _since_last(self, now: EngineNow) -> EngineSum:
        """An engine that began anew since then has counted everything since. One that was lost after it had answered is
        still the one before, unless its counters went backwards."""
        stats = now.stats
        if stats is None:
            return EngineSum.between(None, None)
        before = self._last.get(now.engine)
        generation = now.welcome.generation if now.welcome is not None else before and before[1]
        self._last[now.engine] = (self._clock(), generation, stats)
        if before is None or self._clock() - before[0] > MAX_GAP_S:
            return EngineSum.between(None, stats)
        return EngineSum.between(before[2] if before[1] == generation else NOTHING, stats)


@asynccontextmanager
async def sampling(settings: GatewaySettings, db: Database, view: EngineReader) -> AsyncIterator[None]:
    """Sample in the background while the block runs, if no other gateway of this server does."""
    server = server_name(settings)
    sampler = EngineSampler(view, db, server)
    job = run_periodically(db, f"engines-{server}"[:63], secrets.token_hex(8), SAMPLE_S, sampler.sample)
    task = asyncio.create_task(job)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        await sampler.last_write()
