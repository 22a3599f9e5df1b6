"""Who gives way: one order for everything that idles in a bounded memory.

Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1): an item is worth ``level + cost of bringing back a unit of it *
how often it is used``, and ``level`` rises to the worth of what is evicted, so that unused items sink by themselves.

Tenants are kept apart by shares. Whoever would hold more than an equal part of what all hold takes from those who hold
more than that themselves, and from what has been cold for :data:`WARM_S`, before it takes from anybody else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

WARM_S = 300.0
"""Unused for so long, an item is no longer spared for its tenant's sake."""
HEAT_HALF_LIFE_S = 60.0
"""How fast uses are forgotten."""
COMPACT_AT = 64
"""Stale entries of a heap that are put up with before it is built anew: without evictions nothing else removes them."""


@dataclass(slots=True)
class Heat:
    """Uses, each counted half after :data:`HEAT_HALF_LIFE_S`."""

    uses: float = 0.0
    used_s: float = -math.inf

    def add(self, now_s: float) -> None:
        """One use more."""
        self.uses = 1.0 + self.at(now_s)
        self.used_s = now_s

    def at(self, now_s: float) -> float:
        return self.uses * math.exp2((self.used_s - now_s) / HEAT_HALF_LIFE_S)


class Item:
    """Something that takes ``size`` units of a memory on a tenant's account.

    ``filed`` is 0 unless the item idles on a shelf. ``used_s`` is when it was needed last.
    """

    __slots__ = ("filed", "size", "tenant", "used_s", "worth")

    def __init__(self, tenant: int = 0, size: int = 0) -> None:
        self.tenant = tenant
        self.size = size
        self.used_s = 0.0
        self.worth = 0.0
        self.filed = 0

    def evict(self) -> None:
        """Give the units back and leave the shelf."""
        raise NotImplementedError


@dataclass(slots=True)
class _Line:
    """One tenant's items: a heap of ``(worth, number of the filing, item)``, some of them stale."""

    heap: list[tuple[float, int, Item]] = field(default_factory=list)
    live: int = 0
    size: int = 0


class Shelf:
    """The idle items of one kind, cheapest first. Filing and taking off are O(log n)."""

    def __init__(self) -> None:
        self.size = 0
        self._lines: dict[int, _Line] = {}
        self._fronts: list[tuple[float, int, int]] = []
        self._listed: dict[int, int] = {}
        self._filings = 0

    def file(self, item: Item) -> None:
        """Put an item on the shelf by its ``worth``; of equal ones the first filed goes first."""
        self._filings += 1
        item.filed = self._filings
        line = self._lines.setdefault(item.tenant, _Line())
        heappush(line.heap, (item.worth, item.filed, item))
        line.live += 1
        line.size += item.size
        self.size += item.size
        if line.heap[0][2] is item:
            self._list(item.tenant, line)

    def take(self, item: Item) -> None:
        """Take an item off."""
        line = self._lines[item.tenant]
        item.filed = 0
        line.live -= 1
        line.size -= item.size
        self.size -= item.size
        if not line.live:
            del self._lines[item.tenant]
        elif len(line.heap) > 2 * line.live + COMPACT_AT:
            line.heap = [entry for entry in line.heap if entry[2].filed == entry[1]]
            heapify(line.heap)

    def size_of(self, tenant: int) -> int:
        """Units of one tenant on the shelf."""
        line = self._lines.get(tenant)
        return line.size if line is not None else 0

    def sizes(self) -> Iterator[tuple[int, int]]:
        """``(tenant, units)`` of all."""
        return ((tenant, line.size) for tenant, line in self._lines.items())

    def ascending(self, spared: Callable[[Item], bool]) -> Generator[Item]:
        """Items by worth, those apart that are spared; whoever takes one must have it off the shelf before the next.

        ``spared`` is asked for the cheapest item of a tenant and holds for all of them.
        """
        aside = []
        try:
            while self._fronts:
                _, number, tenant = heappop(self._fronts)
                line = self._lines.get(tenant)
                if line is None or self._listed.get(tenant) != number:
                    if line is None:
                        self._listed.pop(tenant, None)
                    continue
                item = _first(line)
                if item.filed != number:
                    self._list(tenant, line)
                elif spared(item):
                    aside.append((item.worth, number, tenant))
                else:
                    heappush(self._fronts, (item.worth, number, tenant))
                    yield item
        finally:
            for front in aside:
                heappush(self._fronts, front)

    def _list(self, tenant: int, line: _Line) -> None:
        worth, number, _ = line.heap[0]
        self._listed[tenant] = number
        heappush(self._fronts, (worth, number, tenant))
        if len(self._fronts) > 2 * len(self._lines) + COMPACT_AT:
            self._listed = {tenant: number for tenant, number in self._listed.items() if tenant in self._lines}
            self._fronts = list({front for front in self._fronts if self._listed.get(front[2]) == front[1]})
            heapify(self._fronts)


