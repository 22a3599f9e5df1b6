"""What the handlers of one gateway share, in one place and under one key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakSet

from aiohttp import web

from stencilpress.engine.client import EngineClient
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.drain import Drain
from stencilpress.gateway.keys import KeyRing
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.route import Router
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.tokenizer import ModelTokenizer

T = TypeVar("T")

INLINE_BYTES = 4 << 10
"""A body up to this size is parsed and tokenised on the event loop: about 2 ms, less than a hand-over is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything lives as long as the process. ``threads`` parses and tokenises large bodies."""

    settings: GatewaySettings
    db: Database
    keys: KeyRing
    router: Router
    engine: EngineClient
    tokenizer: ModelTokenizer
    base_names: tuple[str, ...]
    """The base's id and aliases, for listing; the router takes more spellings."""
    metrics: Metrics
    drain: Drain
    threads: Executor
    started_at: int
    """Seconds since the epoch."""
    websockets: WeakSet[web.WebSocketResponse]


SERVICES = web.AppKey("services", Services)


async def off_loop(services: Services, size: int, work: Callable[[], T]) -> T:
    """Run ``work`` on ``size`` bytes of input: at once if they are few, else in a thread."""
    if size <= INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(services.threads, work)
