"""The requests that run: each holds a slot, KV pages and a lease of its adapter, all taken and given up together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stencilpress.engine.limits import Limits
from stencilpress.engine.plan import Page, RequestKey
from stencilpress.engine.pool import Owner, Pool, PoolError
from stencilpress.engine.prefix import Chain, PrefixCache, Space
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency


class Seats:
    """``taken`` are the seated requests, the longest seated first; ``granted`` counts them by adapter, likewise.

    The first pages of a request may be common ones (engine/prefix.py): they hold full pages that are computed.
    """

    def __init__(self, limits: Limits, pool: Pool, residency: Residency, prefixes: PrefixCache) -> None:
        self.taken: dict[RequestKey, Request] = {}
        self.granted: dict[str, int] = {}
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self._prefixes = prefixes
        self._chains: dict[RequestKey, Chain] = {}
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
        chain = self._prefixes.open(Space(request.adapter or "", request.tenant, request.salt), request.history)
        common = chain.pages if chain is not None else ()
        missing = self._limits.pages_for(len(request.history)) - len(common)
        if not self._residency.make_room(missing + len(self.taken), request.arrival, request.tenant):
            if chain is not None:
                self._prefixes.close(chain)
            return False
        request.sit(self._slots.pop(), common + (self._pool.allocate(missing, request.key) or ()))
        self.taken[request.key] = request
        if chain is not None:
            self._chains[request.key] = chain
            request.skip(self._prefixes.use(chain))
        if request.adapter is not None:
            self._residency.lease(request.adapter, request.tenant)
            self.granted[request.adapter] = self.granted.get(request.adapter, 0) + 1
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
        chain = self._chains.pop(request.key, None)
        pages = request.rise()
        self._pool.release(pages[len(chain) if chain is not None else 0 :])
        if chain is not None:
            self._prefixes.close(chain)
        if request.adapter is not None:
            self._residency.release(request.adapter)
            self.granted[request.adapter] -= 1
            if not self.granted[request.adapter]:
                del self.granted[request.adapter]

    def grow(self, request: Request) -> bool:
        """Make sure that the next token has a page, evicting what idles or is only wanted. False if none is free."""
        if request.length <= len(request.pages) * self._limits.page_tokens:
            return True
        if not self._pool.free:
            self._residency.make_way(request.tenant)
        page = self._pool.allocate(1, request.key)
        request.pages += page or ()
        return page is not None

    def holdings(self) -> Iterator[tuple[Owner, Sequence[Page]]]:
        """Who holds which pages, for :meth:`Pool.check`."""
        yield self._prefixes.holdings()
        for key, request in self.taken.items():
            chain = self._chains.get(key)
            common = chain.pages if chain is not None else ()
            if request.pages[: len(common)] != common:
                raise PoolError(f"request {key} reads pages {request.pages} that should begin with {common}")
            yield key, request.pages[len(common) :]
