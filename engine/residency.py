"""Which adapters are where: ``DISK -> FETCHING -> HOST -> LOADING -> HBM``, and back when room is needed.

Waiting requests *want* an adapter, running ones *lease* it. A leased adapter is pinned in the pool; one that is
neither leased nor wanted is idle, and the idle are evicted least recently used first. All of it is bookkeeping:
:meth:`Residency.pump` decides, :meth:`Residency.take_orders` tells the loader, :meth:`Residency.completed` hears back.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from stencilpress.engine.plan import DropOrder, Fetched, FetchOrder, LoadOrder, LoadResult, Page, Placed, PlaceOrder
from stencilpress.engine.pool import Pool

FETCHES_IN_FLIGHT = 4
"""Few, so that a placement never queues behind many reads."""
BACKOFF_S = (1.0, 30.0)
"""After a failed load: the first pause before another try, doubled up to the second."""
MAX_FAILURES = 1024
"""Failed digests remembered; the oldest is forgotten first."""


class Tier(enum.Enum):
    """Where an adapter is, or is on its way to."""

    DISK = "disk"
    FETCHING = "fetching"
    HOST = "host"
    LOADING = "loading"
    HBM = "hbm"


@dataclass(slots=True, eq=False)
class _Adapter:
    """``needs`` is the number of pages it takes, 0 until its first fetch; ``wanted`` its oldest waiter's arrival."""

    digest: str
    tier: Tier = Tier.DISK
    hosted: bool = False
    needs: int = 0
    held: tuple[Page, ...] = ()
    pins: int = 0
    wanted: int | None = None

    @property
    def idle(self) -> bool:
        return self.tier is Tier.HBM and not self.pins and self.wanted is None

    @property
    def spare(self) -> bool:
        """Whether its host image may go: it is in the pool as well, or nobody waits for it."""
        return self.hosted and (self.tier is Tier.HBM or (self.tier is Tier.HOST and self.wanted is None))


@dataclass(slots=True)
class _Failure:
    error: str
    pause_s: float
    until: float


