"""The request that has waited for far longer than others did: it is next, whatever its tenant has had."""

from __future__ import annotations

from collections.abc import Callable

from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency
from stencilpress.engine.waiting import Waiting

STARVED_STEPS = 1024
"""So long, and twice as long as those did who have got seats of late."""
EVERY_STEPS = 256
"""How often such a request is looked for."""


class Starved:
    """Marks ``waiting.favoured``: of each tenant's most urgent request the one that has waited longest, if too long.

    Counters alone could let it wait for ever: requests for the base need no slot, so a tenant that has many of them
    has always had more than tenants who take turns with the slots, and its own adapter never has one. What runs first
    is charged as ever, so that shares stay what they are.
    """

    def __init__(self, waiting: Waiting, residency: Residency) -> None:
        self._waiting = waiting
        self._residency = residency
        self._usual_steps = 0.0

    def begin_step(self, step: int) -> None:
        """A step is planned."""
        if step % EVERY_STEPS:
            return
        self._usual_steps = max(self._waiting.take_longest_steps(), self._usual_steps / 2)
        if self.head() is None:  # one that is being read from disk gives way to another that can run
            least = STARVED_STEPS + 2 * self._usual_steps
            self._waiting.favoured = self._find(step, least, self._at_hand) or self._find(step, least, lambda _: True)

    def head(self) -> Request | None:
        """The favoured request; None while its adapter is being read from disk, since nobody can make that faster."""
        request = self._waiting.favoured
        return request if request is not None and self._at_hand(request.adapter) else None

    def _find(self, step: int, least_steps: float, counts: Callable[[str | None], bool]) -> Request | None:
        found = self._waiting.longest(step, counts)
        return found[1] if found is not None and found[0] >= least_steps else None

    def _at_hand(self, adapter: str | None) -> bool:
        return adapter is None or self._residency.sound(adapter)
