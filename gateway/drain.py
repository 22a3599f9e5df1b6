"""Which answers are being made, and the orderly end: no new ones, then wait for those that run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from stencilpress.gateway.errors import UnavailableError


class Drain:
    """Counts the answers in progress. Once :meth:`begin` was called new ones are refused."""

    def __init__(self) -> None:
        self.draining = False
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Wraps the making of one answer. Raises :class:`UnavailableError` while draining."""
        if self.draining:
            raise UnavailableError("The server is shutting down; try again shortly.")
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def begin(self) -> None:
        self.draining = True

    async def idle(self, limit_s: float) -> bool:
        """Wait until nothing is in progress; False if something still is after ``limit_s``."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
