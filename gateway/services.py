"""What the handlers of one gateway share, in one place and under one key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakSet, WeakValueDictionary

from aiohttp import web

from stencilpress.gateway.accounting import Accounting
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.change_limit import ChangeLimit
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.drain import Drain
from stencilpress.gateway.engine_reader import EngineReader
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.keeper import Keeper
from stencilpress.gateway.keys import KeyRing
from stencilpress.gateway.lifecycle.desk import AdapterDesk
from stencilpress.gateway.live import LiveFeed
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.route import Router
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.tokenizer import ModelTokenizer
from stencilpress.gateway.tracing import Tracing

T = TypeVar("T")

INLINE_BYTES = 4 << 10
"""A body up to this size is parsed and tokenised on the event loop: about 2 ms, less than a hand-over is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything lives as long as the process. ``threads`` parses and tokenises large bodies."""

    settings: GatewaySettings
    db: Database
    changes: Changes
    keys: KeyRing
    router: Router
    engine: Engines
    view: EngineReader
    live: LiveFeed
    keeper: Keeper
    tokenizer: ModelTokenizer
    base_names: tuple[str, ...]
    """The base's id and aliases, for listing; the router takes more spellings."""
    metrics: Metrics
    drain: Drain
    accounting: Accounting
    threads: Executor
    started_at: int
    """Seconds since the epoch."""
    websockets: WeakSet[web.WebSocketResponse]
    desk: AdapterDesk | None = None
    """Uploads and upkeep of adapters; None without a folder of theirs."""
    tracing: Tracing | None = None
    turns: WeakValueDictionary[int, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By tenant, held while a thread works for it."""
    smoke_turns: WeakValueDictionary[int, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By tenant, held while a version of its is asked the smoke prompts."""

    change_limit: ChangeLimit = field(default_factory=ChangeLimit)

    def using(self, digest: str, tenant_id: int) -> AbstractAsyncContextManager[None]:
        """Keep an adapter's blob while the block runs; the base has none. Raises :class:`AdapterUnavailableError`."""
        return nullcontext() if self.desk is None or not digest else self.desk.using(digest, tenant_id)


SERVICES = web.AppKey("services", Services)


async def off_loop(services: Services, tenant_id: int, size: int, work: Callable[[], T]) -> T:
    """Run ``work`` on ``size`` bytes of input: at once if they are few, else in a thread.

    A tenant has one thread at a time, until it is done even if nobody waits for it any more: a few bodies of megabytes
    must not take all threads from the others.
    """
    if size <= INLINE_BYTES:
        return work()
    loop = asyncio.get_running_loop()
    turn = services.turns.setdefault(tenant_id, asyncio.Lock())
    await turn.acquire()
    job = services.threads.submit(work)
    job.add_done_callback(lambda _: loop.call_soon_threadsafe(turn.release))
    return await asyncio.wrap_future(job)
