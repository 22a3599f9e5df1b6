"""What the engine shows of itself when it is asked: its adapters, and who holds which page."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from itertools import groupby, islice

from stencilpress.engine.activity import Activity
from stencilpress.engine.adapters import Tier
from stencilpress.engine.messages import MAX_ADAPTERS_SHOWN, Adapters, AdapterSeen, AskAdapters, PageOwner, Pages
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


def page_map(pool: Pool, tenant_of: Callable[[RequestKey], int], ask_id: int) -> Pages:
    """The pool's pages as runs of one owner. ``tenant_of`` gives whose a running request is.

    Takes about 0.4 us a page, so an operator may look at a large pool now and then.
    """
    resting = pool.resting()
    indices: dict[PageOwner, int] = {}
    runs = array("I")

    def owner_of(numbered: tuple[int, Owner | None]) -> PageOwner:
        page, owner = numbered
        if owner is None:
            return _QUARANTINED if page in resting else _FREE
        if isinstance(owner, str):
            return PageOwner("adapter", owner)
        return _CACHED if owner is Common.CACHED else PageOwner("kv", str(tenant_of(owner)))

    for owner, run in groupby(enumerate(pool.owners()), owner_of):
        runs.extend((indices.setdefault(owner, len(indices)), sum(1 for _ in run)))
    if sys.byteorder == "big":
        runs.byteswap()
    return Pages(ask_id, pool.total, tuple(indices), runs.tobytes())


_FREE = PageOwner("free")
_QUARANTINED = PageOwner("quarantined")
_CACHED = PageOwner("cached")
