"""A server under the serve bench: its tenants, adapters and keys, and how much is asked of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.serve_checks import Checks
from bench.serve_client import Api, Request
from bench.serve_models import BASE_ID, LARGE, RANKS, SMALL, Models, words
from bench.server import Server
from stencilpress.gateway.enrol import FILES

TENANTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """``tested`` adapters are compared, with ``answer`` tokens. Versions change under streams of ``long`` tokens, and
    SIGTERM meets such of ``last``."""

    base: dict[str, int]
    adapters: int = 64
    requests: int = 256
    tokens: int = 128
    tested: int = 8
    answer: int = 24
    long: int = 3000
    last: int = 3500
    clients: int = 4


FULL = Sizes(LARGE)
REHEARSAL = Sizes(SMALL, adapters=12, requests=32, tokens=32, long=400, last=1500, clients=2)


@dataclass(frozen=True, slots=True)
class Trial:
    """A server with all adapters, each of one of the tenants. ``keys`` are by tenant.

    ``device`` and ``settings`` are for results.
    """

    server: Server
    api: Api
    models: Models
    sizes: Sizes
    checks: Checks
    device: str
    settings: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=words)
    chance: random.Random = field(default_factory=lambda: random.Random(3))
    slots: dict[str, asyncio.Semaphore] = field(default_factory=dict)
    """Uploads at once of each tenant, which may have 4."""

    @property
    def names(self) -> list[str]:
        return list(self.models.adapters)

    def tenant(self, adapter: str) -> str:
        """Whose it is; the largest ones are spread."""
        number = self.names.index(adapter)
        return f"t{(number + number // (2 * len(RANKS))) % TENANTS}"

    def key(self, model: str) -> str:
        return self.keys["t0" if model == BASE_ID else self.tenant(model)]

    def text(self, length: int) -> str:
        """So many words in a row."""
        start = self.chance.randrange(len(self.words) - 200)
        return " ".join(self.words[start : start + length])

    def request(self, model: str, tokens: int) -> Request:
        return Request(model, self.key(model), self.text(20 + self.chance.randrange(100)), tokens)

    async def open_tenants(self) -> None:
        """Tenants with a caller's key each."""
        for name in (f"t{number}" for number in range(TENANTS)):
            await self.api.admin("POST", "/tenants", json={"name": name})
            issued = await self.api.admin("POST", f"/tenants/{name}/keys", json={"role": "caller"})
            self.keys[name], self.slots[name] = issued["token"], asyncio.Semaphore(2)

    async def upload(self, adapter: str, folder: Path) -> None:
        """Make a version of it and promote it."""
        async with self.slots[self.tenant(adapter)]:
            form = aiohttp.FormData()
            for name in FILES:
                content = (folder / name).read_bytes()
                form.add_field("f", content, filename=name, content_type="application/octet-stream")
            await self.api.admin("POST", f"{self.path(adapter)}/versions?promote=true", data=form)

    def path(self, adapter: str) -> str:
        return f"/tenants/{self.tenant(adapter)}/adapters/{adapter}"

    async def until_running(self, streams: int) -> None:
        async def running() -> bool:
            return await self.api.metric("stencilpress_engine_running") >= streams

        await until(running, 30, f"{streams} streams run")


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float, what: str) -> float:
    """Wait for it; returns the seconds. Raises ``TimeoutError``."""
    started = time.monotonic()
    while not await condition():
        if time.monotonic() > started + limit_s:
            raise TimeoutError(f"not after {limit_s:g} s: {what}")
        await asyncio.sleep(0.05)
    return time.monotonic() - started
