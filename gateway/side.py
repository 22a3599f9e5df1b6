"""A second event loop in a thread, for work that nobody waits for: it does not hold up streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH_S = 0.0001
"""For ``sys.setswitchinterval``: how long that thread may keep the interpreter from the loop that serves clients."""


class SideLoop:
    """Runs coroutines on its own loop while the block runs; what is left at its end is cancelled."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="side-loop", daemon=True)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` there and wait for its result here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` there until it ends or the block does."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def __aenter__(self) -> SideLoop:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.call(self.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def stop(self) -> None:
        """Cancel all that runs on this loop but the caller."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
