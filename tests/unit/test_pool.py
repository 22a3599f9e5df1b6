from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stencilpress.engine.plan import Page
from stencilpress.engine.pool import Owner, Pool, PoolError


def test_pages_go_out_once_and_come_back() -> None:
    pool = Pool(4)
    kv = pool.allocate(3, (1, 1))
    adapter = pool.allocate(1, "digest")
    assert kv is not None
    assert adapter is not None
    assert sorted((*kv, *adapter)) == [0, 1, 2, 3]
    assert (pool.free, pool.kv, pool.adapter) == (0, 3, 1)
    pool.release(kv)
    assert (pool.free, pool.kv, pool.adapter) == (3, 0, 1)


def test_too_many_pages_are_refused_whole() -> None:
    pool = Pool(4)
    assert pool.allocate(5, (1, 1)) is None
    assert pool.allocate(0, (1, 1)) == ()
    assert pool.free == 4


def test_no_page_is_reused_before_the_step_in_flight_has_retired() -> None:
    pool = Pool(3)
    pages = pool.allocate(2, (1, 1))
    assert pages is not None
    pool.begin(1)
    pool.release(pages)
    assert pool.allocate(2, (1, 2)) is None
    assert pool.quarantined == 2
    pool.check()
    pool.retire(1)
    assert pool.quarantined == 0
    assert pool.allocate(3, (1, 2)) is not None


def test_an_older_step_frees_only_its_own_pages() -> None:
    pool = Pool(2)
    first, second = pool.allocate(1, (1, 1)), pool.allocate(1, (1, 2))
    assert first is not None
    assert second is not None
    pool.begin(1)
    pool.release(first)
    pool.begin(2)
    pool.release(second)
    pool.retire(1)
    assert (pool.free, pool.quarantined) == (1, 1)
    pool.retire(2)
    assert (pool.free, pool.quarantined) == (2, 0)


def test_a_page_cannot_be_released_twice() -> None:
    pool = Pool(2)
    pages = pool.allocate(1, (1, 1))
    assert pages is not None
    pool.release(pages)
    with pytest.raises(PoolError, match="nobody owns"):
        pool.release(pages)


CORRUPTIONS: dict[str, Callable[[Pool], object]] = {
    "free twice": lambda pool: pool._free.append(pool._free[0]),
    "lost": lambda pool: pool._free.pop(),
    "free but owned": lambda pool: pool._owners.__setitem__(pool._free[0], (9, 9)),
    "changed hands": lambda pool: pool._owners.__setitem__(pool._owners.index((1, 1)), "digest"),
    "miscounted": lambda pool: setattr(pool, "kv", 5),
    "quarantine miscounted": lambda pool: setattr(pool, "quarantined", 1),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_check_finds(corrupt: Callable[[Pool], object]) -> None:
    pool = Pool(8)
    pool.allocate(4, (1, 1))
    pool.check()
    corrupt(pool)
    with pytest.raises(PoolError):
        pool.check()


def test_check_compares_with_what_holders_believe() -> None:
    pool = Pool(4)
    pages = pool.allocate(2, (1, 1))
    assert pages is not None
    pool.check([((1, 1), pages)])
    for wrong in ([], [((1, 1), pages[:1])], [((1, 2), pages)], [((1, 1), pages), ((1, 1), pages)]):
        with pytest.raises(PoolError):
            pool.check(wrong)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the books, and no page is handed out while a step that saw it is in flight."""

    @initialize(total=st.integers(0, 20))
    def start(self, total: int) -> None:
        self.pool = Pool(total)
        self.held: list[tuple[Owner, tuple[Page, ...]]] = []
        self.step = 0
        self.in_flight: dict[int, set[Page]] = {}

    @rule(count=st.integers(0, 8), owner=st.sampled_from([(1, 1), (1, 2), "a", "b"]))
    def allocate(self, count: int, owner: Owner) -> None:
        free = self.pool.free
        pages = self.pool.allocate(count, owner)
        assert (pages is None) == (count > free)
        if pages:
            assert not set(pages) & {page for seen in self.in_flight.values() for page in seen}
            self.held.append((owner, pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner, pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert owner
        self.pool.release(pages)

    @rule()
    def begin(self) -> None:
        self.step += 1
        self.pool.begin(self.step)
        self.in_flight[self.step] = {page for _, pages in self.held for page in pages}

    @precondition(lambda self: self.in_flight)
    @rule()
    def retire(self) -> None:
        oldest = min(self.in_flight)
        del self.in_flight[oldest]
        self.pool.retire(oldest)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check(self.held)


TestPoolMachine = PoolMachine.TestCase
