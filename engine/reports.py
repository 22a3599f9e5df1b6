"""What the engine shows of itself when it is asked: its adapters, and who holds which page."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from stencilpress.engine.activity import Activity
from stencilpress.engine.adapters import Tier
from stencilpress.engine.messages import (
    MAX_ADAPTERS_SHOWN,
    MAX_HELD_SHOWN,
    Adapters,
    AdapterSeen,
    AskAdapters,
    AskHeld,
    Held,
    PageOwner,
    Pages,
)
from stencilpress.engine.plan import RequestKey
from stencilpress.engine.pool import Common, Owner, Pool
from stencilpress.engine.residency import Residency

MAX_ERROR_CHARS = 200


def adapters_seen(residency: Residency, waiting: Callable[[str], int], ask: AskAdapters) -> Adapters:
    """``waiting`` gives the number of requests that wait for an adapter."""
    limit = max(0, min(ask.limit, MAX_ADAPTERS_SHOWN))
    some = islice(residency.activities, max(0, ask.offset), max(0, ask.offset) + limit)
    rows = tuple(_seen(residency, activity, waiting(activity.digest)) for activity in some)
    return Adapters(ask.id, len(residency.activities), rows)


def adapters_held(held: Iterable[str], ask: AskHeld) -> Held:
    """The next of ``held`` after those that were told already: adapters may come and go between two questions."""
    return Held(ask.id, tuple(sorted(digest for digest in set(held) if digest > ask.after)[:MAX_HELD_SHOWN]))


def _seen(residency: Residency, activity: Activity, waiting: int) -> AdapterSeen:
    adapter = residency.known(activity.digest)
    return AdapterSeen(
        digest=activity.digest,
        tenant=activity.tenant,
        tier=(adapter.tier if adapter is not None else Tier.DISK).value,
        pages=adapter.size if adapter is not None else 0,
        host_bytes=adapter.image.size if adapter is not None and adapter.image is not None else 0,
        pinned=adapter is not None and adapter.kept,
        waiting=waiting,
        active=adapter.leases if adapter is not None else 0,
        hits=activity.hits,
        misses=activity.misses,
        evictions=activity.evictions,
        reads=activity.reads,
        read_s=activity.read_s,
        copies=activity.copies,
        copy_s=activity.copy_s,
        error=activity.error[:MAX_ERROR_CHARS],
    )


class PageMap:
    """The pool as it was at one moment, as runs of one owner.

    The picture is taken at once (some 2 ns a page); what takes 30 to 200 ns a page is done in parts, between steps.
    """

    def __init__(self, pool: Pool, tenants: Mapping[RequestKey, int]) -> None:
        """``tenants`` tells whose the running requests are."""
        self._owners: list[Owner | PageOwner | None] = list(pool.owners())
        for page in pool.resting():
            if self._owners[page] is None:
                self._owners[page] = _QUARANTINED
        self._tenants = tenants
        self._done = 0
        self._indices: dict[Owner | PageOwner | None, int] = {}
        self._shown: dict[PageOwner, int] = {}
        self._runs = array("I")

    def advance(self, pages: int) -> bool:
        """Go through so many more pages; True when all are done."""
        first, self._done = self._done, min(self._done + pages, len(self._owners))
        runs, last, index = self._runs, _NOBODY, -1
        if runs:
            index = runs[-2]
        for owner in self._owners[first : self._done]:
            if owner is not last:
                last = owner
                found = self._indices.get(owner)
                if found is None:
                    found = self._index(owner)
                if found != index:
                    index = found
                    runs.append(index)
                    runs.append(0)
            runs[-1] += 1
        return self._done == len(self._owners)

    def answer(self, ask_id: int) -> Pages:
        """The picture, once it is done."""
        runs = self._runs
        if sys.byteorder == "big":
            runs = array("I", runs)
            runs.byteswap()
        return Pages(ask_id, len(self._owners), tuple(self._shown), runs.tobytes())

    def _index(self, owner: Owner | PageOwner | None) -> int:
        index = self._indices[owner] = self._shown.setdefault(self._show(owner), len(self._shown))
        return index

    def _show(self, owner: Owner | PageOwner | None) -> PageOwner:
        if owner is None:
            return _FREE
        if isinstance(owner, str):
            return PageOwner("adapter", owner)
        if isinstance(owner, PageOwner):
            return owner
        return _CACHED if isinstance(owner, Common) else PageOwner("kv", str(self._tenants[owner]))


_NOBODY = object()
_FREE = PageOwner("free")
_QUARANTINED = PageOwner("quarantined")
_CACHED = PageOwner("cached")
