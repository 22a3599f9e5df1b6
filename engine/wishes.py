"""Brings in adapters that nobody waits for: what operators keep, and what was used of late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stencilpress.engine.activity import Activities
from stencilpress.engine.adapters import Adapter, Adapters, Tier
from stencilpress.engine.evictor import Evictor
from stencilpress.engine.faults import Faults
from stencilpress.engine.fetches import Fetches
from stencilpress.engine.host import HostMemory
from stencilpress.engine.kept import Kept
from stencilpress.engine.plan import Page
from stencilpress.engine.pool import Pool

PREDICT_S = 1.0
"""How often an adapter is brought back that nobody waits for."""
SPARE_SHARE = 8
"""Of the pool's pages the part that such adapters, and preloaded ones, leave free."""
PIN_SHARE = 2
"""Of the adapters' part of the pool the part that pinned ones may take."""
NEWEST = 1 << 256
"""Comes after every request in residency's order."""


class Wishes:
    """One adapter at a time. ``place`` orders a placement, in the middle of a change."""

    def __init__(
        self,
        pool: Pool,
        adapters: Adapters,
        activities: Activities,
        faults: Faults,
        absences: Faults,
        host: HostMemory,
        fetches: Fetches,
        evictor: Evictor,
        max_adapter_pages: int,
        place: Callable[[Adapter, tuple[Page, ...]], None],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._adapters = adapters
        self._activities = activities
        self._faults = (faults, absences)
        self._host = host
        self._fetches = fetches
        self._evictor = evictor
        self._max_adapter_pages = max_adapter_pages
        self._place = place
        self._clock = clock
        self._kept = Kept()
        self._beyond: set[str] = set()
        """What is to be pinned, but does not fit the part for such adapters."""
        self._crowded = False
        """Whether a pin has found no room in the pool since the wishes were looked through last."""
        self._predict_at_s = clock() + PREDICT_S

    def keep(self, gateway: int, pinned: Sequence[str], preloaded: Sequence[str]) -> str:
        """What a gateway wants to be at hand, instead of what it wanted before. Returns why not, or an empty string."""
        before = self._kept.pinned
        error = self._kept.say(gateway, pinned, preloaded)
        self._crowded = False
        after = self._kept.pinned
        if before.keys() != after.keys():
            self._beyond.clear()
            self._pin_all([*(digest for digest in before if digest not in after), *after])
        return error

    def pins(self, digest: str) -> bool:
        """Whether some gateway wants it pinned, be there room for it or not."""
        return digest in self._kept.pinned

    def forget(self, digest: str) -> None:
        """An adapter is no more: it is not brought in for nobody."""
        self._activities.cool(digest)
        self._kept.unwish(digest)

    def likely(self) -> Iterator[tuple[float, str]]:
        """What was used of late and is not in the pool, each with its uses: likely to be wanted again."""
        now_s = self._clock()
        for seen in self._activities:
            uses = seen.heat.at(now_s)
            if uses >= 1 and not seen.error and not self._in_pool(seen.digest):
                yield uses, seen.digest

    def pin(self, adapter: Adapter) -> None:
        """Pin an adapter in the pool that is to be, if the part for such adapters has room; or no longer. In the middle
        of a change."""
        most = self._max_adapter_pages // PIN_SHARE
        adapter.kept = False
        if adapter.digest in self._kept.pinned:
            others = sum(other.size for other in self._adapters if other.kept)
            adapter.kept = others + adapter.size <= most
            if not adapter.kept:
                self._beyond.add(adapter.digest)

    def _pin_all(self, digests: Sequence[str]) -> None:
        """The same for those of these that are in the pool: first what is to be pinned no longer, to make room."""
        for digest in digests:
            adapter = self._adapters.get(digest)
            if adapter is not None and adapter.tier is Tier.HBM and adapter.kept != self.pins(digest):
                with self._adapters.changing(adapter):
                    self.pin(adapter)

    def pump(self) -> None:
        """Nobody waits for a load: order one for an adapter that is kept, or likely to be wanted again."""
        if not self._kept.wishes and self._clock() >= self._predict_at_s:
            self._predict_at_s = self._clock() + PREDICT_S
            self._predict()
        while self._kept.wishes:
            adapter = self._adapters.make(self._kept.wishes[0])
            with self._adapters.changing(adapter):
                under_way = self._advance(adapter)
            if under_way:
                return
            self._kept.wishes.popleft()

    def _advance(self, adapter: Adapter) -> bool:
        """Bring an adapter nearer to the pool. False if it has arrived, or there is no room for it."""
        if adapter.tier is Tier.DISK:
            if any(one.current(adapter.digest) for one in self._faults) or not self._has_host_room(adapter):
                return False
            adapter.tenant = self._activities.last_tenant(adapter.digest)
            self._fetches.order(adapter)
        elif adapter.tier is Tier.HOST:
            if adapter.needs > self._max_adapter_pages:
                self._beyond.add(adapter.digest)
                return False
            pages = self._pool.allocate(adapter.needs, adapter.digest) if self._has_pool_room(adapter) else None
            if pages is None:
                self._crowded = self._crowded or self.pins(adapter.digest)
                return False
            self._place(adapter, pages)
        return adapter.tier is not Tier.HBM

    def _has_host_room(self, adapter: Adapter) -> bool:
        """Others give way to what is to be pinned, but not while the pool has no room for such: it would be read in
        vain, again and again where host memory does not hold all pins."""
        pinned = self.pins(adapter.digest) and not self._crowded
        return not self._host.full or (pinned and self._fetches.make_room(NEWEST, adapter.tenant))

    def _has_pool_room(self, adapter: Adapter) -> bool:
        if adapter.digest in self._kept.pinned:
            return self._evictor.make_adapter_room(adapter, NEWEST, over=False)
        roomy = self._pool.free >= adapter.needs + self._pool.total // SPARE_SHARE
        return roomy and self._pool.adapter + adapter.needs <= self._max_adapter_pages

    def _predict(self) -> None:
        """Wish for all that should be pinned but has found no place, or lost it, and for the adapter used most of late
        that has left the pool."""
        self._crowded = False
        for digest in self._kept.pinned:
            if digest not in self._beyond and not self._in_pool(digest):
                self._kept.wish(digest)
        away = max(self.likely(), default=None)
        if away is not None:
            self._kept.wish(away[1])

    def _in_pool(self, digest: str) -> bool:
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.tier is Tier.HBM
