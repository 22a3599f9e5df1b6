"""Requests that wait for a seat: one line per adapter, so that a cold adapter holds up its own line alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from stencilpress.engine.request import Request


class Waiting:
    """Lines in order of arrival. A preempted request steps back into its place, not to the end.

    Nothing here looks at more than one line, so its cost does not grow with the number of adapters.
    """

    def __init__(self) -> None:
        self._lines: dict[str | None, list[Request]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, request: Request) -> None:
        """Put a request into its adapter's line."""
        insort(self._lines.setdefault(request.adapter, []), request, key=_arrival)
        self._size += 1

    def discard(self, request: Request) -> bool:
        """Take a request out of its line, wherever in it it stands. False if it was in none."""
        line = self._lines.get(request.adapter, [])
        place = bisect_left(line, request.arrival, key=_arrival)
        if place == len(line) or line[place] is not request:
            return False
        del line[place]
        self._size -= 1
        if not line:
            del self._lines[request.adapter]
        return True

    def head(self, adapter: str | None) -> Request | None:
        """The oldest request of a line; None if nobody waits there."""
        line = self._lines.get(adapter)
        return line[0] if line else None

    def line(self, adapter: str | None) -> Sequence[Request]:
        """A copy of a line, oldest first."""
        return tuple(self._lines.get(adapter, ()))


def _arrival(request: Request) -> int:
    return request.arrival
