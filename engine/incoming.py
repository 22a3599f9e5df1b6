"""An image on its way into host memory, which a placement may follow block by block.

What has landed may be copied on before the rest has come, so that a cold load takes as long as its slowest stage.
Whether it is sound is known at the end alone: nothing may use what was copied until :meth:`Incoming.outcome` has told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

from stencilpress.engine.image_format import Image
from stencilpress.engine.image_layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Hosted:
    """An image in host memory, and how it lies in pages."""

    image: Image
    layout: Layout


class Incoming:
    """Written by the thread that reads and by those that read its blocks, followed by another one.

    ``waited_s`` is how long that one has waited.
    """

    def __init__(self, block_bytes: int) -> None:
        self.waited_s = 0.0
        self._block_bytes = block_bytes
        self._changed = Condition()
        self._coming: Hosted | None = None
        self._landed: set[int] = set()
        self._complete_bytes = 0
        self._awaited_bytes = 0
        self._ended = False
        self._outcome: Hosted | None = None

    def begin(self, coming: Hosted | None) -> None:
        """An attempt to read starts, into ``coming``; None: that one was in vain, and what has landed of it is void."""
        with self._changed:
            self._coming, self._landed, self._complete_bytes = coming, set(), 0
            self._changed.notify_all()

    def landed(self, coming: Hosted, start: int) -> None:
        """The block of an attempt's stream that begins at this byte is in memory. They may come in any order."""
        with self._changed:
            if self._coming is not coming:
                return
            self._landed.add(start)
            while self._complete_bytes in self._landed:
                self._landed.discard(self._complete_bytes)
                self._complete_bytes += self._block_bytes
            if self._complete_bytes >= self._awaited_bytes:
                self._changed.notify_all()

    def end(self, outcome: Hosted | None) -> None:
        """The read is over: its image, checked, or None if it has failed."""
        with self._changed:
            self._ended, self._outcome = True, outcome
            self._changed.notify_all()

    def coming(self) -> Hosted | None:
        """Wait for the first attempt; None if the read ended without one."""
        with self._changed:
            self._wait_for(lambda: self._coming is not None or self._ended)
            return self._coming

    def follow(self, coming: Hosted, end: int) -> int:
        """Wait until the first ``end`` bytes of an attempt are in memory; how many there are. 0 if it was in vain."""
        with self._changed:
            self._awaited_bytes = end
            self._wait_for(lambda: self._complete_bytes >= end or self._coming is not coming or self._ended)
            return self._complete_bytes if self._coming is coming and self._complete_bytes >= end else 0

    def outcome(self) -> Hosted | None:
        """Wait for the end of the read: its image, or None if it has failed."""
        with self._changed:
            self._wait_for(lambda: self._ended)
            return self._outcome

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        start = time.perf_counter()
        self._changed.wait_for(ready)
        self.waited_s += time.perf_counter() - start
