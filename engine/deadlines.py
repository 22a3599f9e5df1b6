"""Requests that wait for a bounded time only."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from stencilpress.engine.request import Request

COMPACT_AT = 64
"""Requests that have begun or ended and are put up with, beside as many as wait: nothing else removes those that come
behind one that waits for long."""


class Deadlines:
    """Requests by the time at which they must have begun. One that has begun or ended is forgotten in passing."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._compact_at = COMPACT_AT

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, max_wait_s: float) -> None:
        """Note a request that has just come."""
        heappush(self._heap, (request.came_s + max_wait_s, request.arrival, request))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].unbegun]
            heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + COMPACT_AT

    def next_s(self) -> float | None:
        """The time of the next one."""
        while self._heap and not self._heap[0][2].unbegun:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_missed(self, now_s: float) -> Request | None:
        """A request that should have begun before ``now_s``, once."""
        due_s = self.next_s()
        return heappop(self._heap)[2] if due_s is not None and due_s < now_s else None