def _first(line: _Line) -> Item:
    """The cheapest live item of a line, which has one."""
    while line.heap[0][2].filed != line.heap[0][1]:
        heappop(line.heap)
    return line.heap[0][2]


class Room:
    """A memory's idle items on shelves of two kinds, and what each tenant holds of it, idle or not.

    The pool has idle adapters and cached pages, host memory images alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.adapters = Shelf()
        self.cached = Shelf()
        self._level = 0.0
        self._held: dict[int, int] = {}
        self._total = 0

    @property
    def idle(self) -> int:
        """Units of all that idles."""
        return self.adapters.size + self.cached.size

    def charge(self, tenant: int, size: int) -> None:
        """A tenant holds ``size`` units more; less, if negative."""
        held = self._held.get(tenant, 0) + size
        self._total += size
        if held:
            self._held[tenant] = held
        else:
            self._held.pop(tenant, None)

    def worth(self, cost: float, uses: float) -> float:
        """Of an item whose units cost ``cost`` each to bring back and that is used so often."""
        return self._level + cost * (1.0 + math.log2(1.0 + uses))

    def exceeds(self, tenant: int, size: int = 0) -> bool:
        """Whether a tenant that holds something would hold more than its share with ``size`` units more."""
        held = self._held.get(tenant, 0)
        return held > 0 and (held + size) * len(self._held) > self._total + size

    def busy(self, tenant: int) -> bool:
        """Whether something that a tenant holds is not idle."""
        return self._held.get(tenant, 0) > self.adapters.size_of(tenant) + self.cached.size_of(tenant)

    def reachable(self, shelf: Shelf, tenant: int, *, over: bool) -> int:
        """Idle units that a tenant may take; if it is ``over`` its share, its own and of those over theirs alone."""
        if not over:
            return shelf.size
        return sum(size for holder, size in shelf.sizes() if holder == tenant or self.exceeds(holder))

    def reclaim(self, shelves: tuple[Shelf, ...], size: int, tenant: int, *, over: bool) -> int:
        """Evict idle items, cheapest first, until ``size`` units are given up or nothing is left; returns how many.

        ``over``: the asking tenant exceeds its share; tenants within theirs are spared.
        """

        def spared(item: Item) -> bool:
            warm = self.clock() - item.used_s < WARM_S
            return over and item.tenant != tenant and warm and not self.exceeds(item.tenant)

        if size <= 0:
            return 0
        given = 0
        sources = [shelf.ascending(spared) for shelf in shelves]
        heads = [(item, source) for source in sources if (item := next(source, None)) is not None]
        while heads and given < size:
            item, source = heads.pop(min(range(len(heads)), key=lambda i: heads[i][0].worth))
            self._level = max(self._level, item.worth)
            given += item.size
            item.evict()
            if given < size and (item := next(source, None)) is not None:
                heads.append((item, source))
        for source in sources:
            source.close()
        return given
