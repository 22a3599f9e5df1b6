"""Which adapters are where: ``DISK -> FETCHING -> HOST -> LOADING -> HBM``, and back when room is needed.

Waiting requests *want* an adapter, running ones *lease* it. A leased adapter is pinned in the pool, and so is one that
an operator keeps; one that is neither leased nor wanted nor kept is idle, and goes when something of more worth needs
its pages (engine/eviction.py). All of it is bookkeeping: :meth:`Residency.pump` decides, :meth:`Residency.take_orders`
tells the loader, :meth:`Residency.completed` hears back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from stencilpress.engine.activity import Activities, Activity
from stencilpress.engine.adapters import Adapter, Adapters, Tier
from stencilpress.engine.eviction import Room, Shelf
from stencilpress.engine.faults import Faults
from stencilpress.engine.host import HostMemory, Image
from stencilpress.engine.plan import DropOrder, Fetched, FetchOrder, LoadOrder, LoadResult, Page, Placed, PlaceOrder
from stencilpress.engine.pool import Pool

FETCHES_IN_FLIGHT = 4
"""Few, so that a placement never queues behind many reads."""
BARRED_S = 2.0
"""How long the wants of a tenant over its share may find no room; then one of them is treated like anybody's."""

WAY_SHARE = 512
"""Of the pool's pages the part that is evicted from the prefix cache at once when there is none for the next token."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What adapters may take: images and bytes of host memory, pages of the pool.

    At most ``max_prefetched`` wanted adapters that nobody leases are in the pool: a request can use no more than that
    at once.
    """

    max_cpu_loras: int
    max_prefetched: int
    max_cpu_lora_bytes: int = 1 << 62
    max_adapter_pages: int = 1 << 62


