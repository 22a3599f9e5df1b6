"""Whose turn it is: the tenant that has had least, with adapters that pass each other for a bounded time only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from stencilpress.engine.limits import Limits
from stencilpress.engine.overdue import Overdue
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency
from stencilpress.engine.seats import NEXT, Grant, Seats
from stencilpress.engine.starved import Starved
from stencilpress.engine.waiting import Waiting

OUTSIDERS = 64
"""Adapters without a slot that are looked at: the first in residency's order, which is about that of their turns."""
YIELD_AFTER_STEPS, YIELD_EVERY_STEPS = 32, 16
"""How long a tenant that has no seat waits for one to become free, and how often one is taken from others for that."""
PREFILL_TURN_TOKENS = 2048
"""Prompts are computed one after another, but a tenant that has had so much more than others lets theirs go first:
several short ones are done sooner one by one than side by side, and a long one holds nobody up for longer."""


class Turns:
    """Picks the next request to be seated: of the tenant with the least counter the most urgent one.

    What may pass a request whose turn it is:

    - It lacks a slot: anybody, until it has waited for as long as requests of the longest holder run, or for
      ``patience_steps``. Then as many of the longest holders as there are such adapters, but half of the slots at most,
      take no newcomers, so slots free. One that has waited for so long behind earlier requests of its own tenant, be
      they preempted ones, has its turn before them (engine/overdue.py).
    - The pool lacks room for its adapter: anybody, as long as the longest request of those that hold slots has run, or
      for ``patience_steps``; then nobody is seated, so pages free.
    - Its adapter is being read from disk: anybody, since nobody's standing back would make the disk faster.

    One that has waited for far longer than others did is next, whatever its tenant has had (engine/starved.py).

    So with one slot a request waits for as long as the holder's longest request runs, and once more until all who have
    the slot have ended: unless its tenant has had more than theirs, or they are more urgent.
    """

    def __init__(self, limits: Limits, waiting: Waiting, residency: Residency, seats: Seats) -> None:
        self.step = 0
        self._waiting = waiting
        self._residency = residency
        self._seats = seats
        self._max_loras = limits.max_loras
        self._patience_steps = limits.patience_steps
        self._overdue = Overdue(limits, waiting, residency, seats)
        self._starved = Starved(waiting, residency)
        self._outsiders: list[Request] | None = None

    def begin_step(self) -> None:
        """A step is planned."""
        self.step += 1
        self._outsiders = None
        self._overdue.begin_step(self.step)
        self._starved.begin_step(self.step)

    def take(self, request: Request) -> None:
        """The request that :meth:`next` has picked leaves its line for a seat."""
        self._waiting.seat(request, self.step)
        self._overdue.seated(request.adapter)
        self._outsiders = None

    def leave(self, request: Request) -> None:
        """A request gives up its seat."""
        self._seats.leave(request)
        self._waiting.left(request, self.step)

    def next(self) -> Request | None:
        """The next request that may be seated now."""
        chosen = self._first()
        return None if chosen is not None and self._standing_back(chosen) else chosen

    def _first(self) -> Request | None:
        """Of those that could be seated now the one whose turn is first."""
        chosen = min(self._insiders(), key=self._turn, default=None)
        if len(self._seats.granted) < self._max_loras:
            fresh = next(iter(self._without_slot()), None)
            if fresh is not None and (chosen is None or self._turn(fresh) < self._turn(chosen)):
                chosen = fresh
        return chosen

    def yielding(self, *, blocked: bool) -> Request | None:
        """Who gives up a seat now, lest a tenant without any wait for others' long answers.

        It is the last one of the tenant that has most seats for its weight. ``blocked``: pages are lacking.
        """
        if self.step % YIELD_EVERY_STEPS or not len(self._waiting) or (self._seats.free and not blocked):
            return None
        self._outsiders = None  # of the last step; some may have ended since
        newcomer = self.next()
        if newcomer is None or self.step - newcomer.came_step < YIELD_AFTER_STEPS:
            return None
        victim = self._seats.last_of_richest(but=newcomer.account)
        return victim if victim is not None and victim.account.counter > newcomer.account.counter else None

    def squeezed(self) -> Request | None:
        """The first request whose adapter has lacked room in the pool for too long; where nobody runs, at all."""
        aged = self.step - (self._patience() if self._seats.taken else 0)
        aged_lines = (digest for digest in self._residency.squeezed() if self._waiting.stands_since(digest, aged))
        heads = [head for digest in aged_lines if (head := self._waiting.head(digest)) is not None]
        for head in (self._overdue.head(), self._starved.head()):
            if head is not None and head.adapter and head not in heads and not self._residency.ready(head.adapter):
                heads.append(head)
        return min(heads, key=self._turn, default=None)

    def squeezed_is_next(self) -> bool:
        """Whether the turn of that request is before those of all that could be seated now."""
        squeezed, chosen = self.squeezed(), self._first()
        return squeezed is not None and (chosen is None or self._turn(squeezed) < self._turn(chosen))

    def bring_in_squeezed(self) -> bool:
        """Place that request's adapter before all others; False if there is none. One that is in the pool by now waits
        for its request's turn like others: meanwhile those whose turns are earlier are placed."""
        squeezed = self.squeezed()
        if squeezed is None or squeezed.adapter is None:
            return False
        if self._residency.ready(squeezed.adapter):
            self._residency.want(squeezed.adapter, squeezed.order, squeezed.tenant)
            return False
        self._residency.bring_in(squeezed.adapter, NEXT, squeezed.tenant, alone=not self._seats.taken)
        self._outsiders = None  # some may have made room
        return True

    def _patience(self) -> int:
        """For how many steps one that lacks room is passed: as long as the longest request of all holders runs."""
        grants, most = self._seats.granted.values(), self._patience_steps
        return max((grant.patience(most) for grant in grants), default=most)

    def _standing_back(self, chosen: Request) -> bool:
        """Whether it must wait for an adapter that has lacked room for too long: for pages of those who run, or, once
        it has its pages, for the copy."""
        squeezed = self.squeezed()
        if squeezed is None or squeezed.adapter is None or self._turn(squeezed) >= self._turn(chosen):
            return False
        return bool(self._seats.taken) or self._residency.coming(squeezed.adapter)

    def _insiders(self) -> Iterator[Request]:
        """Heads of lines that need no further slot, those apart that must let others have theirs."""
        base = self._waiting.head(None)
        if base is not None:
            yield base
        starving = self._starving()
        for nth, (adapter, grant) in enumerate(self._seats.granted.items()):
            head = self._waiting.head(adapter)
            if head is not None and not self._makes_way(head, nth, grant, starving):
                yield head

    def _starving(self) -> list[Request]:
        """Those for whose adapters slots must become free, one each."""
        if len(self._seats.granted) < self._max_loras:
            return []
        return self._without_slot()[: max(1, self._max_loras // 2)]

    def _makes_way(self, request: Request, nth: int, grant: Grant, starving: list[Request]) -> bool:
        """Whether the ``nth`` longest holder must not have this request seated, since others wait for its slot."""
        heads = (self._overdue.head(), self._starved.head()) if nth == 0 else ()
        if any(head is not None and self._turn(head) < self._turn(request) for head in heads):
            return True
        if nth >= len(starving) or self._turn(starving[0]) >= self._turn(request):
            return False
        return self.step - self._waiting.since(starving[nth].adapter) >= grant.patience(self._patience_steps)

    def _without_slot(self) -> list[Request]:
        """Heads of lines whose adapter is in the pool but has no slot, in the order of their turns."""
        if self._outsiders is None:
            granted = self._seats.granted
            digests = (digest for _, digest in self._residency.ready_wants() if digest not in granted)
            some = dict.fromkeys(islice(digests, OUTSIDERS))
            starved = self._starved.head()
            adapter = starved.adapter if starved is not None else None
            if adapter is not None and adapter not in granted and self._residency.ready(adapter):
                some[adapter] = None  # however far behind its want is
            heads = (self._waiting.head(digest) for digest in some)
            self._outsiders = sorted((head for head in heads if head is not None), key=self._turn)
        return self._outsiders

    def _turn(self, request: Request) -> tuple[bool, float, bool, tuple[int, int]]:
        starved = request is self._waiting.favoured
        return not starved, request.account.counter, not self._overdue.first(request), request.urgency


def prefill_turn(request: Request) -> float:
    """Of prompts to be computed those of a lower number go first, of equal ones the first seated."""
    return request.account.counter // PREFILL_TURN_TOKENS
