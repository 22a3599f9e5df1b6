"""Whose turn it is: the tenant that has had least, with adapters that pass each other for a bounded time only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from stencilpress.engine.limits import Limits
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency
from stencilpress.engine.seats import NEXT, Seats
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
      take no newcomers, so slots free.
    - The pool lacks room for its adapter: anybody, as long as the longest request of those that hold slots has run, or
      for ``patience_steps``; then nobody is seated, so pages free.
    - Its adapter is being read from disk: anybody, since nobody's standing back would make the disk faster.
    """

    def __init__(self, limits: Limits, waiting: Waiting, residency: Residency, seats: Seats) -> None:
        self.step = 0
        self._waiting = waiting
        self._residency = residency
        self._seats = seats
        self._max_loras = limits.max_loras
        self._patience_steps = limits.patience_steps
        self._outsiders: list[Request] | None = None

    def begin_step(self) -> None:
        """A step is planned."""
        self.step += 1
        self._outsiders = None

    def take(self, request: Request) -> None:
        """The request that :meth:`next` has picked leaves its line for a seat."""
        self._waiting.seat(request, self.step)
        self._outsiders = None

    def next(self) -> Request | None:
        """The next request that may be seated now."""
        chosen = min(self._insiders(), key=_turn, default=None)
        if len(self._seats.granted) < self._max_loras:
            fresh = next(iter(self._without_slot()), None)
            if fresh is not None and (chosen is None or _turn(fresh) < _turn(chosen)):
                chosen = fresh
        if chosen is not None and self._standing_back(chosen):
            return None
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
        return min(heads, key=_turn, default=None)

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
        return True

    def _patience(self) -> int:
        """For how many steps one that lacks room is passed: as long as the longest request of all holders runs."""
        grants, most = self._seats.granted.values(), self._patience_steps
        return min(most, max((grant.longest_answer or most for grant in grants), default=most))

    def _standing_back(self, chosen: Request) -> bool:
        """Whether it must wait for an adapter that has lacked room for too long: for pages of those who run, or, once
        it has its pages, for the copy."""
        squeezed = self.squeezed()
        if squeezed is None or squeezed.adapter is None or _turn(squeezed) >= _turn(chosen):
            return False
        return bool(self._seats.taken) or self._residency.coming(squeezed.adapter)

    def _insiders(self) -> Iterator[Request]:
        """Heads of lines that need no further slot, those apart that must let others have theirs."""
        base = self._waiting.head(None)
        if base is not None:
            yield base
        starving: list[Request] = []
        if len(self._seats.granted) >= self._max_loras:
            starving = self._without_slot()[: max(1, self._max_loras // 2)]
        for nth, (adapter, grant) in enumerate(self._seats.granted.items()):
            head = self._waiting.head(adapter)
            if head is None:
                continue
            if nth < len(starving) and _turn(starving[0]) < _turn(head):
                patience = min(grant.longest_answer or self._patience_steps, self._patience_steps)
                if self.step - self._waiting.since(starving[nth].adapter) >= patience:
                    continue
            yield head

    def _without_slot(self) -> list[Request]:
        """Heads of lines whose adapter is in the pool but has no slot, in the order of their turns."""
        if self._outsiders is None:
            granted = self._seats.granted
            digests = (digest for _, digest in self._residency.ready_wants() if digest not in granted)
            heads = (self._waiting.head(digest) for digest in islice(digests, OUTSIDERS))
            self._outsiders = sorted((head for head in heads if head is not None), key=_turn)
        return self._outsiders


def prefill_turn(request: Request) -> float:
    """Of prompts to be computed those of a lower number go first, of equal ones the first seated."""
    return request.account.counter // PREFILL_TURN_TOKENS


def _turn(request: Request) -> tuple[float, tuple[int, int]]:
    return request.account.counter, request.urgency