class Residency:
    """Adapters in host memory and in the pool. ``room`` is the pool's, and keeps the clock."""

    def __init__(self, pool: Pool, room: Room, capacity: Capacity) -> None:
        self.loads = 0
        self.evictions = 0
        self.failures = 0
        self.activities = Activities()
        self.faults = Faults(room.clock)
        self.host = HostMemory(capacity.max_cpu_loras, capacity.max_cpu_lora_bytes, room.clock)
        self._pool = pool
        self._room = room
        self._clock = room.clock
        self._capacity = capacity
        self._adapters = Adapters(room, self.host, self.activities, self.evict)
        self._squeezed: dict[str, None] = {}
        self._barred: dict[int, float] = {}
        self._leased: dict[int, int] = {}
        self._fetch_turns: dict[int, int] = {}
        self._orders: list[LoadOrder] = []

    # Asked for by requests

    def want(self, digest: str, arrival: int, tenant: int = 0) -> None:
        """Bring it in, and keep it, for a waiting request that came as number ``arrival``; replaces an earlier want."""
        adapter = self._adapters.make(digest)
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

    def check(self, digest: str, arrival: int) -> None:
        """Bring it into host memory for no request, which proves that it is sound. A :class:`Fetched` will tell."""
        if self._adapters.make(digest).tier is Tier.DISK:
            self._adapters.checks.setdefault(digest, arrival)

    def sound(self, digest: str) -> bool:
        """Whether it has been read and checked, and is in memory."""
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.tier in (Tier.HOST, Tier.LOADING, Tier.HBM)

    def ready(self, digest: str) -> bool:
        """Whether it is in the pool now."""
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.tier is Tier.HBM

    def too_large(self, digest: str) -> bool:
        """Whether it takes more pages than adapters may have."""
        return self.pages(digest) > self._capacity.max_adapter_pages

    def pages(self, digest: str) -> int:
        """Pool pages that it takes; 0 while that is not known."""
        adapter = self._adapters.get(digest)
        return 0 if adapter is None else adapter.needs

    def failure(self, digest: str) -> str:
        """Why it cannot be had, while the pause after a failed load lasts; else empty."""
        return self.faults.current(digest)

    def lease(self, digest: str, tenant: int = 0) -> None:
        """Pin it in the pool. It must be :meth:`ready` (else ``ValueError``); every lease is released once."""
        adapter = self._adapters[digest]
        if adapter.tier is not Tier.HBM:
            raise ValueError(f"adapter {digest} is leased but on tier {adapter.tier.value}")
        self._squeezed.pop(digest, None)
        activity = self.activities.of(digest)
        activity.tenant = tenant
        activity.heat.add(self._clock())
        if adapter.fresh:
            activity.misses += 1
        else:
            activity.hits += 1
        with self._adapters.changing(adapter):
            adapter.fresh = False
            if adapter.tenant != tenant:
                self._change_hands(adapter, tenant)
            adapter.leases += 1
            self._count_leases(tenant, 1)

    def release(self, digest: str) -> None:
        """End one lease."""
        adapter = self._adapters[digest]
        with self._adapters.changing(adapter):
            adapter.leases -= 1
            self._count_leases(adapter.tenant, -1)
            adapter.last_read = self._pool.begun

    # Asked for by the scheduler

    def ready_wants(self) -> Sequence[tuple[int, str]]:
        """Wanted adapters in the pool as ``(arrival, digest)``, oldest first. A live view: do not keep it."""
        return self._adapters.wants[Tier.HBM]

    def squeezed(self) -> Iterator[str]:
        """Wanted adapters that the pool had no room for, those apart that wait for a read."""
        return (digest for digest in self._squeezed if (a := self._adapters[digest]).image or a.held)

    def make_room(self, pages: int, arrival: int, tenant: int = 0) -> bool:
        """Evict until ``pages`` are free for keys and values of a tenant.

        What idles goes first, then adapters that only requests newer than ``arrival`` want. All or nothing: False, and
        nothing is evicted, when that would not free enough.
        """
        missing = pages - self._pool.free - self._pool.quarantined
        newer = self._evictable_wants(arrival) if missing > self._room.idle else []
        if missing > self._room.idle + _held(newer):
            return False
        self._free(missing, tenant, newer)
        self._reclaim((self._room.cached,), pages - self._pool.free, tenant)  # rather than wait for the step in flight
        return self._pool.free >= pages

    def make_way(self, tenant: int) -> None:
        """Evict for one page: cached ones at once, or what :meth:`evict_one` finds, unless pages come back anyway."""
        while not self._pool.free + self._pool.quarantined and self.evict_one(tenant):
            pass
        if not self._pool.free:
            self._reclaim((self._room.cached,), 1 + self._pool.total // WAY_SHARE, tenant)

    def evict_one(self, tenant: int = 0) -> bool:
        """Evict one thing, an idle one if there is one. False if all is pinned or still loading."""
        if self._reclaim((self._room.adapters, self._room.cached), 1, tenant):
            return True
        victim = next(iter(self._evictable_wants(-1)), None)
        if victim is not None:
            self.evict(victim)
        return victim is not None

    def pump(self, newest: int | None = None) -> None:
        """Order what the wants need and the tiers have room for; placements only for wants up to ``newest``."""
        self._pump_fetches()
        if self._adapters.wants[Tier.HOST]:
            self._pump_placements(newest)
        else:
            self._barred.clear()

    def take_orders(self) -> list[LoadOrder]:
        """Orders for the loader since the last call, to be carried out in this order."""
        orders, self._orders = self._orders, []
        return orders

    def completed(self, result: LoadResult) -> None:
        """The loader's answer. After a failed one :meth:`failure` tells why, and the adapter is back on disk."""
        adapter = self._adapters[result.digest]
        activity = self.activities.of(result.digest)
        activity.error = result.error
        with self._adapters.changing(adapter):
            if isinstance(result, Fetched):
                self._take_fetched(adapter, result, activity)
            else:
                self._take_placed(adapter, result, activity)
        if result.error:
            self.failures += 1
            self.faults.add(result.digest, result.error)
        else:
            self.faults.clear(result.digest)

    # Seen by the operator

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

    def _pump_fetches(self) -> None:
        while self.host.reading < FETCHES_IN_FLIGHT and (self._adapters.wants[Tier.DISK] or self._adapters.checks):
            arrival, digest, tenant = self._next_fetch()
            if not self._make_host_room(arrival, tenant):
                return
            self._adapters.checks.pop(digest, None)
            self._fetch_turns[tenant] = 1 + max(self._fetch_turns.values(), default=0)
            self.host.begin()
            with self._adapters.changing(self._adapters[digest]) as adapter:
                adapter.tier = Tier.FETCHING
            self._orders.append(FetchOrder(digest))
        if not self._adapters.wants[Tier.DISK]:
            self._fetch_turns.clear()

    def _next_fetch(self) -> tuple[int, str, int]:
        """``(arrival, digest, tenant)`` of the oldest want on disk of the tenant that has waited longest for a read."""
        oldest: dict[int, tuple[int, str]] = {}
        for digest, arrival in self._adapters.checks.items():
            oldest.setdefault(0, (arrival, digest))
        for want in self._adapters.wants[Tier.DISK]:
            tenant = self._adapters[want[1]].tenant
            if tenant not in oldest or want < oldest[tenant]:
                oldest[tenant] = want
        tenant = min(oldest, key=lambda tenant: (self._fetch_turns.get(tenant, 0), oldest[tenant]))
        return *oldest[tenant], tenant

    def _make_host_room(self, arrival: int, tenant: int) -> bool:
        """Until the tier has room drop the image of least worth, or else one that only a newer request waits for."""
        while self.host.full:
            if self.host.reclaim(tenant):
                continue
            over = self.host.barred(tenant)
            newer = self._adapters.newer(Tier.HOST, arrival)
            victim = next(
                (a for a in newer if not over or a.tenant == tenant or self.host.room.exceeds(a.tenant)), None
            )
            if victim is None:
                return False
            self._drop_image(victim)
        return True

    def _pump_placements(self, newest: int | None) -> None:
        """Place the oldest wants in memory that nobody leases, as many as may be in the pool ahead of their requests.

        The wants of a tenant over its share that find no room stand aside for those of others.
        """
        ahead = 0
        barred: set[int] = set()
        for arrival, digest in merge(
            *(list(self._adapters.wants[tier]) for tier in (Tier.HOST, Tier.LOADING, Tier.HBM))
        ):
            adapter = self._adapters[digest]
            if ahead == self._capacity.max_prefetched or (newest is not None and arrival > newest):
                return
            if adapter.leases or (adapter.tier is Tier.HOST and adapter.tenant in barred):
                continue
            if adapter.tier is Tier.HOST and not self._place(adapter, arrival):
                barred.add(adapter.tenant)
            else:
                ahead += 1

    def _place(self, adapter: Adapter, arrival: int) -> bool:
        """Order a placement if there is room. False if there is none for a tenant over its share."""
        tenant, needs = adapter.tenant, adapter.needs
        made = self._make_adapter_room(adapter, arrival, over=self._room.exceeds(tenant, needs))
        if not made and self._room.exceeds(tenant, needs):
            if self._own_room_comes(tenant):
                self._squeezed.pop(adapter.digest, None)
                return False
            made = self._make_adapter_room(adapter, arrival, over=False)
        pages = self._pool.allocate(needs, adapter.digest) if made else None
        if pages is None:
            self._squeezed[adapter.digest] = None
            return True
        self._barred.pop(tenant, None)
        with self._adapters.changing(adapter):
            adapter.tier, adapter.held, adapter.size = Tier.LOADING, pages, needs
            self._room.charge(tenant, needs)
        self._orders.append(PlaceOrder(adapter.digest, pages))
        return True

    def _own_room_comes(self, tenant: int) -> bool:
        """Whether a tenant over its share is to wait for what it leases itself, for at most :data:`BARRED_S`."""
        if not self._leased.get(tenant, 0):
            return False
        return self._clock() - self._barred.setdefault(tenant, self._clock()) < BARRED_S

    def _make_adapter_room(self, adapter: Adapter, arrival: int, *, over: bool) -> bool:
        """As :meth:`make_room`, and within the pages that adapters may have; ``over`` spares tenants in their share."""
        room, tenant, needs = self._room, adapter.tenant, adapter.needs
        missing = needs - self._pool.free - self._pool.quarantined
        excess = self._pool.adapter + needs - self._capacity.max_adapter_pages
        if missing <= 0 and excess <= 0:
            return True
        idle = room.reachable(room.adapters, tenant, over=over)
        cached = room.reachable(room.cached, tenant, over=over)
        newer = [a for a in self._evictable_wants(arrival) if not over or a.tenant == tenant or room.exceeds(a.tenant)]
        if excess > idle + _held(newer) or missing > idle + cached + _held(newer):
            return False
        excess -= room.reclaim((room.adapters,), excess, tenant, over=over)
        while excess > 0 and newer:
            excess -= newer[0].size
            self.evict(newer.pop(0))
        missing = needs - self._pool.free - self._pool.quarantined
        if missing > 0:
            missing -= room.reclaim((room.adapters, room.cached), missing, tenant, over=over)
        while missing > 0 and newer:
            missing -= newer[0].size
            self.evict(newer.pop(0))
        return missing <= 0 and excess <= 0  # whoever was over its share may have come below it on the way

    def _free(self, missing: int, tenant: int, newer: list[Adapter]) -> None:
        missing -= self._reclaim((self._room.adapters, self._room.cached), missing, tenant)
        while missing > 0:
            missing -= newer[0].size
            self.evict(newer.pop(0))

    def _reclaim(self, shelves: tuple[Shelf, ...], size: int, tenant: int) -> int:
        """Evict what idles for keys and values: in the last resort whosever it is."""
        if size <= 0:
            return 0
        given = self._room.reclaim(shelves, size, tenant, over=True) if self._room.exceeds(tenant) else 0
        return given + self._room.reclaim(shelves, size - given, tenant, over=False) if given < size else given

    def _take_fetched(self, adapter: Adapter, result: Fetched, activity: Activity) -> None:
        if result.error:
            self.host.end(None)
            adapter.tier = Tier.DISK
            return
        adapter.image = Image(adapter.tenant, result.host_bytes, lambda: self._drop_image(adapter))
        self.host.end(adapter.image)
        adapter.tier, adapter.needs = Tier.HOST, result.pages
        activity.reads += 1
        activity.read_s += result.seconds

    def _take_placed(self, adapter: Adapter, result: Placed, activity: Activity) -> None:
        if result.error:
            self._leave_pool(adapter)
            self._forget_image(adapter)
            return
        self.loads += 1
        adapter.tier, adapter.fresh = Tier.HBM, True
        activity.copies += 1
        activity.copy_s += result.seconds

    def _count_leases(self, tenant: int, change: int) -> None:
        leases = self._leased.pop(tenant, 0) + change
        if leases:
            self._leased[tenant] = leases

    def _change_hands(self, adapter: Adapter, tenant: int) -> None:
        """Another tenant uses it: it is on that one's account from now on."""
        self._count_leases(adapter.tenant, -adapter.leases)
        self._count_leases(tenant, adapter.leases)
        self._room.charge(adapter.tenant, -adapter.size)
        adapter.tenant = tenant
        self._room.charge(tenant, adapter.size)
        if adapter.image is not None:
            self.host.change_hands(adapter.image, tenant)

    def _evictable_wants(self, arrival: int) -> list[Adapter]:
        """Unpinned adapters in the pool that only requests newer than ``arrival`` want, newest first."""
        return [adapter for adapter in self._adapters.newer(Tier.HBM, arrival) if not adapter.pinned]

    def evict(self, adapter: Adapter) -> None:
        """Take an unpinned adapter out of the pool."""
        with self._adapters.changing(adapter):
            self._leave_pool(adapter)
        self._orders.append(DropOrder(adapter.digest, "hbm"))
        self.evictions += 1
        self.activities.of(adapter.digest).evictions += 1
        if adapter.wanted is not None:
            self._squeezed[adapter.digest] = None

    def _leave_pool(self, adapter: Adapter) -> None:
        self._pool.release(adapter.held, adapter.last_read)
        self._room.charge(adapter.tenant, -adapter.size)
        adapter.held, adapter.size = (), 0
        adapter.tier = Tier.DISK if adapter.image is None else Tier.HOST

    def _drop_image(self, adapter: Adapter) -> None:
        with self._adapters.changing(adapter):
            self._forget_image(adapter)

    def _forget_image(self, adapter: Adapter) -> None:
        if adapter.image is not None:
            self.host.dropped(adapter.image)
            adapter.image = None
        if adapter.tier is Tier.HOST:
            adapter.tier = Tier.DISK
        self._orders.append(DropOrder(adapter.digest, "host"))


def _held(adapters: Sequence[Adapter]) -> int:
    return sum(adapter.size for adapter in adapters)
