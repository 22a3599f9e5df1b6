"""Which adapters are where: ``DISK -> FETCHING -> HOST -> LOADING -> HBM``, and back when room is needed. One that is
wanted goes from ``FETCHING`` to ``LOADING`` as soon as its size is known, and is copied while it is read.

Waiting requests *want* an adapter, running ones *lease* it. A leased adapter is pinned in the pool, and so is one that
an operator keeps; one that is neither leased nor wanted nor kept is idle, and goes when something of more worth needs
its pages (engine/eviction.py). All of it is bookkeeping: :meth:`Residency.pump` decides, :meth:`Residency.take_orders`
tells the loader, :meth:`Residency.completed` hears back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stencilpress.engine.activity import Activities, Activity
from stencilpress.engine.adapters import Adapter, Adapters, Tier
from stencilpress.engine.eviction import Room
from stencilpress.engine.evictor import Evictor
from stencilpress.engine.faults import Faults
from stencilpress.engine.fetches import Fetches
from stencilpress.engine.host import NO_LIMIT, HostMemory, Image
from stencilpress.engine.placements import Placements
from stencilpress.engine.plan import Fetched, LoadOrder, LoadResult, Page, Placed, Sized
from stencilpress.engine.pool import Pool
from stencilpress.engine.wishes import Wishes


@dataclass(frozen=True, slots=True)
class Capacity:
    """What adapters may take: images and bytes of host memory, pages of the pool.

    At most ``max_prefetched`` wanted adapters that nobody leases are in the pool: a request can use no more than that
    at once.
    """

    max_cpu_loras: int
    max_prefetched: int
    max_cpu_lora_bytes: int = NO_LIMIT
    max_adapter_pages: int = NO_LIMIT


class Residency:
    """Adapters in host memory and in the pool. ``room`` is the pool's, and keeps the clock."""

    def __init__(self, pool: Pool, room: Room, capacity: Capacity) -> None:
        self.loads = 0
        self.failures = 0
        self.activities = Activities()
        self.faults = Faults(room.clock)
        self._absences = Faults(room.clock)
        self.host = HostMemory(capacity.max_cpu_loras, capacity.max_cpu_lora_bytes, room.clock)
        self._pool = pool
        self._room = room
        self._clock = room.clock
        self._capacity = capacity
        self._forgotten: set[str] = set()
        self._orders: list[LoadOrder] = []
        self._most_pages = min(pool.total, capacity.max_adapter_pages)
        self._evictor = Evictor(pool, room, self.activities, capacity.max_adapter_pages, self._orders)
        self._adapters = Adapters(room, self.host, self.activities, self._evictor.evict)
        self._evictor.adapters = self._adapters
        self._squeezed = self._evictor.squeezed
        self._fetches = Fetches(self._adapters, self.host, self._orders)
        self._placements = Placements(pool, room, self._adapters, self._evictor, capacity.max_prefetched, self._orders)
        self._wishes = Wishes(
            pool,
            self._adapters,
            self.activities,
            self.faults,
            self._absences,
            self.host,
            self._fetches,
            self._evictor,
            self._most_pages,
            self._placements.order,
            room.clock,
        )

    # Asked for by requests

    def want(self, digest: str, arrival: int, tenant: int = 0) -> None:
        """Bring it in, and keep it, for a waiting request that came as number ``arrival``; replaces an earlier want."""
        adapter = self._adapters.make(digest)
        if adapter.wanted is None:
            self.activities.asked(digest, tenant)  # an operator sees who waits for a slow disk
        if adapter.wanted != arrival:
            with self._adapters.changing(adapter):
                adapter.wanted = arrival
                if adapter.image is None and not adapter.held:
                    adapter.tenant = tenant

    def unwant(self, digest: str) -> None:
        """Nobody waits for it any more."""
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.wanted is not None:
            self._squeezed.pop(digest, None)
            with self._adapters.changing(adapter):
                adapter.wanted = None
            self._settle(adapter)

    def check(self, digest: str, arrival: int) -> None:
        """Bring it into host memory for no request, which proves that it is sound. A :class:`Fetched` will tell."""
        if self._adapters.make(digest).tier is Tier.DISK:
            self._adapters.checks.setdefault(digest, arrival)

    def sound(self, digest: str) -> bool:
        """Whether it has been read and checked, and is in host memory or in the pool: it need not be read from disk."""
        adapter = self._adapters.get(digest)
        return adapter is not None and (adapter.image is not None or adapter.tier is Tier.HBM)

    def ready(self, digest: str) -> bool:
        """Whether it is in the pool now."""
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.tier is Tier.HBM

    def coming(self, digest: str) -> bool:
        """Whether it is being copied into the pool, all of it in host memory by now."""
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.coming

    def misfit(self, digest: str) -> str:
        """Why the pool cannot have it, whoever asks; empty if it can, or while its size is not known."""
        pages, most = self.pages(digest), self._most_pages
        return f"adapter needs {pages} pages, and all of them may have {most}" if pages > most else ""

    def pages(self, digest: str) -> int:
        """Pool pages that it takes; 0 while that is not known."""
        adapter = self._adapters.get(digest)
        return 0 if adapter is None else adapter.needs

    def failure(self, digest: str) -> str:
        """Why it cannot be had, while the pause after a failed load lasts; else empty."""
        return self.faults.current(digest)

    def lease(self, digest: str, tenant: int = 0, *, again: bool = False) -> None:
        """Pin it in the pool. It must be :meth:`ready` (else ``ValueError``); every lease is released once.

        ``again``: for a request that is counted already, since it had a lease before it was preempted.
        """
        adapter = self._adapters[digest]
        if adapter.tier is not Tier.HBM:
            raise ValueError(f"adapter {digest} is leased but on tier {adapter.tier.value}")
        self._squeezed.pop(digest, None)
        activity = self.activities.of(digest)
        activity.tenant = tenant
        activity.heat.add(self._clock())
        if not again:
            self.activities.count(activity, missed=adapter.fresh)
        with self._adapters.changing(adapter):
            adapter.fresh = False
            if adapter.tenant != tenant:
                self._change_hands(adapter, tenant)
            adapter.leases += 1

    def release(self, digest: str) -> None:
        """End one lease."""
        adapter = self._adapters[digest]
        with self._adapters.changing(adapter):
            adapter.leases -= 1
            adapter.last_read = self._pool.begun
        self._settle(adapter)

    # Asked for by the scheduler

    def ready_wants(self) -> Sequence[tuple[int, str]]:
        """Wanted adapters in the pool as ``(arrival, digest)``, oldest first. A live view: do not keep it."""
        return self._adapters.wants[Tier.HBM]

    def squeezed(self) -> Iterator[str]:
        """Wanted adapters that the pool had no room for, those apart that wait for a read."""
        return (digest for digest in self._squeezed if self.sound(digest))

    def make_room(self, pages: int, arrival: int, tenant: int = 0) -> bool:
        """Make room for a tenant's keys and values, as :meth:`Evictor.make_room` does."""
        return self._evictor.make_room(pages, arrival, tenant)

    def make_way(self, tenant: int = 0) -> None:
        """Make room for the next token, as :meth:`Evictor.make_way` does."""
        self._evictor.make_way(tenant)

    def evict_one(self, tenant: int = 0) -> bool:
        """Evict one thing, an idle one if there is one. False if all is pinned or still loading."""
        return self._evictor.evict_one(tenant)

    def evict_kept(self, but: str | None) -> bool:
        """The last resort for the only request that could run now, as :meth:`Evictor.evict_kept` does."""
        return self._evictor.evict_kept(but)

    def bring_in(self, digest: str, arrival: int, tenant: int, *, alone: bool) -> None:
        """Place an adapter before all that are wanted later, now if there is room; ``alone``: nobody runs."""
        self.want(digest, arrival, tenant)
        self.pump(arrival)
        while alone and self._adapters[digest].tier is Tier.HOST and self.evict_kept(digest):
            self.pump(arrival)

    def keep(self, gateway: int, pinned: Sequence[str], preloaded: Sequence[str]) -> str:
        """What a gateway wants to be at hand, instead of what it wanted before. Returns why not, or an empty string."""
        error = self._wishes.keep(gateway, pinned, preloaded)
        for digest in tuple(self._forgotten):  # one may have been pinned until now
            adapter = self._adapters.get(digest)
            if adapter is not None:
                self._settle(adapter)
            elif not self._wishes.pins(digest):
                self._forgotten.discard(digest)
        return error

    def pump(self, newest: int | None = None) -> None:
        """Order what the wants need and the tiers have room for; placements only for wants up to ``newest``."""
        self._fetches.pump()
        waited = self._placements.pump(newest)
        if not waited and not self._adapters.wants[Tier.DISK] and not self.host.reading:
            self._wishes.pump()

    def forget(self, digest: str) -> int:
        """An adapter is no more: free its memory now, or when its last lease and its last pin have ended.

        Returns the pages still held.
        """
        self._wishes.forget(digest)
        for faults in (self.faults, self._absences):
            faults.clear(digest)  # whoever enrols it anew has mended it
        adapter = self._adapters.get(digest)
        if adapter is not None or self._wishes.pins(digest):
            self._forgotten.add(digest)
        if adapter is None:
            return 0
        self._settle(adapter)
        return adapter.size

    def held(self) -> Iterator[str]:
        """Those that :meth:`forget` would matter to: in memory, wanted, or likely to be brought in for nobody."""
        yield from (adapter.digest for adapter in self._adapters)
        yield from (digest for _, digest in self._wishes.likely())

    def take_orders(self) -> list[LoadOrder]:
        """Orders for the loader since the last call, to be carried out in this order."""
        orders = list(self._orders)
        self._orders.clear()
        return orders

    def completed(self, result: LoadResult) -> None:
        """The loader's answer. After a failed one :meth:`failure` tells why, and the adapter is back on disk; after a
        read that a placement follows, when that has failed too.

        Files that were not there when nobody asked for them are no failure: who asks has them brought first.
        """
        adapter = self._adapters[result.digest]
        if isinstance(result, Sized):
            adapter.needs = result.pages
            return
        activity = self.activities.of(result.digest)
        known = isinstance(result, Placed) and adapter.image is None  # that its read has failed was the last answer
        with self._adapters.changing(adapter):
            if isinstance(result, Fetched):
                self._take_fetched(adapter, result, activity)
            else:
                self._take_placed(adapter, result, activity)
        absent = isinstance(result, Fetched) and result.absent and adapter.unasked
        if not known and not absent:
            activity.error = result.error or self.misfit(result.digest)
            self.failures += bool(activity.error)
        self._settle(adapter)
        if not result.error:
            self.faults.clear(result.digest)
            self._absences.clear(result.digest)
        elif not known:
            (self._absences if absent else self.faults).add(result.digest, result.error)

    # Seen by the operator

    @property
    def evictions(self) -> int:
        """Adapters that gave up their pages."""
        return self._evictor.evictions

    @property
    def in_hbm(self) -> int:
        """Adapters in the pool."""
        return sum(adapter.tier is Tier.HBM for adapter in self._adapters)

    @property
    def in_host(self) -> int:
        """Adapters whose image is in host memory, in the pool as well or not."""
        return self.host.images

    def known(self, digest: str) -> Adapter | None:
        """What is known of an adapter that is off the disk, or wanted. To be read only."""
        return self._adapters.get(digest)

    def holdings(self) -> Iterator[tuple[str, tuple[Page, ...]]]:
        """Who holds which pages, for :meth:`Pool.check`."""
        return ((adapter.digest, adapter.held) for adapter in self._adapters if adapter.held)

    # How

    def _take_fetched(self, adapter: Adapter, result: Fetched, activity: Activity) -> None:
        if result.error:
            self.host.end(None)
            if adapter.tier is Tier.FETCHING:
                adapter.tier = Tier.DISK
            return
        adapter.image = Image(adapter.tenant, result.host_bytes, lambda: self._fetches.drop(adapter))
        self.host.end(adapter.image)
        adapter.needs = result.pages
        if adapter.tier is Tier.FETCHING:
            adapter.tier = Tier.HOST
        activity.reads += 1
        activity.read_s += result.seconds

    def _take_placed(self, adapter: Adapter, result: Placed, activity: Activity) -> None:
        self._placements.ended(adapter)
        if result.error:
            self._evictor.leave_pool(adapter)
            self._fetches.forget(adapter)
            return
        self.loads += 1
        adapter.tier, adapter.fresh = Tier.HBM, True
        self._wishes.pin(adapter)
        activity.copies += 1
        activity.copy_s += result.seconds

    def _settle(self, adapter: Adapter) -> None:
        """After a change: an adapter that is forgotten leaves as soon as nobody needs it."""
        if adapter.digest not in self._forgotten or self._wishes.pins(adapter.digest):
            return
        if adapter.pinned or adapter.wanted is not None:
            return
        if adapter.tier is Tier.HBM:
            self._evictor.evict(adapter)
        if adapter.tier is Tier.HOST:
            self._fetches.drop(adapter)
        if adapter.tier is Tier.DISK:
            self._forgotten.discard(adapter.digest)
            self._wishes.forget(adapter.digest)

    def _change_hands(self, adapter: Adapter, tenant: int) -> None:
        """Another tenant uses it: it is on that one's account from now on."""
        self._room.charge(adapter.tenant, -adapter.size)
        adapter.tenant = tenant
        self._room.charge(tenant, adapter.size)
        if adapter.image is not None:
            self.host.change_hands(adapter.image, tenant)
