"""Makes room in the pool: what idles goes first, then adapters that only newer requests want. What an operator keeps
goes only where a request could not run otherwise, though nobody else does.
"""

from __future__ import annotations

from collections.abc import Sequence

from stencilpress.engine.activity import Activities
from stencilpress.engine.adapters import Adapter, Adapters, Tier
from stencilpress.engine.eviction import Room, Shelf
from stencilpress.engine.plan import DropOrder, LoadOrder
from stencilpress.engine.pool import Pool

WAY_SHARE = 512
"""Of the pool's pages the part that is evicted from the prefix cache at once when there is none for the next token."""


class Evictor:
    """``orders`` is where the loader's are put; ``squeezed`` are wanted adapters that found, or kept, no room."""

    def __init__(
        self, pool: Pool, room: Room, activities: Activities, max_adapter_pages: int, orders: list[LoadOrder]
    ) -> None:
        self.adapters: Adapters
        self.evictions = 0
        self.squeezed: dict[str, None] = {}
        self._pool = pool
        self._room = room
        self._activities = activities
        self._max_adapter_pages = max_adapter_pages
        self._orders = orders

    def make_room(self, pages: int, arrival: int, tenant: int) -> bool:
        """Evict until ``pages`` are free for keys and values of a tenant.

        What idles goes first, then adapters that only requests newer than ``arrival`` want. All or nothing: False, and
        nothing is evicted, when that would not free enough.
        """
        missing = self._missing(pages)
        newer = self._newer(arrival) if missing > self._room.idle else []
        if missing > self._room.idle + _held(newer):
            return False
        missing -= self._reclaim((self._room.adapters, self._room.cached), missing, tenant)
        self._evict_first(newer, missing)
        lacking = pages - self._pool.free
        if lacking <= self._room.cached.size:  # rather than wait for the step in flight
            self._reclaim((self._room.cached,), lacking, tenant)
        return self._pool.free >= pages

    def make_way(self, tenant: int) -> None:
        """Evict for one page: cached ones at once, or what :meth:`evict_one` finds, unless pages come back anyway."""
        while self._missing(1) > 0 and self.evict_one(tenant):
            pass
        if not self._pool.free:
            self._reclaim((self._room.cached,), 1 + self._pool.total // WAY_SHARE, tenant)

    def evict_one(self, tenant: int) -> bool:
        """Evict one thing, an idle one if there is one. False if all is pinned or still loading."""
        if self._reclaim((self._room.adapters, self._room.cached), 1, tenant):
            return True
        return self._evict_first(self._newer(-1), 1) > 0

    def evict_kept(self, but: str | None) -> bool:
        """Evict one adapter that an operator keeps and nobody leases; ``but`` is spared. For the only request that
        could run now: it would wait for ever. False if there is none, or while one is coming that may go instead."""
        if any(adapter.coming for adapter in self.adapters):
            return False
        kept = (a for a in self.adapters if a.kept and not a.leases and a.digest != but)
        adapter = next(kept, None)
        if adapter is not None:
            self.evict(adapter)
        return adapter is not None

    def make_adapter_room(self, adapter: Adapter, arrival: int, *, over: bool) -> bool:
        """The same for an adapter, within the pages that all of them may have; ``over`` spares tenants in their share.

        False if that frees too few. Then a tenant that came below its share on the way may have lost something in vain.
        """
        room, tenant, needs = self._room, adapter.tenant, adapter.needs
        missing, excess = self._missing(needs), self._pool.adapter + needs - self._max_adapter_pages
        if missing <= 0 and excess <= 0:
            return True
        newer = [a for a in self._newer(arrival) if not over or a.tenant == tenant or room.exceeds(a.tenant)]
        adapters = room.reachable(room.adapters, tenant, over=over) + _held(newer)
        if excess > adapters or missing > adapters + room.reachable(room.cached, tenant, over=over):
            return False
        excess -= room.reclaim((room.adapters,), excess, tenant, over=over)
        excess -= self._evict_first(newer, excess)
        missing = self._missing(needs)
        missing -= room.reclaim((room.adapters, room.cached), missing, tenant, over=over)
        missing -= self._evict_first(newer, missing)
        return missing <= 0 and excess <= 0

    def evict(self, adapter: Adapter) -> None:
        """Take an adapter out of the pool that nobody leases."""
        with self.adapters.changing(adapter):
            self.leave_pool(adapter)
        self._orders.append(DropOrder(adapter.digest, "hbm"))
        self.evictions += 1
        self._activities.of(adapter.digest).evictions += 1
        if adapter.wanted is not None:
            self.squeezed[adapter.digest] = None

    def leave_pool(self, adapter: Adapter) -> None:
        """Give its pages back, in the middle of a change."""
        self._pool.release(adapter.held, adapter.last_read)
        self._room.charge(adapter.tenant, -adapter.size)
        adapter.held, adapter.size, adapter.kept = (), 0, False
        adapter.tier = Tier.DISK if adapter.image is None else Tier.HOST

    def _missing(self, pages: int) -> int:
        return pages - self._pool.free - self._pool.quarantined

    def _newer(self, arrival: int) -> list[Adapter]:
        """Unpinned adapters in the pool that only requests newer than ``arrival`` want, newest first."""
        return [adapter for adapter in self.adapters.newer(Tier.HBM, arrival) if not adapter.pinned]

    def _evict_first(self, adapters: list[Adapter], pages: int) -> int:
        """Evict from the front of a list until so many pages are given up; returns how many were."""
        given = 0
        while given < pages and adapters:
            given += adapters[0].size
            self.evict(adapters.pop(0))
        return given

    def _reclaim(self, shelves: tuple[Shelf, ...], size: int, tenant: int) -> int:
        """Evict what idles for keys and values: in the last resort whosever it is."""
        given = self._room.reclaim(shelves, size, tenant, over=True) if self._room.exceeds(tenant) else 0
        return given + self._room.reclaim(shelves, size - given, tenant, over=False)


def _held(adapters: Sequence[Adapter]) -> int:
    return sum(adapter.size for adapter in adapters)
