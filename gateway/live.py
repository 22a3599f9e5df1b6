"""What happens on all gateways and engines right now, told to whoever listens, every two seconds.

One sampler for each gateway process: it begins with the first listener and ends with the last one. However many listen,
peers and engines are asked once, and each picture is made and encoded once for everybody, and once for each tenant that
is listened to. A listener that is slow misses pictures; there is never more than one that waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec

from stencilpress.gateway.engine_reader import EngineReader
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.live_counts import LiveSlice
from stencilpress.gateway.live_picture import EVERYBODY, LivePicture, Sampler
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.peers import ask_live
from stencilpress.gateway.settings import GatewaySettings

INTERVAL_S = 2.0
MAX_LISTENERS = 200
"""Of operators, and of all tenants together: neither takes the other's place."""
MAX_TENANT_LISTENERS = 20

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class Listener:
    """``async for`` gives encoded pictures, the newest one each time, until the feed is closed."""

    def __init__(self) -> None:
        self._picture: bytes | None = None
        self._news = asyncio.Event()
        self._closed = False

    def tell(self, picture: bytes) -> None:
        self._picture = picture
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await self._news.wait()
        self._news.clear()
        picture, self._picture = self._picture, None
        if picture is None or self._closed:
            raise StopAsyncIteration
        return picture


class LiveFeed:
    """``ask`` gives the slices of all gateways that answer, of ``gateways``, this one's included."""

    def __init__(
        self,
        view: EngineReader,
        ask: Callable[[], Awaitable[Sequence[LiveSlice]]],
        gateways: int = 1,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._view = view
        self._ask = ask
        self._gateways = gateways
        self._interval_s = interval_s
        self._listeners: dict[int, set[Listener]] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @contextmanager
    def listen(self, tenant_id: int = EVERYBODY) -> Iterator[Listener]:
        """Listen to one tenant, or to all. Raises :class:`UnavailableError` for one listener too many."""
        if self._closed or not self._has_room(tenant_id):
            raise UnavailableError("As many listen already as may, or the server is shutting down; try again shortly.")
        listener = Listener()
        self._listeners.setdefault(tenant_id, set()).add(listener)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live-feed")
        try:
            yield listener
        finally:
            mine = self._listeners[tenant_id]
            mine.discard(listener)
            if not mine:
                del self._listeners[tenant_id]
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    def _has_room(self, tenant_id: int) -> bool:
        own, operators = len(self._listeners.get(tenant_id, ())), len(self._listeners.get(EVERYBODY, ()))
        if tenant_id == EVERYBODY:
            return own < MAX_LISTENERS
        tenants = sum(map(len, self._listeners.values())) - operators
        return own < MAX_TENANT_LISTENERS and tenants < MAX_LISTENERS

    def close(self) -> None:
        """End all listeners: the gateway shuts down."""
        self._closed = True
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.close()

    async def _run(self) -> None:
        sampler = Sampler()
        while True:
            try:
                slices, engines = await asyncio.gather(self._ask(), self._view.stats())
                sampler.take(slices, engines)
                await self._tell(sampler, len(slices))
            except UnavailableError:
                logger.warning("live pictures wait for the catalog")
            except Exception:
                logger.exception("a live picture failed")
            await asyncio.sleep(self._interval_s)

    async def _tell(self, sampler: Sampler, answered: int) -> None:
        wanted = set(self._listeners)
        shown = {one.tenant_id for one in sampler.busiest()} if EVERYBODY in wanted else set()
        names = await self._view.tenants((wanted | shown) - {EVERYBODY})
        for tenant_id in wanted:
            everybody = tenant_id == EVERYBODY
            picture = LivePicture(
                at=datetime.now(UTC),
                interval_s=self._interval_s,
                gateways=self._gateways if everybody else 0,
                gateways_up=answered if everybody else 0,
                total=sampler.tenant(tenant_id, names.get(tenant_id, "")),
                ttft_ms=sampler.latency(tenant_id),
                tenants=[sampler.tenant(one.tenant_id, names.get(one.tenant_id, "")) for one in sampler.busiest()]
                if everybody
                else [],
                engines=sampler.engines if everybody else [],
            )
            encoded = _encode(picture)
            for listener in self._listeners.get(tenant_id, ()):
                listener.tell(encoded)


def live_feed(settings: GatewaySettings, metrics: Metrics, view: EngineReader) -> LiveFeed:
    """Over all gateways of this server."""
    names = settings.peers.split(",")

    async def ask() -> list[LiveSlice]:
        return [metrics.live.look(), *await ask_live(names, settings.gateway)]

    return LiveFeed(view, ask, len(names))
