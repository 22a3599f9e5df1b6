"""The prefix cache: what is found by whom, what is pinned, what leaves first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stencilpress.engine.eviction import Room
from stencilpress.engine.plan import Page
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import Chain, PrefixCache, Space, _below

MINE = Space("adapter", 1, b"my salt")
TOKENS = list(range(10, 21))


class Desk:
    """A pool of pages of four tokens, its prefix cache, and requests that run from start to end at once."""

    def __init__(self, pages: int = 20, *, enabled: bool = True) -> None:
        self.pool = Pool(pages)
        self.room = Room(clock=lambda: 0.0)
        self.cache = PrefixCache(self.pool, self.room, 4, enabled=enabled)

    def begin(self, space: Space, tokens: list[int]) -> tuple[Chain, list[Page]]:
        """Open a chain and compute the full pages that are missing. Returns all full pages."""
        chain = self.cache.open(space, tokens)
        assert chain is not None
        for start in range(4 * len(chain), len(tokens) - 3, 4):
            [page] = self.pool.allocate(1, (1, 1)) or ()
            self.cache.add(chain, tokens[start : start + 4], page)
        return chain, list(chain.pages)

    def serve(self, space: Space, tokens: list[int]) -> list[Page]:
        chain, pages = self.begin(space, tokens)
        self.cache.close(chain)
        return pages

    def found(self, space: Space, tokens: list[int]) -> tuple[Page, ...]:
        chain = self.cache.open(space, tokens)
        if chain is None:
            return ()
        pages = chain.pages
        self.cache.close(chain)
        return pages

    def evict(self, count: int) -> None:
        shelves = (self.room.adapters, self.room.cached)
        assert self.room.reclaim(shelves, count, 0, over=False) == count


def test_full_pages_are_found_again_but_the_last_token_is_always_computed() -> None:
    desk = Desk()
    pages = desk.serve(MINE, TOKENS)
    assert len(pages) == 2
    assert desk.found(MINE, TOKENS) == tuple(pages)
    assert desk.found(MINE, [*TOKENS[:8], 99, 99, 99]) == tuple(pages)
    assert desk.found(MINE, TOKENS[:9]) == tuple(pages)
    assert desk.found(MINE, TOKENS[:8]) == tuple(pages[:1]), "the eighth token's logits are needed"
    assert desk.found(MINE, TOKENS[:4]) == ()
    assert desk.found(MINE, [99, *TOKENS[1:]]) == ()
    assert desk.found(MINE, [*TOKENS[:4], 99, *TOKENS[5:]]) == tuple(pages[:1])


@pytest.mark.parametrize(
    "other",
    [
        Space("another version", 1, b"my salt"),
        Space("", 1, b"my salt"),
        Space("adapter", 2, b"my salt"),
        Space("adapter", 1, b"another salt"),
    ],
)
def test_nobody_else_finds_them(other: Space) -> None:
    desk = Desk()
    desk.serve(MINE, TOKENS)
    assert desk.found(other, TOKENS) == ()
    desk.serve(other, TOKENS)
    assert not set(desk.found(other, TOKENS)) & set(desk.found(MINE, TOKENS))


def test_without_a_salt_or_switched_off_nothing_is_shared() -> None:
    assert Desk().cache.open(Space("adapter", 1, b""), TOKENS) is None
    assert Desk(enabled=False).cache.open(MINE, TOKENS) is None


def test_what_two_compute_at_the_same_time_is_kept_once() -> None:
    desk = Desk()
    first = desk.cache.open(MINE, TOKENS)
    second = desk.cache.open(MINE, TOKENS)
    assert first is not None
    assert second is not None
    mine, twin = desk.pool.allocate(2, (1, 1)) or ()
    assert desk.cache.add(first, TOKENS[:4], mine) == mine
    assert desk.cache.add(second, TOKENS[:4], twin) == mine
    assert (desk.pool.cached, desk.pool.kv) == (1, 0)
    desk.cache.close(first)
    assert desk.room.cached.size == 0, "the other one reads it"
    desk.cache.close(second)
    assert desk.room.cached.size == 1


def test_pages_that_are_read_stay_and_the_tips_of_idle_ones_go_first() -> None:
    desk = Desk()
    chain, pages = desk.begin(MINE, [1] * 4 + [2] * 4 + [3] * 5)
    branch = desk.serve(MINE, [1] * 4 + [2] * 4 + [4] * 8 + [5])
    assert branch[:2] == pages[:2]
    desk.evict(2)
    assert desk.room.cached.size == 0
    assert desk.found(MINE, [1] * 4 + [2] * 4 + [3] * 5) == tuple(pages)
    desk.cache.close(chain)
    for left in (2, 1, 0):
        desk.evict(1)
        assert desk.found(MINE, [1] * 4 + [2] * 4 + [3] * 5) == tuple(pages[:left])
    assert desk.pool.free == desk.pool.total
    assert not desk.cache._trees


def test_a_prefix_that_is_used_outlives_many_that_are_not() -> None:
    desk = Desk(pages=6)
    proven = desk.serve(MINE, TOKENS)
    chain = desk.cache.open(MINE, TOKENS)
    assert chain is not None
    assert desk.cache.use(chain) == 8
    desk.cache.close(chain)
    for nth in range(100, 110):
        if not desk.pool.free:
            desk.evict(1)
        desk.serve(MINE, [nth] * 5)
    assert desk.found(MINE, TOKENS) == tuple(proven)


def test_what_was_computed_wrong_is_not_found() -> None:
    desk = Desk()
    chain, pages = desk.begin(MINE, TOKENS)
    desk.cache.condemn(chain)
    assert desk.found(MINE, TOKENS) == ()
    again = desk.serve(MINE, TOKENS)
    assert not set(again) & set(pages)
    desk.cache.close(chain)
    assert desk.found(MINE, TOKENS) == tuple(again)
    desk.evict(2)
    assert desk.pool.free == desk.pool.total
    assert not desk.cache._trees


def test_what_was_computed_wrong_takes_no_room() -> None:
    """However often it was found before, nobody will find it again: its worth must not keep it."""
    desk = Desk()
    for ending in (7, 8, 9):
        desk.serve(MINE, [*TOKENS[:8], *[ending] * 5])
    chain, _ = desk.begin(MINE, TOKENS)
    reader, pages = desk.begin(MINE, [*TOKENS[:8], *[7] * 5])
    desk.cache.condemn(chain)
    assert desk.room.cached.size == 0, "of what idles below"
    desk.cache.close(chain)
    assert desk.pool.cached == len(pages), "which the other one reads"
    desk.cache.condemn(reader)
    desk.cache.close(reader)
    assert desk.pool.free == desk.pool.total
    assert not desk.cache._trees


@pytest.mark.parametrize(
    "lost", [lambda desk, _: desk.cache.forget("adapter"), lambda desk, chain: desk.cache.condemn(chain)]
)
def test_who_goes_on_with_a_lost_beginning_finds_no_page_that_was_freed(
    lost: Callable[[Desk, Chain], object],
) -> None:
    """Three requests that began alike go on alike: what one of them has added leaves with it."""
    desk = Desk()
    first, _ = desk.begin(MINE, TOKENS[:6])
    second, _ = desk.begin(MINE, TOKENS[:6])
    third, _ = desk.begin(MINE, TOKENS[:6])
    lost(desk, third)
    desk.cache.close(third)
    [page] = desk.pool.allocate(1, (1, 1)) or ()
    assert desk.cache.add(first, TOKENS[4:8], page) == page
    desk.cache.close(first)
    assert desk.pool.cached == 1, "the beginning"
    mine, anothers = desk.pool.allocate(2, (1, 2)) or ()
    assert anothers == page
    assert desk.cache.add(second, TOKENS[4:8], mine) == mine
    desk.pool.check([desk.cache.holdings(), ((1, 2), (anothers,))])
    desk.cache.close(second)
    desk.pool.release((anothers,))
    assert desk.pool.free == desk.pool.total


def test_of_an_adapter_that_is_no_more_nothing_stays() -> None:
    desk = Desk()
    chain, pages = desk.begin(MINE, TOKENS)
    desk.serve(MINE, [*TOKENS[:4], 7, 7, 7, 7, 7])
    desk.serve(Space("adapter", 2, b"other"), TOKENS)
    desk.serve(Space("another version", 1, b"my salt"), TOKENS)
    assert desk.cache.forget("adapter") == 2, "those that the running request reads"
    assert desk.pool.cached == 4
    assert desk.found(MINE, TOKENS) == ()
    new, _ = desk.begin(MINE, TOKENS)
    desk.cache.close(chain)
    assert desk.pool.cached == 4, "the old one's pages are free, a new one's are not"
    assert not set(new.pages) & set(pages)
    desk.cache.close(new)
    assert len(desk.found(MINE, TOKENS)) == 2


class PrefixMachine(RuleBasedStateMachine):
    """Requests of several spaces come, compute, and go, while others take pages. What a chain says that its pages hold,
    they hold: the device's memory is a dict."""

    @initialize(pages=st.integers(4, 16))
    def start(self, pages: int) -> None:
        self.desk = Desk(pages)
        self.memory: dict[Page, tuple[Space, list[int]]] = {}
        self.running: list[tuple[Space, list[int], Chain]] = []

    @rule(
        space=st.sampled_from([MINE, Space("", 1, b"my salt"), Space("adapter", 2, b"other")]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
    )
    def open(self, space: Space, tokens: list[int]) -> None:
        chain = self.desk.cache.open(space, tokens)
        assert chain is not None
        assert 4 * len(chain) < len(tokens)
        self.running.append((space, tokens, chain))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        space, tokens, chain = data.draw(st.sampled_from(self.running))
        start = 4 * len(chain)
        if start + 4 > len(tokens):
            return
        if not self.desk.pool.free and self.desk.room.idle:
            self.desk.evict(1)
        for page in self.desk.pool.allocate(1, (1, 1)) or ():
            self.memory[page] = (space, tokens[: start + 4])
            self.desk.cache.add(chain, tokens[start : start + 4], page)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), wrong=st.booleans())
    def close(self, data: st.DataObject, wrong: bool) -> None:
        running = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if wrong:
            self.desk.cache.condemn(running[2])
        self.desk.cache.close(running[2])

    @rule(adapter=st.sampled_from(["adapter", ""]))
    def forget(self, adapter: str) -> None:
        self.desk.cache.forget(adapter)

    @precondition(lambda self: self.desk.room.idle)
    @rule()
    def evict(self) -> None:
        self.desk.evict(1)

    @invariant()
    def pages_hold_what_chains_say(self) -> None:
        for space, tokens, chain in self.running:
            for i, page in enumerate(chain.pages):
                assert self.memory[page] == (space, tokens[: 4 * i + 4])

    @invariant()
    def books_balance(self) -> None:
        self.desk.pool.check([self.desk.cache.holdings()])
        read = {page for _, _, chain in self.running for page in chain.pages}
        assert self.desk.pool.cached == len(read) + self.desk.room.cached.size
        assert Counter(self.desk.room._held).total() == self.desk.room.cached.size
        found = [node for root in self.desk.cache._trees.values() for node in _below(root)]
        assert self.desk.room.cached.size == sum(node.filed > 0 for node in found), "what idles is found"

    def teardown(self) -> None:
        for _, _, chain in self.running:
            self.desk.cache.close(chain)
        self.desk.evict(self.desk.room.idle)
        assert self.desk.pool.free == self.desk.pool.total
        assert not self.desk.cache._trees


TestPrefixMachine = PrefixMachine.TestCase
