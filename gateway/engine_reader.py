"""What engines show of themselves, asked for once for all who look: however many pages are open, an engine is asked
no more often than :data:`FRESH_S` says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from stencilpress.engine.messages import AdapterSeen, Pages, Stats, Welcome
from stencilpress.gateway.cache import BoundedCache
from stencilpress.gateway.catalog.digests import Owner, owners_of, tenant_names
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.engines import Engines

FRESH_S = 1.0
PAGES_FRESH_S = 2.0
NAMES_FRESH_S = 30.0
"""How long a deleted version, or a new share, may go unnoticed where digests are named."""
MAX_NAMES = 20_000

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineNow:
    """One engine, counted from 1. ``stats`` is None if it does not answer, ``seen_s`` how long ago it last did."""

    engine: int
    stats: Stats | None
    welcome: Welcome | None
    seen_s: float | None
    open_requests: int
    """Of this gateway."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What an engine has seen of one adapter."""

    engine: int
    adapter: AdapterSeen


class EngineReader:
    """The engines as people see them. One of these for each gateway process."""

    def __init__(self, engines: Engines, db: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = engines
        self._db = db
        self._clock = clock
        self._answered_at: dict[int, float] = {}
        self._stats: _Fresh[None, list[Stats | None]] = _Fresh(lambda _: self._ask_stats(), FRESH_S, clock)
        self._adapters: _Fresh[None, list[Seen]] = _Fresh(lambda _: self._ask_adapters(), FRESH_S, clock)
        self._pages: _Fresh[int, Pages | None] = _Fresh(engines.pages_of, PAGES_FRESH_S, clock)
        self._owners: BoundedCache[str, tuple[float, tuple[Owner, ...]]] = BoundedCache(MAX_NAMES)
        self._names: BoundedCache[int, str] = BoundedCache(MAX_NAMES)

    async def stats(self) -> Sequence[EngineNow]:
        """Every engine at this moment."""
        found = await self._stats.get(None)
        now = self._clock()
        last = self._answered_at
        return [
            EngineNow(number, stats, welcome, now - last[number] if number in last else None, open_requests)
            for number, (stats, welcome, open_requests) in enumerate(
                zip(found, self._engines.welcomes, self._engines.open_requests, strict=True), 1
            )
        ]

    async def adapters(self) -> Sequence[Seen]:
        """What the engines that answer have seen of adapters, of each engine the one used last first."""
        return await self._adapters.get(None)

    async def pages(self, engine: int) -> Pages | None:
        """Who holds which page of an engine's pool; None if it does not answer. ``engine`` counts from 1."""
        return await self._pages.get(engine - 1)

    async def owners(self, digests: Collection[str]) -> Mapping[str, tuple[Owner, ...]]:
        """The versions that digests stand for."""
        found: dict[str, tuple[Owner, ...]] = {}
        fresh_from = self._clock() - NAMES_FRESH_S
        for digest in set(digests):
            entry = self._owners.get(digest)
            if entry is not None and entry[0] >= fresh_from:
                found[digest] = entry[1]
        missing = set(digests) - found.keys()
        if missing:
            read = await owners_of(self._db, missing)
            for digest, owners in read.items():
                self._owners.put(digest, (self._clock(), owners))
            found |= read
        return found

    async def tenants(self, ids: Collection[int]) -> Mapping[int, str]:
        """Names of tenants, which never change."""
        found = {one: name for one in set(ids) if (name := self._names.get(one)) is not None}
        missing = set(ids) - found.keys()
        if missing:
            read = await tenant_names(self._db, missing)
            for one, name in read.items():
                self._names.put(one, name)
            found |= read
        return found

    async def _ask_stats(self) -> list[Stats | None]:
        found = await self._engines.stats()
        now = self._clock()
        self._answered_at.update((number, now) for number, stats in enumerate(found, 1) if stats is not None)
        return found

    async def _ask_adapters(self) -> list[Seen]:
        answers = await self._engines.adapters()
        return [Seen(engine, one) for engine, answer in enumerate(answers, 1) for one in answer or ()]


class _Fresh(Generic[K, T]):
    """Answers that are asked for again when they are older than ``fresh_s``, once for all who wait."""

    def __init__(self, ask: Callable[[K], Awaitable[T]], fresh_s: float, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._fresh_s = fresh_s
        self._clock = clock
        self._answers: dict[K, tuple[float, T]] = {}
        self._locks: dict[K, asyncio.Lock] = {}

    async def get(self, key: K) -> T:
        async with self._locks.setdefault(key, asyncio.Lock()):
            answer = self._answers.get(key)
            if answer is None or self._clock() - answer[0] >= self._fresh_s:
                answer = self._answers[key] = (self._clock(), await self._ask(key))
            return answer[1]
