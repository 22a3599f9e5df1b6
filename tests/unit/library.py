"""A residency between a loader that does what it is told, when it is told to, and users that ask for one adapter."""

from __future__ import annotations

from stencilpress.engine.eviction import Room
from stencilpress.engine.plan import Fetched, FetchOrder, LoadOrder, Placed, PlaceOrder
from stencilpress.engine.pool import Pool
from stencilpress.engine.residency import Capacity, Residency


class Library:
    """A residency with a loader that does what it is told when it is told to; every adapter takes ``needs`` pages."""

    def __init__(
        self, *, pages: int = 8, needs: int = 2, max_cpu_loras: int = 4, max_prefetched: int = 4, **capacity: int
    ) -> None:
        self.now_s = 0.0
        self.needs = needs
        self.pool = Pool(pages)
        self.room = Room(clock=lambda: self.now_s)
        self.residency = Residency(self.pool, self.room, Capacity(max_cpu_loras, max_prefetched, **capacity))
        self.seen: list[LoadOrder] = []

    def turn(self, newest: int | None = None) -> list[LoadOrder]:
        """Pump, carry out what was ordered, and pump until nothing more is ordered. Returns all orders."""
        orders = []
        while new := self.pump(newest):
            orders += new
            for order in new:
                self.carry_out(order)
        return orders

    def pump(self, newest: int | None = None) -> list[LoadOrder]:
        self.residency.pump(newest)
        return self.residency.take_orders()

    def carry_out(self, order: LoadOrder) -> None:
        if isinstance(order, FetchOrder):
            self.residency.completed(Fetched(order.digest, 100, self.needs, seconds=0.5))
        elif isinstance(order, PlaceOrder):
            self.residency.completed(Placed(order.digest, seconds=0.25))

    def use(self, digest: str, arrival: int, tenant: int = 0) -> None:
        """A request comes, waits for its adapter, runs and ends."""
        self.begin(digest, arrival, tenant)
        self.turn()
        self.residency.release(digest)

    def begin(self, digest: str, arrival: int, tenant: int = 0) -> None:
        """A request comes, waits for its adapter and runs."""
        self.residency.want(digest, arrival, tenant)
        self.turn()
        self.residency.lease(digest, tenant)
        self.residency.unwant(digest)

    def bring_in(self, *digests: str) -> None:
        """Leave adapters idle in the pool, the first longest unused."""
        for arrival, digest in enumerate(digests):
            self.residency.want(digest, arrival)
            self.turn()
            self.residency.unwant(digest)
