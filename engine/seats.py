"""The requests that run: each holds a slot, KV pages and a lease of its adapter, all taken and given up together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from stencilpress.engine.accounts import Account
from stencilpress.engine.limits import Limits
from stencilpress.engine.plan import Page, RequestKey
from stencilpress.engine.pool import Owner, Pool, PoolError
from stencilpress.engine.prefix import Chain, PrefixCache, Space
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency

CAUTION_UP, CAUTION_DOWN = 0.25, 0.98
"""Added for each request preempted for a page; kept for each that ends of itself."""
FIRST, NEXT = -1, 0
"""Before all others in residency's order: who is seated while nobody runs; and who is next, behind those who run."""


@dataclass(slots=True)
class Grant:
    """An adapter's slot: how many requests share it, the longest answer of those that have left, and the step since
    which it has had the slot, or none of the others that wanted it."""

    requests: int = 0
    longest_answer: int = 0
    since: int = 0

    def patience(self, most: int) -> int:
        """For how many steps others let its newcomers pass: as long as its longest request runs, ``most`` at most."""
        return min(self.longest_answer or most, most)


class Seats:
    """``taken`` are the seated requests, the longest seated first; ``granted`` are their adapters, likewise.

    ``caution`` is the part of the answers still owed for which a newcomer must leave pages: from none to all. It grows
    with each preemption, so that a pool in which answers do not fit side by side is not thrashed for long.
    The first pages of a request may be common ones (engine/prefix.py): they hold full pages that are computed.
    """

    def __init__(self, limits: Limits, pool: Pool, residency: Residency, prefixes: PrefixCache) -> None:
        self.taken: dict[RequestKey, Request] = {}
        self.granted: dict[str, Grant] = {}
        self.caution = 0.0
        self._owed_tokens = 0
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self._prefixes = prefixes
        self._chains: dict[RequestKey, Chain] = {}
        self._vacated: tuple[str, Grant] = ("", Grant())
        """The adapter that gave up its slot last. If it is also the next to get one, nobody else has had a turn."""
        self._slots = list(range(limits.max_num_seqs - 1, -1, -1))

    @property
    def free(self) -> int:
        return self._limits.seats - len(self.taken)

    @property
    def longest_holder(self) -> tuple[str, Grant]:
        """Of the slots. While all are free, who had one last: requests of a single step leave none at the next one."""
        return next(iter(self.granted.items()), self._vacated)

    def take(self, request: Request, step: int) -> bool:
        """Seat in this step a request whose adapter is ready, with pages for all its tokens. False if too few are left.

        Some are left for those who sit already, one for each at least, lest the newcomer be preempted for their sake.
        Whoever finds nobody seated may have all that is not in use, at last what an operator keeps.
        """
        while not self._take(request, step):
            if self.taken or not self._residency.evict_kept(request.adapter):
                return False
        return True

    def landed(self, request: Request, count: int) -> None:
        """``count`` tokens more of a request are computed: pages that are full now become common."""
        width = self._limits.page_tokens
        chain = self._chains.get(request.key) if request.computed % width < count else None
        if chain is None:
            return
        for i in range(len(chain), request.computed // width):
            page = self._prefixes.add(chain, request.history[i * width : (i + 1) * width], request.pages[i])
            if page != request.pages[i]:
                request.pages = (*request.pages[:i], page, *request.pages[i + 1 :])

    def condemn(self, request: Request) -> None:
        """What was computed of a request is wrong: nobody may find it."""
        chain = self._chains.get(request.key)
        if chain is not None:
            self._prefixes.condemn(chain)

    def leave(self, request: Request) -> None:
        """Take everything back; the request keeps its tokens."""
        del self.taken[request.key]
        self._slots.append(request.slot)
        self._owed_tokens -= request.owed
        chain = self._chains.pop(request.key, None)
        pages = request.rise()
        self._pool.release(pages[len(chain) if chain is not None else 0 :])
        if chain is not None:
            self._prefixes.close(chain)
        if request.adapter is not None:
            self._residency.release(request.adapter)
            grant = self.granted[request.adapter]
            grant.requests -= 1
            grant.longest_answer = max(grant.longest_answer, request.generated)
            if not grant.requests:
                self._vacated = request.adapter, self.granted.pop(request.adapter)

    def answered(self) -> None:
        """Somebody seated has got a token of the answer."""
        self._owed_tokens -= 1

    def pressed(self) -> None:
        """Somebody is preempted for a page."""
        self.caution = min(1.0, self.caution + CAUTION_UP)

    def relieved(self) -> None:
        """Somebody has had a whole answer."""
        self.caution *= CAUTION_DOWN

    def grow(self, request: Request) -> bool:
        """Make sure that the next token has a page, evicting what idles or is only wanted. False if none is free."""
        if request.length <= len(request.pages) * self._limits.page_tokens:
            return True
        if not self._pool.free:
            self._residency.make_way(request.tenant)
            if not (self._pool.free or self._pool.quarantined) and len(self.taken) == 1:
                self._residency.evict_kept(request.adapter)
        page = self._pool.allocate(1, request.key)
        request.pages += page or ()
        return page is not None

    def victim(self, parked: Collection[int]) -> Request:
        """Who gives up a seat for a page: of a parked gateway, else of the tenant that has had most the least urgent
        and then the last one seated. There must be one."""
        order = [
            (request.key[0] in parked, request.account.counter, -request.priority, nth)
            for nth, request in enumerate(self.taken.values())
        ]
        return next(islice(self.taken.values(), max(order)[-1], None))

    def last_of_richest(self, but: Account) -> Request | None:
        """Of the tenant that has most seats for its weight, and more than one, whoever was seated last.

        None if there is no such tenant, or ``but`` has a seat.
        """
        seats = Counter(request.account for request in self.taken.values())
        if but in seats or not seats:
            return None
        richest = max(seats, key=lambda account: seats[account] / account.weight)
        last = next(request for request in reversed(self.taken.values()) if request.account is richest)
        return last if seats[richest] > 1 else None

    def forget(self, adapter: str) -> int:
        """An adapter is no more. Returns the pages that those seated hold of it, and of its common prefixes."""
        return self._residency.forget(adapter) + self._prefixes.forget(adapter)

    def held(self) -> Iterator[str]:
        """Adapters that :meth:`forget` would matter to, some more than once."""
        yield from self._residency.held()
        yield from self._prefixes.adapters()

    def holdings(self) -> Iterator[tuple[Owner, Sequence[Page]]]:
        """Who holds which pages, for :meth:`Pool.check`."""
        yield self._prefixes.holdings()
        for key, request in self.taken.items():
            chain = self._chains.get(key)
            common = chain.pages if chain is not None else ()
            if request.pages[: len(common)] != common:
                raise PoolError(f"request {key} reads pages {request.pages} that should begin with {common}")
            yield key, request.pages[len(common) :]

    def _take(self, request: Request, step: int) -> bool:
        """The same without what an operator keeps."""
        order = request.order if self.taken else FIRST
        if request.adapter is not None:
            self._residency.want(request.adapter, order, request.tenant)  # lest it evict its own
        chain = self._prefixes.open(Space(request.adapter or "", request.tenant, request.salt), request.history)
        common = chain.pages if chain is not None else ()
        missing = self._limits.pages_for(len(request.history)) - len(common)
        if not self._residency.make_room(missing + self._reserve(request), order, request.tenant):
            if chain is not None:
                self._prefixes.close(chain)
            return False
        again = not request.unbegun
        request.sit(self._slots.pop(), common + (self._pool.allocate(missing, request.key) or ()))
        self.taken[request.key] = request
        self._owed_tokens += request.owed
        if chain is not None:
            self._chains[request.key] = chain
            request.skip(self._prefixes.use(chain, again=again))
        if request.adapter is not None:
            self._residency.lease(request.adapter, request.tenant, again=again)
            self._grant(request.adapter, step)
        return True

    def _grant(self, adapter: str, step: int) -> None:
        grant = self.granted.get(adapter)
        if grant is None:
            last, grant = self._vacated
            if last != adapter:
                grant = Grant(since=step)
            self._vacated = ("", Grant())
            self.granted[adapter] = grant
        grant.requests += 1

    def _reserve(self, newcomer: Request) -> int:
        if not self.taken:
            return 0
        owed = self.caution * (self._owed_tokens + newcomer.owed)
        return max(len(self.taken), math.ceil(owed / self._limits.page_tokens))
