"""All engines of a server behind one face, and which of them a request goes to.

Requests of one adapter meet on one engine, so that it is loaded once: each engine is ranked by a hash of itself and
the adapter's digest (rendezvous hashing), which every gateway ranks alike and which moves nobody else's adapters when
an engine goes or comes. An engine that is too busy is passed over (consistent hashing with bounded loads, Mirrokni,
Thorup and Zadimoghaddam 2018). Requests for the base alone go to the engine with the least to do.

An engine shares its own time by the tenants' weights. So while requests wait on it, the same bound holds for the
requests of each tenant alone: tenants who have work for all engines then have it on all, and get their shares of all.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from hashlib import blake2b
from types import TracebackType
from typing import TypeVar

import msgspec

from stencilpress.engine.client import EngineBusyError, EngineClient, EngineUnavailableError, Stream
from stencilpress.engine.messages import (
    MAX_ADAPTERS_SHOWN,
    MAX_HELD_SHOWN,
    MAX_KEPT,
    AdapterSeen,
    Ensured,
    Kept,
    Pages,
    Stats,
    Submit,
    Welcome,
)

LOAD_FACTOR = 1.25
"""An engine may have this many times the mean of open requests before its adapters overflow to others."""
ALWAYS_TAKEN = 8
"""Open requests below which an engine is never too busy: a batch this small costs nobody anything."""
MAX_RANKED = 1 << 16
ANSWER_LIMIT_S = 1.0
PAGES_LIMIT_S = 5.0
"""The picture of a large pool is drawn in parts, one a step."""
FORGETS_AT_ONCE = 16
"""Adapters that an engine sees to between two steps."""

A = TypeVar("A")

logger = logging.getLogger(__name__)


class Engines:
    """The engines of ``clients``, all of one base and with the same settings. Also an async context manager.

    Loads are counted by this gateway alone: the others take their shares of the same callers, so they see much the
    same. Of engines with equally little to do chance picks one, or all gateways would pick the same.
    """

    def __init__(self, clients: Sequence[EngineClient]) -> None:
        self._clients = clients
        self._returning: set[asyncio.Timeout] = set()
        """Requests that wait for an engine to come back."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Engines:
        for client in self._clients:
            await self._stack.enter_async_context(client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def close(self) -> None:
        """Disconnect from all; open streams end with ``engine_lost``, and nothing waits for an engine any more."""
        for scope in self._returning:
            scope.reschedule(asyncio.get_running_loop().time())
        for client in self._clients:
            await client.close()

    @property
    def ready(self) -> bool:
        """Whether any engine is connected."""
        return any(client.ready for client in self._clients)

    @property
    def responsive(self) -> bool:
        """Whether any engine answers in the time that it takes as a rule."""
        return any(client.responsive for client in self._clients)

    async def wait_ready(self) -> Welcome:
        """Wait until one engine is connected."""
        waits = [asyncio.ensure_future(client.wait_ready()) for client in self._clients]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.welcome

    @property
    def welcome(self) -> Welcome:
        """What every connected engine can take. Raises :class:`EngineUnavailableError` without one."""
        if len(self._clients) == 1:
            return self._clients[0].welcome
        welcomes = [client.welcome for client in self._clients if client.ready]
        if not welcomes:
            raise EngineUnavailableError("no engine is connected")
        least = min(welcomes, key=lambda welcome: welcome.max_model_len)
        rank = min(welcome.max_lora_rank for welcome in welcomes)
        return least if rank == least.max_lora_rank else msgspec.structs.replace(least, max_lora_rank=rank)

    async def submit(self, request: Submit) -> Stream:
        """Hand a request to the engine that it belongs to, or to the next one if that is lost in this moment.

        Raises as :meth:`EngineClient.submit` does.
        """
        while True:
            client = self._clients[self.choose(request.adapter, request.tenant)]
            try:
                return await client.submit(request)
            except EngineUnavailableError:
                if not self.ready:
                    raise

    async def resubmit(self, request: Submit, limit_s: float) -> Stream | None:
        """Hand over a request anew whose engine is gone, to another or to the first that is back in time.

        None if there is none in time, or the engines are being closed. What it waits here it has waited of its
        ``max_wait_ms``. Raises :class:`EngineBusyError`.
        """
        loop = asyncio.get_running_loop()
        came_s = loop.time()
        try:
            async with asyncio.timeout(limit_s) as scope:
                self._returning.add(scope)
                while True:
                    await self.wait_ready()
                    with suppress(EngineUnavailableError):
                        return await self.submit(_waited(request, loop.time() - came_s))
        except TimeoutError:
            return None
        finally:
            self._returning.discard(scope)

    def choose(self, adapter: str, tenant: int | None = None) -> int:
        """The engine for a tenant's request for an adapter, or for the base (""), now; without a tenant the one where
        the adapter is at home. Raises :class:`EngineUnavailableError`."""
        if len(self._clients) == 1 and self._clients[0].ready:
            return 0
        ready = [index for index, client in enumerate(self._clients) if client.ready]
        if not ready:
            raise EngineUnavailableError("no engine is connected")
        ready = [index for index in ready if self._clients[index].responsive] or ready
        if len(ready) == 1:
            return ready[0]
        loads = {index: self._clients[index].open_requests for index in ready}
        if not adapter:
            return min(ready, key=lambda index: (loads[index], random.random()))  # noqa: S311 - no secret
        most = _bound(loads)
        takers = [index for index in ranking(adapter, len(self._clients)) if loads.get(index, most) < most]
        if tenant is None or not self._clients[takers[0]].crowded:
            return takers[0]
        own = {index: self._clients[index].open_requests_of(tenant) for index in ready}
        most = _bound(own)
        return next((index for index in takers if own[index] < most), min(takers, key=own.__getitem__))

    async def ensure(self, adapter: str) -> Ensured:
        """Have an adapter brought in and checked where its requests go. Raises as :meth:`EngineClient.ensure` does."""
        return await self._clients[self.choose(adapter)].ensure(adapter)

    async def stats(self) -> list[Stats | None]:
        """The numbers of each engine; None for one that does not answer within a second."""
        return list(await asyncio.gather(*(_soon(client.stats()) for client in self._clients)))

    async def adapters(self) -> list[Sequence[AdapterSeen] | None]:
        """All that each engine has seen of adapters, the one used last first; None for one that does not answer."""
        return list(await asyncio.gather(*map(_adapters_of, self._clients)))

    async def pages_of(self, engine: int) -> Pages | None:
        """Who holds which page of one engine's pool; None if it does not answer. Engines count from 0 here."""
        return await _soon(self._clients[engine].pages(), PAGES_LIMIT_S)

    async def keep(self, pinned: Collection[str], preloaded: Collection[str] = ()) -> list[Kept | None]:
        """Have adapters kept at hand where their requests go, instead of those before; each engine that connects later
        is told too.

        Of more than :data:`MAX_KEPT` for one engine, such as canaries beside as many, the last are left out: it would
        refuse them all.
        """
        shares: list[tuple[list[str], list[str]]] = [([], []) for _ in self._clients]
        for part, digests in enumerate((pinned, preloaded)):
            for digest in digests:
                shares[ranking(digest, len(self._clients))[0]][part].append(digest)
        left_out = sum(len(some[MAX_KEPT:]) for share in shares for some in share)
        if left_out:
            logger.warning("%d adapters more are to be kept at hand than engines take", left_out)
        says = (
            client.keep(pins[:MAX_KEPT], preloads[:MAX_KEPT])
            for client, (pins, preloads) in zip(self._clients, shares, strict=True)
        )
        return list(await asyncio.gather(*map(_soon, says)))

    async def held_by(self, engine: int, limit_s: float = ANSWER_LIMIT_S) -> Collection[str] | None:
        """The adapters that one engine has in memory, or may bring in for nobody; None if it does not answer."""
        held: list[str] = []
        while True:
            answer = await _soon(self._clients[engine].held(held[-1] if held else ""), limit_s)
            if answer is None:
                return None
            held += answer.adapters
            if len(answer.adapters) < MAX_HELD_SHOWN:
                return held

    async def forget(self, digests: Collection[str]) -> None:
        """Tell every engine that versions are deleted: none keeps memory for them once their last request has ended."""
        await asyncio.gather(*(self.forget_on(engine, digests) for engine in range(self.count)))

    async def forget_on(self, engine: int, digests: Collection[str], limit_s: float = ANSWER_LIMIT_S) -> bool:
        """The same for one engine; False if it does not answer to all of it."""
        names, client = sorted(digests), self._clients[engine]
        for start in range(0, len(names), FORGETS_AT_ONCE):
            some = names[start : start + FORGETS_AT_ONCE]
            if None in await asyncio.gather(*(_soon(client.forget(digest), limit_s) for digest in some)):
                return False
        return True

    @property
    def count(self) -> int:
        """Engines, connected or not."""
        return len(self._clients)

    @property
    def welcomes(self) -> Sequence[Welcome | None]:
        """What each engine said of itself when it was connected; None for one that is not."""
        return [client.welcome if client.ready else None for client in self._clients]

    @property
    def open_requests(self) -> Sequence[int]:
        """Open requests of this gateway, by engine."""
        return [client.open_requests for client in self._clients]


@functools.lru_cache(MAX_RANKED)
def ranking(adapter: str, engines: int) -> tuple[int, ...]:
    """All engines, the one that an adapter's requests belong to first."""

    def score(index: int) -> bytes:
        return blake2b(adapter.encode(), digest_size=8, salt=index.to_bytes(16, "little")).digest()

    return tuple(sorted(range(engines), key=score))


def _bound(loads: Mapping[int, int]) -> int:
    """How many open requests an engine may have, with the one that has come."""
    return max(ALWAYS_TAKEN, math.ceil(LOAD_FACTOR * (sum(loads.values()) + 1) / len(loads)))


def _waited(request: Submit, waited_s: float) -> Submit:
    """A request that has waited so long of the time that it may wait; 1 ms is left at least."""
    if not request.max_wait_ms:
        return request
    return msgspec.structs.replace(request, max_wait_ms=max(1, request.max_wait_ms - round(waited_s * 1000)))


async def _adapters_of(client: EngineClient) -> Sequence[AdapterSeen] | None:
    seen: dict[str, AdapterSeen] = {}
    offset, total = 0, 1
    while offset < total:  # an adapter that is used meanwhile moves to the front: it is told twice, not lost
        answer = await _soon(client.adapters(offset, MAX_ADAPTERS_SHOWN))
        if answer is None:
            return list(seen.values()) or None
        for one in answer.adapters:
            seen.setdefault(one.digest, one)
        offset, total = offset + MAX_ADAPTERS_SHOWN, answer.total
    return list(seen.values())


async def _soon(answer: Awaitable[A], limit_s: float = ANSWER_LIMIT_S) -> A | None:
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except (EngineUnavailableError, EngineBusyError, TimeoutError):
        return None
