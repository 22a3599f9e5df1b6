"""What is read from disk next, and what leaves host memory for it."""

from __future__ import annotations

from itertools import islice

from stencilpress.engine.adapters import Adapter, Adapters, Tier
from stencilpress.engine.host import HostMemory
from stencilpress.engine.plan import DropOrder, FetchOrder, LoadOrder

FETCHES_IN_FLIGHT = 4
"""Few, so that a read that matters more has not long to wait."""
TURNS_REMEMBERED = 1024
"""Tenants whose last turns are known though they wait for no read now."""


class Fetches:
    """Tenants take turns, and each one's oldest want comes first; where whose turn it is finds no room, the oldest of
    all. ``orders`` is where the loader's are put."""

    def __init__(self, adapters: Adapters, host: HostMemory, orders: list[LoadOrder]) -> None:
        self._adapters = adapters
        self._host = host
        self._orders = orders
        self._turns: dict[int, int] = {}

    def pump(self) -> None:
        """Order what is wanted and host memory has room for."""
        self._host.shrink()
        wants, checks = self._adapters.wants[Tier.DISK], self._adapters.checks
        while self._host.reading < FETCHES_IN_FLIGHT and (wants or checks):
            oldest = self._oldest()
            in_turn = min(oldest, key=lambda want: (self._turns.get(want[2], 0), want))
            found = next((want for want in (in_turn, min(oldest)) if self.make_room(want[0], want[2])), None)
            if found is None:
                return
            _, digest, tenant = found
            self._next_turn(tenant, oldest)
            with self._adapters.changing(self._adapters[digest]) as adapter:
                self.order(adapter)
        if not wants:
            self._turns.clear()

    def order(self, adapter: Adapter) -> None:
        """Have an adapter read, in the middle of a change. Who waits for it to be checked waits for this read."""
        checked = self._adapters.checks.pop(adapter.digest, None) is not None
        adapter.unasked = adapter.wanted is None and not checked
        self._host.begin()
        adapter.tier = Tier.FETCHING
        self._orders.append(FetchOrder(adapter.digest))

    def make_room(self, arrival: int, tenant: int) -> bool:
        """Until there is room drop the image of least worth, or else one that only a newer request waits for."""
        while self._host.full:
            if self._host.reclaim(tenant):
                continue
            victim = self._newest_want(arrival, tenant)
            if victim is None:
                return False
            self.drop(victim)
        return True

    def drop(self, adapter: Adapter) -> None:
        """Drop an image that nobody needs now."""
        with self._adapters.changing(adapter):
            self.forget(adapter)

    def forget(self, adapter: Adapter) -> None:
        """The same in the middle of a change."""
        if adapter.image is not None:
            self._host.dropped(adapter.image)
            adapter.image = None
            self._orders.append(DropOrder(adapter.digest, "host"))
        if adapter.tier is Tier.HOST:
            adapter.tier = Tier.DISK

    def _oldest(self) -> list[tuple[int, str, int]]:
        """``(arrival, digest, tenant)`` of each tenant's oldest want."""
        oldest: dict[int, tuple[int, str]] = {}
        for digest, arrival in islice(self._adapters.checks.items(), 1):
            oldest[0] = (arrival, digest)
        for want in self._adapters.wants[Tier.DISK]:
            tenant = self._adapters[want[1]].tenant
            if tenant not in oldest or want < oldest[tenant]:
                oldest[tenant] = want
        return [(*want, tenant) for tenant, want in oldest.items()]

    def _next_turn(self, tenant: int, waiting: list[tuple[int, str, int]]) -> None:
        """A tenant has had its turn."""
        if len(self._turns) >= TURNS_REMEMBERED:
            self._turns = {one: self._turns[one] for *_, one in waiting if one in self._turns}
        self._turns[tenant] = 1 + max(self._turns.values(), default=0)

    def _newest_want(self, arrival: int, tenant: int) -> Adapter | None:
        room, over = self._host.room, self._host.barred(tenant)
        newer = self._adapters.newer(Tier.HOST, arrival)
        return next((a for a in newer if not over or a.tenant == tenant or room.exceeds(a.tenant)), None)
