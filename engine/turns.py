"""Whose turn it is: first come, first served, with adapters that pass each other for a bounded time only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency
from stencilpress.engine.waiting import Waiting


class Turns:
    """Picks the next request to be seated.

    ``granted`` are the adapters that hold one of ``max_loras`` slots, the longest holder first; the scheduler keeps
    it. A request has *aged* once ``patience_steps`` steps were planned since it came. What passes an aged request:

    - It lacks a slot: as many of the longest holders as there are such adapters take no newcomers, so slots free.
    - The pool lacks room for its adapter: nobody newer is seated, so pages free.
    - Its adapter is being read from disk: anybody, since nobody's standing back would make the disk faster.
    """

    def __init__(
        self, waiting: Waiting, residency: Residency, granted: Mapping[str, int], *, max_loras: int, patience_steps: int
    ) -> None:
        self._waiting = waiting
        self._residency = residency
        self._granted = granted
        self._max_loras = max_loras
        self._patience_steps = patience_steps
        self._arrivals_at_step: deque[int] = deque(maxlen=patience_steps)

    def begin_step(self, arrivals: int) -> None:
        """A step is planned; so many requests have come so far."""
        self._arrivals_at_step.append(arrivals)

    def next(self) -> Request | None:
        """The oldest request that may be seated now."""
        heads = (self._waiting.head(None), self._head_for_free_slot(), *self._heads_with_slot())
        oldest = min((head for head in heads if head is not None), key=_arrival, default=None)
        squeezed = self.aged_squeeze()
        if oldest is not None and squeezed is not None and oldest.arrival > squeezed:
            return None
        return oldest

    def aged_squeeze(self) -> int | None:
        """Arrival of the oldest aged request whose adapter the pool has no room for."""
        squeezed = self._residency.squeezed_since()
        return squeezed if squeezed is not None and squeezed <= self._aged else None

    @property
    def _aged(self) -> int:
        """Requests up to this arrival have aged."""
        return self._arrivals_at_step[0] if len(self._arrivals_at_step) == self._patience_steps else 0

    def _head_for_free_slot(self) -> Request | None:
        if len(self._granted) >= self._max_loras:
            return None
        wants = self._residency.ready_wants()
        return next((self._waiting.head(digest) for _, digest in wants if digest not in self._granted), None)

    def _heads_with_slot(self) -> Iterator[Request]:
        starving = self._starving()
        for nth, adapter in enumerate(self._granted):
            head = self._waiting.head(adapter)
            if head is not None and (nth >= len(starving) or head.arrival < starving[0]):
                yield head

    def _starving(self) -> list[int]:
        """Arrivals of aged requests that lack only a slot, oldest first, one an adapter."""
        starving: list[int] = []
        if len(self._granted) < self._max_loras:
            return starving
        for arrival, digest in self._residency.ready_wants():
            if arrival > self._aged or len(starving) == self._max_loras:
                break
            if digest not in self._granted:
                starving.append(arrival)
        return starving


def _arrival(request: Request) -> int:
    return request.arrival