class Residency:
    """Adapters in host memory (at most ``max_cpu_loras``) and in the pool.

    At most ``max_prefetched`` wanted adapters that nobody leases are brought into the pool: a request can use no
    more than that at once. ``clock`` gives monotonic seconds.
    """

    def __init__(
        self, pool: Pool, *, max_cpu_loras: int, max_prefetched: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.loads = 0
        self.evictions = 0
        self._pool = pool
        self._max_cpu_loras = max_cpu_loras
        self._max_prefetched = max_prefetched
        self._clock = clock
        self._adapters: dict[str, _Adapter] = {}
        self._wants: dict[Tier, list[tuple[int, str]]] = {tier: [] for tier in Tier}
        self._squeezed: dict[str, None] = {}
        self._idle: OrderedDict[str, _Adapter] = OrderedDict()
        self._idle_pages = 0
        self._spare: OrderedDict[str, _Adapter] = OrderedDict()
        self._hosted = 0
        self._fetching = 0
        self._checks: dict[str, int] = {}
        self._failures: OrderedDict[str, _Failure] = OrderedDict()
        self._orders: list[LoadOrder] = []

    # Asked for by requests

    def want(self, digest: str, arrival: int) -> None:
        """Bring it in, and keep it, for a waiting request that came as number ``arrival``; replaces an earlier want."""
        adapter = self._known(digest)
        if adapter.wanted != arrival:
            with self._refiled(adapter):
                adapter.wanted = arrival

    def unwant(self, digest: str) -> None:
        """Nobody waits for it any more."""
        adapter = self._adapters.get(digest)
        if adapter is not None and adapter.wanted is not None:
            self._squeezed.pop(digest, None)
            with self._refiled(adapter):
                adapter.wanted = None

    def check(self, digest: str, arrival: int) -> None:
        """Bring it into host memory for no request, which proves that it is sound. A :class:`Fetched` will tell."""
        if self._known(digest).tier is Tier.DISK:
            self._checks.setdefault(digest, arrival)

    def sound(self, digest: str) -> bool:
        """Whether it has been read and checked, and is in memory."""
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.tier in (Tier.HOST, Tier.LOADING, Tier.HBM)

    def ready(self, digest: str) -> bool:
        """Whether it is in the pool now."""
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.tier is Tier.HBM

    def pages(self, digest: str) -> int:
        """Pool pages that it takes; 0 while that is not known."""
        adapter = self._adapters.get(digest)
        return 0 if adapter is None else adapter.needs

    def failure(self, digest: str) -> str:
        """Why it cannot be had, while the pause after a failed load lasts; else empty."""
        failure = self._failures.get(digest)
        return failure.error if failure is not None and self._clock() < failure.until else ""

    def lease(self, digest: str) -> None:
        """Pin it in the pool. It must be :meth:`ready` (else ``ValueError``); every lease is released once."""
        adapter = self._adapters[digest]
        if adapter.tier is not Tier.HBM:
            raise ValueError(f"adapter {digest} is leased but on tier {adapter.tier.value}")
        self._squeezed.pop(digest, None)
        with self._refiled(adapter):
            adapter.pins += 1

    def release(self, digest: str) -> None:
        """End one lease."""
        adapter = self._adapters[digest]
        with self._refiled(adapter):
            adapter.pins -= 1

    # Asked for by the scheduler

    def ready_wants(self) -> Sequence[tuple[int, str]]:
        """Wanted adapters in the pool as ``(arrival, digest)``, oldest first. A live view: do not keep it."""
        return self._wants[Tier.HBM]

    def squeezed_since(self) -> int | None:
        """The oldest want that the pool had no room for, unless it waits for a read."""
        waits = (self._adapters[digest] for digest in self._squeezed)
        return min((a.wanted for a in waits if a.hosted or a.held if a.wanted is not None), default=None)

    def squeezed(self) -> Iterator[str]:
        """Wanted adapters that the pool had no room for, those apart that wait for a read."""
        return (digest for digest in self._squeezed if (a := self._adapters[digest]).hosted or a.held)

    def make_room(self, pages: int, arrival: int) -> bool:
        """Evict until ``pages`` are free: idle adapters, then those that only requests newer than ``arrival`` want.

        All or nothing: False, and nothing is evicted, when that would not free enough.
        """
        missing = pages - self._pool.free - self._pool.quarantined
        newer = self._evictable_wants(arrival) if missing > self._idle_pages else []
        if missing > self._idle_pages + sum(len(adapter.held) for adapter in newer):
            return False
        while missing > 0:
            victim = next(iter(self._idle.values())) if self._idle else newer.pop(0)
            missing -= len(victim.held)
            self._evict(victim)
        return self._pool.free >= pages

    def evict_one(self) -> bool:
        """Evict one unpinned adapter, an idle one if there is one. False if all are pinned or still loading."""
        victim = next(iter(self._idle.values()), None) or next(iter(self._evictable_wants(-1)), None)
        if victim is not None:
            self._evict(victim)
        return victim is not None

    def pump(self, newest: int | None = None) -> None:
        """Order what the wants need and the tiers have room for; placements only for wants up to ``newest``."""
        self._pump_fetches()
        self._pump_placements(newest)

    def take_orders(self) -> list[LoadOrder]:
        """Orders for the loader since the last call, to be carried out in this order."""
        orders, self._orders = self._orders, []
        return orders

    def completed(self, result: LoadResult) -> None:
        """The loader's answer. After a failed one :meth:`failure` tells why, and the adapter is back on disk."""
        adapter = self._adapters[result.digest]
        with self._refiled(adapter):
            if isinstance(result, Fetched):
                self._take_fetched(adapter, result)
            else:
                self._take_placed(adapter, result)
        if not result.error:
            self._failures.pop(result.digest, None)

    # Seen by the operator

    @property
    def in_hbm(self) -> int:
        """Adapters in the pool."""
        return sum(adapter.tier is Tier.HBM for adapter in self._adapters.values())

    @property
    def in_host(self) -> int:
        """Adapters whose image is in host memory, in the pool as well or not."""
        return self._hosted

    def holdings(self) -> Iterator[tuple[str, tuple[Page, ...]]]:
        """Who holds which pages, for :meth:`Pool.check`."""
        return ((adapter.digest, adapter.held) for adapter in self._adapters.values() if adapter.held)

    # How

    def _known(self, digest: str) -> _Adapter:
        return self._adapters.get(digest) or self._adapters.setdefault(digest, _Adapter(digest))

    @contextmanager
    def _refiled(self, adapter: _Adapter) -> Iterator[_Adapter]:
        """Every change of an adapter happens in here: its place in each list follows its fields."""
        if adapter.wanted is not None:
            wants = self._wants[adapter.tier]
            del wants[bisect_left(wants, (adapter.wanted, adapter.digest))]
        if adapter.idle:
            del self._idle[adapter.digest]
            self._idle_pages -= len(adapter.held)
        if adapter.spare:
            del self._spare[adapter.digest]
        yield adapter
        if adapter.spare:
            self._spare[adapter.digest] = adapter
        if adapter.idle:
            self._idle[adapter.digest] = adapter
            self._idle_pages += len(adapter.held)
        if adapter.wanted is not None:
            insort(self._wants[adapter.tier], (adapter.wanted, adapter.digest))
        elif adapter.tier is Tier.DISK and adapter.digest not in self._checks:
            del self._adapters[adapter.digest]

    def _pump_fetches(self) -> None:
        while self._fetching < FETCHES_IN_FLIGHT:
            wants = self._wants[Tier.DISK][:1] + [
                (arrival, digest) for digest, arrival in islice(self._checks.items(), 1)
            ]
            if not wants:
                return
            arrival, digest = min(wants)
            if not self._make_host_room(arrival):
                return
            self._checks.pop(digest, None)
            self._fetching += 1
            with self._refiled(self._adapters[digest]) as adapter:
                adapter.tier = Tier.FETCHING
            self._orders.append(FetchOrder(digest))

    def _make_host_room(self, arrival: int) -> bool:
        """If the tier is full drop the image longest unused, or else one that only a newer request waits for."""
        if self._hosted + self._fetching < self._max_cpu_loras:
            return True
        victim = next(iter(self._spare.values()), None)
        if victim is None:
            newest, digest = max(self._wants[Tier.HOST][-1:], default=(arrival, ""))
            if newest <= arrival:
                return False
            victim = self._adapters[digest]
        with self._refiled(victim):
            self._drop_image(victim)
        return True

    def _pump_placements(self, newest: int | None) -> None:
        for arrival, digest in self._next_wants() if self._wants[Tier.HOST] else ():
            adapter = self._adapters[digest]
            if newest is not None and arrival > newest:
                return
            if adapter.tier is not Tier.HOST:
                continue
            pages = self._pool.allocate(adapter.needs, digest) if self.make_room(adapter.needs, arrival) else None
            if pages is None:
                self._squeezed[digest] = None
                continue
            with self._refiled(adapter):
                adapter.tier, adapter.held = Tier.LOADING, pages
            self._orders.append(PlaceOrder(digest, pages))

    def _next_wants(self) -> list[tuple[int, str]]:
        """The oldest wants in memory that nobody leases, as many as may be in the pool ahead of their requests."""
        in_memory = merge(*(self._wants[tier] for tier in (Tier.HOST, Tier.LOADING, Tier.HBM)))
        return list(islice((want for want in in_memory if not self._adapters[want[1]].pins), self._max_prefetched))

    def _take_fetched(self, adapter: _Adapter, result: Fetched) -> None:
        self._fetching -= 1
        if result.error:
            adapter.tier = Tier.DISK
            self._back_off(result)
            return
        self._hosted += 1
        adapter.tier, adapter.hosted, adapter.needs = Tier.HOST, True, result.pages

    def _take_placed(self, adapter: _Adapter, result: Placed) -> None:
        if result.error:
            self._leave_pool(adapter)
            self._drop_image(adapter)
            self._back_off(result)
            return
        self.loads += 1
        adapter.tier = Tier.HBM

    def _back_off(self, result: LoadResult) -> None:
        before = self._failures.pop(result.digest, None)
        pause_s = min(before.pause_s * 2, BACKOFF_S[1]) if before else BACKOFF_S[0]
        self._failures[result.digest] = _Failure(result.error, pause_s, self._clock() + pause_s)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def _evictable_wants(self, arrival: int) -> list[_Adapter]:
        """Unpinned adapters in the pool that only requests newer than ``arrival`` want, newest first."""
        wants = self._wants[Tier.HBM]
        newer = wants[bisect_right(wants, (arrival, "\U0010ffff")) :]
        return [a for _, digest in reversed(newer) if not (a := self._adapters[digest]).pins]

    def _evict(self, adapter: _Adapter) -> None:
        with self._refiled(adapter):
            self._leave_pool(adapter)
        self._orders.append(DropOrder(adapter.digest, "hbm"))
        self.evictions += 1
        if adapter.wanted is not None:
            self._squeezed[adapter.digest] = None

    def _leave_pool(self, adapter: _Adapter) -> None:
        self._pool.release(adapter.held)
        adapter.held = ()
        adapter.tier = Tier.HOST if adapter.hosted else Tier.DISK

    def _drop_image(self, adapter: _Adapter) -> None:
        self._hosted -= 1
        adapter.hosted = False
        if adapter.tier is Tier.HOST:
            adapter.tier = Tier.DISK
        self._orders.append(DropOrder(adapter.digest, "host"))
