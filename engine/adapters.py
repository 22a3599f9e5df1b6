"""The adapters that are off the disk or wanted: what is known of each, and the lists that follow from it."""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stencilpress.engine.activity import Activities
from stencilpress.engine.eviction import Item, Room
from stencilpress.engine.host import HostMemory, Image
from stencilpress.engine.plan import Page

COPY_COST = 1.0
READ_COST = 8.0
"""Of an adapter's page, to bring it back from host memory and from disk."""


class Tier(enum.Enum):
    """Where an adapter is, or is on its way to."""

    DISK = "disk"
    FETCHING = "fetching"
    HOST = "host"
    LOADING = "loading"
    HBM = "hbm"


class Adapter(Item):
    """One adapter. As an item it is its pages, ``held``; ``image`` is what host memory has of it.

    ``needs`` is the number of pages that it takes, 0 until its first fetch; ``wanted`` its oldest waiter's arrival;
    ``kept`` by an operator; ``fresh`` until the first lease after a load; ``unasked`` if its last read was ordered for
    nobody; ``last_read`` the newest step when the last lease ended.
    """

    __slots__ = (
        "_evict",
        "digest",
        "fresh",
        "held",
        "image",
        "kept",
        "last_read",
        "leases",
        "needs",
        "tier",
        "unasked",
        "wanted",
    )

    def __init__(self, digest: str, evict: Callable[[Adapter], None]) -> None:
        super().__init__()
        self._evict = evict
        self.digest = digest
        self.tier = Tier.DISK
        self.image: Image | None = None
        self.needs = 0
        self.held: tuple[Page, ...] = ()
        self.leases = 0
        self.wanted: int | None = None
        self.kept = False
        self.fresh = False
        self.unasked = False
        self.last_read = 0

    def evict(self) -> None:
        self._evict(self)

    @property
    def pinned(self) -> bool:
        return self.leases > 0 or self.kept

    @property
    def coming(self) -> bool:
        """Whether it is being copied into the pool from host memory, so soon there: not while it is being read."""
        return self.tier is Tier.LOADING and self.image is not None

    @property
    def idle(self) -> bool:
        return self.tier is Tier.HBM and not self.pinned and self.wanted is None

    @property
    def spare(self) -> bool:
        """Whether its image may go: it is in the pool as well, or nobody waits for it."""
        in_pool = self.tier is Tier.HBM
        return self.image is not None and (in_pool or (self.tier is Tier.HOST and self.wanted is None))


class Adapters:
    """All of them by digest; by tier those that are wanted, as ``(arrival, digest)``, oldest first; and the idle ones
    on the shelves of the pool's ``room`` and of host memory."""

    def __init__(self, room: Room, host: HostMemory, activities: Activities, evict: Callable[[Adapter], None]) -> None:
        self.wants: dict[Tier, list[tuple[int, str]]] = {tier: [] for tier in Tier}
        self.checks: dict[str, int] = {}
        self._room = room
        self._host = host
        self._activities = activities
        self._evict = evict
        self._known: dict[str, Adapter] = {}

    def __getitem__(self, digest: str) -> Adapter:
        return self._known[digest]

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self._known.values())

    def get(self, digest: str) -> Adapter | None:
        """None for one that is on disk and not wanted."""
        return self._known.get(digest)

    def make(self, digest: str) -> Adapter:
        """The same, made known. It is forgotten again by the next change that leaves it on disk, unwanted."""
        adapter = self._known.get(digest)
        if adapter is None:
            adapter = self._known[digest] = Adapter(digest, self._evict)
        return adapter

    def newer(self, tier: Tier, arrival: int) -> Iterator[Adapter]:
        """Those on a tier that only requests newer than ``arrival`` want, newest first."""
        wants = self.wants[tier]
        newer = wants[bisect_right(wants, (arrival, "\U0010ffff")) :]
        return (self._known[digest] for _, digest in reversed(newer))

    @contextmanager
    def changing(self, adapter: Adapter) -> Iterator[Adapter]:
        """Every change of an adapter happens in here: its place in each list follows its fields."""
        if adapter.wanted is not None:
            wants = self.wants[adapter.tier]
            del wants[bisect_left(wants, (adapter.wanted, adapter.digest))]
        if adapter.filed:
            self._room.adapters.take(adapter)
        if adapter.image is not None and adapter.image.filed:
            self._host.busy(adapter.image)
        yield adapter
        if adapter.idle or adapter.spare:
            self._file(adapter)
        if adapter.wanted is not None:
            insort(self.wants[adapter.tier], (adapter.wanted, adapter.digest))
        elif adapter.tier is Tier.DISK and adapter.digest not in self.checks:
            del self._known[adapter.digest]

    def _file(self, adapter: Adapter) -> None:
        heat = self._activities.of(adapter.digest).heat
        uses = heat.at(self._room.clock())
        if adapter.idle:
            adapter.used_s = heat.used_s
            adapter.worth = self._room.worth(READ_COST if adapter.image is None else COPY_COST, uses)
            self._room.adapters.file(adapter)
        if adapter.spare and adapter.image is not None:
            self._host.idle(adapter.image, in_pool=adapter.tier is Tier.HBM, uses=uses, used_s=heat.used_s)
