"""The adapter that has waited for a slot for as long as requests of its holder run: it is next among its tenant's."""

from __future__ import annotations

from itertools import islice

from stencilpress.engine.admission import PRIORITY_STEPS
from stencilpress.engine.limits import Limits
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency
from stencilpress.engine.seats import Seats
from stencilpress.engine.waiting import Waiting

LOOKED_AT = 64
"""Lines without a seat for longest that are looked at in a step."""


class Overdue:
    """``adapter`` is the one, until a request of it is seated; None if there is none.

    Arrival alone would let all of a holder's requests go first that came earlier, preempted ones among them: as many
    as the queue holds, one after another where the pool holds few. One at a time is enough for a bound, and leaves the
    other slots to those who came first. Between tenants counters decide, before this and after.
    """

    def __init__(self, limits: Limits, waiting: Waiting, residency: Residency, seats: Seats) -> None:
        self.adapter: str | None = None
        self._waiting = waiting
        self._residency = residency
        self._seats = seats
        self._max_loras = limits.max_loras
        self._patience_steps = limits.patience_steps
        self._since = 0

    def begin_step(self, step: int) -> None:
        """A step is planned: drop the one whose requests are gone, and look for another."""
        if self.adapter is not None and not self._waiting.stands_since(self.adapter, self._since - 1):
            self.adapter = None
        if self.adapter is None and len(self._seats.granted) in (0, self._max_loras):
            self.adapter, self._since = self._find(step), step

    def seated(self, adapter: str | None) -> None:
        """A request of an adapter has got a seat."""
        if adapter == self.adapter:
            self.adapter = None

    def first(self, request: Request) -> bool:
        """Whether a request goes before its tenant's others: it is of that adapter, or must not be passed by it.

        That is one whose tenant has had no seat with its own adapter for even longer, though other tenants may have had
        some; and one of the base that came earlier: the base is never overdue, since it needs no slot.
        """
        if self.adapter is None or request.adapter == self.adapter:
            return self.adapter is not None
        since = self._waiting.tenant_since
        if since(request.adapter, request.tenant) < since(self.adapter, request.tenant):
            return True
        head = self._waiting.head(self.adapter) if request.adapter is None else None
        return head is not None and request.urgency < head.urgency

    def head(self) -> Request | None:
        """Its first request; None while the adapter is being read from disk, since nobody can make that faster."""
        at_hand = self.adapter is not None and self._residency.sound(self.adapter)
        return self._waiting.head(self.adapter) if at_hand else None

    def _find(self, step: int) -> str | None:
        """Of those without a slot who have been passed for long enough by the longest holder, who waits longest."""
        holder, grant = self._seats.longest_holder
        rival, patience = self._waiting.head(holder), grant.patience(self._patience_steps)
        if rival is None or step - grant.since < patience:
            return None
        for adapter in islice(self._waiting.oldest(), LOOKED_AT):
            waited = step - self._waiting.since(adapter)
            if waited < patience:
                return None
            if (
                adapter is None
                or adapter == holder
                or adapter in self._seats.granted
                or not self._residency.sound(adapter)
            ):
                continue
            head = self._waiting.head(adapter)
            if head is not None and waited >= patience + _outranked_steps(head, rival):
                return adapter
        return None


def _outranked_steps(request: Request, rival: Request) -> float:
    """For how much longer a rival goes first: by priority, and for ever where its tenant has had less."""
    if rival.account.counter < request.account.counter:
        return float("inf")
    return PRIORITY_STEPS * max(0, rival.priority - request.priority)
