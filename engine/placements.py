"""Which wanted adapters in host memory, or on their way there, get pages of the pool next."""

from __future__ import annotations

from collections import Counter
from heapq import merge

from stencilpress.engine.adapters import Adapter, Adapters, Tier
from stencilpress.engine.eviction import Room
from stencilpress.engine.evictor import Evictor
from stencilpress.engine.plan import LoadOrder, Page, PlaceOrder
from stencilpress.engine.pool import Pool

BARRED_S = 2.0
"""How long the wants of a tenant over its share may find no room; then one of them is treated like anybody's."""


class Placements:
    """At most ``max_prefetched`` wanted adapters that nobody leases are in the pool. ``orders`` is where the loader's
    are put."""

    def __init__(
        self,
        pool: Pool,
        room: Room,
        adapters: Adapters,
        evictor: Evictor,
        max_prefetched: int,
        orders: list[LoadOrder],
    ) -> None:
        self._pool = pool
        self._room = room
        self._clock = room.clock
        self._adapters = adapters
        self._evictor = evictor
        self._squeezed = evictor.squeezed
        self._max_prefetched = max_prefetched
        self._orders = orders
        self._barred: dict[int, float] = {}
        self._loading: Counter[int] = Counter()

    def pump(self, newest: int | None) -> bool:
        """Order placements for wants up to ``newest``, as many as there is room for. False if there are no wants that
        could be placed."""
        coming = [want for want in self._adapters.wants[Tier.FETCHING] if self._adapters[want[1]].needs]
        if coming or self._adapters.wants[Tier.HOST]:
            self._place_oldest(coming, newest)
            return True
        self._barred.clear()
        self._loading = +self._loading
        return False

    def order(self, adapter: Adapter, pages: tuple[Page, ...]) -> None:
        """Have an adapter copied into pages that are its own, in the middle of a change."""
        adapter.tier, adapter.held, adapter.size = Tier.LOADING, pages, len(pages)
        self._loading[adapter.tenant] += 1
        self._room.charge(adapter.tenant, len(pages))
        self._orders.append(PlaceOrder(adapter.digest, pages))

    def ended(self, adapter: Adapter) -> None:
        """The copy is done, or has failed."""
        self._loading[adapter.tenant] -= 1

    def _place_oldest(self, coming: list[tuple[int, str]], newest: int | None) -> None:
        """Place the oldest wants in memory, or ``coming`` there, that nobody leases, as many as may be in the pool
        ahead of their requests.

        The wants of a tenant over its share that find no room stand aside for those of others.
        """
        ahead = 0
        barred: set[int] = set()
        for arrival, digest in merge(
            coming, *(list(self._adapters.wants[tier]) for tier in (Tier.HOST, Tier.LOADING, Tier.HBM))
        ):
            adapter = self._adapters[digest]
            if ahead == self._max_prefetched or (newest is not None and arrival > newest):
                return
            outside = adapter.tier in (Tier.HOST, Tier.FETCHING)
            if adapter.leases or (outside and adapter.tenant in barred):
                continue
            if outside and not self._place(adapter, arrival):
                barred.add(adapter.tenant)
            else:
                ahead += 1

    def _place(self, adapter: Adapter, arrival: int) -> bool:
        """Order a placement if there is room. False if there is none for a tenant over its share."""
        tenant, needs = adapter.tenant, adapter.needs
        over = self._room.exceeds(tenant, needs)
        made = self._evictor.make_adapter_room(adapter, arrival, over=over)
        if over and not made:
            if self._room.exceeds(tenant, needs) and self._own_room_comes(tenant):
                self._squeezed.pop(adapter.digest, None)
                return False
            made = self._evictor.make_adapter_room(adapter, arrival, over=False)
        pages = self._pool.allocate(needs, adapter.digest) if made else None
        if pages is None:
            self._squeezed[adapter.digest] = None
            return True
        self._barred.pop(tenant, None)
        with self._adapters.changing(adapter):
            self.order(adapter, pages)
        return True

    def _own_room_comes(self, tenant: int) -> bool:
        """Whether a tenant over its share is to wait, at most :data:`BARRED_S`, for what it holds to become idle.

        It will, if that is being loaded, or if requests run, whose seats the tenant's own get next.
        """
        runs = self._pool.kv + self._pool.cached > self._room.cached.size
        if not (self._loading[tenant] or (runs and self._room.busy(tenant))):
            return False
        return self._clock() - self._barred.setdefault(tenant, self._clock()) < BARRED_S
