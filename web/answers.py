"""Answers that several visitors share for a moment: however many look at a dashboard, it is added up once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from stencilpress.gateway.cache import BoundedCache

MAX_ANSWERS = 256

T = TypeVar("T")


class SharedAnswers:
    """Of this process. Who may have an answer is checked before, and its key says for whom it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: BoundedCache[Hashable, tuple[float, asyncio.Future[Any]]] = BoundedCache(MAX_ANSWERS)

    async def get(self, key: Hashable, fresh_s: float, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer that was begun less than ``fresh_s`` ago, or else a new one. What ``ask`` raises is not kept."""
        kept = self._kept.get(key)
        if kept is None or self._clock() - kept[0] >= fresh_s or _failed(kept[1]):
            kept = (self._clock(), asyncio.ensure_future(ask()))
            self._kept.put(key, kept)
        answer: T = await asyncio.shield(kept[1])  # one visitor who leaves does not take it from the others
        return answer


def _failed(answer: asyncio.Future[Any]) -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
