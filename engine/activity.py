"""What has been seen of each adapter: for the operator, and to tell which one will be wanted again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from stencilpress.engine.eviction import Heat

MAX_REMEMBERED = 4096
"""Adapters remembered; the one longest unused is forgotten first."""


@dataclass(slots=True)
class Activity:
    """Counts since the engine began. ``misses`` are the requests that an adapter was loaded for, ``hits`` the others.

    ``read_s`` and ``copy_s`` are what all loads from disk and from host memory took, a copy without what it waited for
    the read that it follows; ``error`` why the last one failed.
    """

    digest: str
    tenant: int = 0
    heat: Heat = field(default_factory=Heat)
    hits: int = 0
    misses: int = 0
    reads: int = 0
    copies: int = 0
    read_s: float = 0.0
    copy_s: float = 0.0
    evictions: int = 0
    error: str = ""


class Activities:
    """The adapters last used, the newest last. ``hits`` and ``misses`` are those of all that ever were."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self._known: OrderedDict[str, Activity] = OrderedDict()

    def of(self, digest: str) -> Activity:
        """An adapter's own, begun if there is none. It counts as used now."""
        activity = self._known.get(digest)
        if activity is None:
            activity = self._known[digest] = Activity(digest)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(digest)
        return activity

    def asked(self, digest: str, tenant: int) -> None:
        """Somebody of a tenant begins to wait for an adapter, which was perhaps not seen before."""
        known = digest in self._known
        activity = self.of(digest)
        if not known:
            activity.tenant = tenant

    def last_tenant(self, digest: str) -> int:
        """Who used an adapter last, or asked for it first; 0 if it is not remembered."""
        activity = self._known.get(digest)
        return 0 if activity is None else activity.tenant

    def count(self, activity: Activity, *, missed: bool) -> None:
        """A request has got its adapter."""
        activity.hits += not missed
        activity.misses += missed
        self.hits += not missed
        self.misses += missed

    def cool(self, digest: str) -> None:
        """An adapter is no more: however often it was used, it is not likely to be wanted again."""
        activity = self._known.get(digest)
        if activity is not None:
            activity.heat = Heat()

    def __iter__(self) -> Iterator[Activity]:
        """From the one used last to the one longest unused."""
        return reversed(self._known.values())

    def __len__(self) -> int:
        return len(self._known)
