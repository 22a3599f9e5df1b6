"""What the parts of an engine's policy keep count of, counted anew: each figure must be what its parts add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from stencilpress.engine.activity import Activities
from stencilpress.engine.adapters import Adapter, Tier
from stencilpress.engine.eviction import Room
from stencilpress.engine.prefix import PrefixCache, _below
from stencilpress.engine.residency import Residency
from stencilpress.engine.scheduler import Scheduler


def check_books(scheduler: Scheduler, residency: Residency, prefixes: PrefixCache, room: Room) -> None:
    """Beside the pool's pages, which :meth:`Scheduler.check` counts."""
    _check_accounts(scheduler)
    _check_lines(scheduler, residency)
    _check_adapters(residency)
    _check_host(residency)
    _check_activities(residency)
    _check_prefixes(scheduler, residency, prefixes, room)


def _check_accounts(scheduler: Scheduler) -> None:
    seated, accounts = scheduler._seats.taken.values(), scheduler._accounts
    assert scheduler._seats._owed_tokens == sum(request.owed for request in seated)
    live = Counter(request.tenant for request in scheduler._register._requests.values())
    for tenant, account in accounts._accounts.items():
        owing = sum(request.owing for request in seated if request.account is account)
        assert abs(account.owed - owing) < 1e-3
        assert account.live == live[tenant]
        assert account.credit >= 0
        assert account.waiting or account.queued == account.begun == 0
        assert (tenant in accounts._waiting) == bool(account.waiting)
    assert set(live) <= set(accounts._accounts)
    weights = sum(account.weight for account in accounts._waiting.values())
    assert abs(accounts._waiting_weight - weights) <= 1e-6 * weights


def _check_lines(scheduler: Scheduler, residency: Residency) -> None:
    """Who waits, and that residency wants the adapters that they wait for, and no others."""
    lines = scheduler._waiting._lines
    waiting = [request for line in lines.values() for queue in line.queues.values() for request in queue]
    assert len(scheduler._waiting) == len(waiting)
    assert Counter(request.tenant for request in waiting) == Counter(
        {tenant: len(account.waiting) for tenant, account in scheduler._accounts._waiting.items()}
    )
    sinces = [line.since for line in lines.values()]
    assert sinces == sorted(sinces), "the one that has not had a seat for longest comes first"
    favoured = scheduler._waiting.favoured
    assert favoured is None or favoured in waiting
    for line in lines.values():
        assert line.sinces.keys() == line.queues.keys()
        turns = [(queue[0].account.counter, queue[0].urgency) for queue in line.queues.values()]
        head = line.head()
        assert (head.account.counter, head.urgency) == min(turns)
    wanted = {adapter.digest for adapter in residency._adapters if adapter.wanted is not None}
    assert wanted == {adapter for adapter in lines if adapter is not None}
    assert set(residency._squeezed) <= wanted


def _check_adapters(residency: Residency) -> None:
    """Each one's place follows from what it has, and its place in each list from that."""
    wants: dict[Tier, list[tuple[int, str]]] = {tier: [] for tier in Tier}
    for adapter in residency._adapters:
        assert adapter.size == len(adapter.held)
        assert bool(adapter.held) == (adapter.tier in (Tier.LOADING, Tier.HBM))
        assert adapter.image is not None or adapter.tier is not Tier.HOST
        assert adapter.image is None or adapter.tier not in (Tier.DISK, Tier.FETCHING)
        assert adapter.idle == bool(adapter.filed)
        assert adapter.image is None or adapter.spare == bool(adapter.image.filed)
        if adapter.wanted is not None:
            wants[adapter.tier].append((adapter.wanted, adapter.digest))
    assert residency._adapters.wants == {tier: sorted(some) for tier, some in wants.items()}
    loading = Counter(adapter.tenant for adapter in residency._adapters if adapter.tier is Tier.LOADING)
    assert +residency._placements._loading == loading
    for digest in residency._forgotten:
        assert _is_needed(residency, residency.known(digest), digest), "what is forgotten idles"


def _is_needed(residency: Residency, adapter: Adapter | None, digest: str) -> bool:
    if residency._wishes.pins(digest):
        return True
    if adapter is None:
        return False
    under_way = adapter.tier in (Tier.FETCHING, Tier.LOADING) or digest in residency._adapters.checks
    return under_way or adapter.pinned or adapter.wanted is not None


def _check_host(residency: Residency) -> None:
    host = residency.host
    images = [adapter.image for adapter in residency._adapters if adapter.image is not None]
    assert (host.images, host.bytes) == (len(images), sum(image.size for image in images))
    held = Counter[int]()
    for adapter in residency._adapters:
        if adapter.image is not None:
            assert adapter.image.tenant == adapter.tenant
            held[adapter.tenant] += adapter.image.size
    _check_room(host.room, held)


def _check_activities(residency: Residency) -> None:
    """So long as all adapters are remembered."""
    seen: Activities = residency.activities
    assert seen.hits == sum(one.hits for one in seen)
    assert seen.misses == sum(one.misses for one in seen)
    assert residency.loads == sum(one.copies for one in seen)
    assert residency.evictions == sum(one.evictions for one in seen)


def _check_prefixes(scheduler: Scheduler, residency: Residency, prefixes: PrefixCache, room: Room) -> None:
    """Each common page is found or read; nobody reads what was computed for another tenant, adapter or salt."""
    nodes = {id(node): node for tree in prefixes._trees.values() for node in _below(tree)}
    readers = Counter[int]()
    spaces: dict[int, tuple[str | None, int, bytes]] = {}
    for key, chain in scheduler._seats._chains.items():
        request = scheduler._seats.taken[key]
        space = request.adapter, request.tenant, request.salt
        for node in chain.nodes[1:]:
            nodes[id(node)] = node
            readers[id(node)] += 1
            assert spaces.setdefault(node.page, space) == space, "a page is shared that must not be"
    assert {node.page for node in nodes.values()} == prefixes._pages
    assert len(nodes) == len(prefixes._pages)
    assert all(node.readers == readers[id(node)] for node in nodes.values())
    held = Counter(node.tenant for node in nodes.values() if node.filed)
    assert prefixes.idle_pages == held.total()
    assert all(bool(node.filed) == (not node.readers) for node in nodes.values())
    for adapter in residency._adapters:
        held[adapter.tenant] += adapter.size
    _check_room(room, held)


def _check_room(room: Room, held: Mapping[int, int]) -> None:
    """What each tenant holds of a memory, idle or not."""
    assert room._held == {tenant: size for tenant, size in held.items() if size}
    assert room._total == sum(held.values())
