"""A receiver of webhooks: a real HTTP server that keeps what it was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Taken:
    """One request."""

    body: bytes
    headers: dict[str, str]

    @property
    def message(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """``answers`` are the statuses of the next requests, 200 when there are none left; ``silent`` never answers."""

    url: str = ""
    taken: list[Taken] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    silent: bool = False
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def has(self, count: int) -> None:
        """Wait until so many requests have come."""
        while len(self.taken) < count:
            self._arrived.clear()
            await self._arrived.wait()

    async def handle(self, request: web.Request) -> web.Response:
        self.taken.append(Taken(await request.read(), {name.lower(): value for name, value in request.headers.items()}))
        self._arrived.set()
        if self.silent:
            await asyncio.Event().wait()
        status = self.answers.pop(0) if self.answers else 200
        return web.Response(status=status, headers={"Location": self.url} if status in (301, 307) else None)


@asynccontextmanager
async def webhook_receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
        yield receiver
    finally:
        await runner.cleanup()
