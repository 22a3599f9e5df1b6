"""The requests that run: each holds a slot, KV pages and a lease of its adapter, all taken and given up together."""

from __future__ import annotations

from stencilpress.engine.limits import Limits
from stencilpress.engine.plan import RequestKey
from stencilpress.engine.pool import Pool
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency


class Seats:
    """``taken`` are the seated requests, the longest seated first; ``granted`` counts them by adapter, likewise."""

    def __init__(self, limits: Limits, pool: Pool, residency: Residency) -> None:
        self.taken: dict[RequestKey, Request] = {}
        self.granted: dict[str, int] = {}
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def free(self) -> int:
        return self._limits.seats - len(self.taken)

    @property
    def last(self) -> Request:
        """Whoever was seated last. There must be one."""
        return next(reversed(self.taken.values()))

    def take(self, request: Request) -> bool:
        """Seat a request whose adapter is ready, with pages for all its tokens. False if the pool has too few.

        One page beside is left for each who sits already, lest the newcomer be preempted for their next token.
        """
        pages = self._limits.pages_for(len(request.history))
        if not self._residency.make_room(pages + len(self.taken), request.arrival):
            return False
        request.sit(self._slots.pop(), self._pool.allocate(pages, request.key) or ())
        self.taken[request.key] = request
        if request.adapter is not None:
            self._residency.lease(request.adapter)
            self.granted[request.adapter] = self.granted.get(request.adapter, 0) + 1
        return True

    def leave(self, request: Request) -> None:
        """Take everything back; the request keeps its tokens."""
        del self.taken[request.key]
        self._slots.append(request.slot)
        self._pool.release(request.rise())
        if request.adapter is not None:
            self._residency.release(request.adapter)
            self.granted[request.adapter] -= 1
            if not self.granted[request.adapter]:
                del self.granted[request.adapter]

    def grow(self, request: Request) -> bool:
        """Make sure that the next token has a page, evicting adapters that nobody leases. False if none is free."""
        if request.length <= len(request.pages) * self._limits.page_tokens:
            return True
        while not self._pool.free + self._pool.quarantined and self._residency.evict_one():
            pass
        page = self._pool.allocate(1, request.key)
        request.pages += page or ()
        return page is not None
