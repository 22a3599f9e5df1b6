from __future__ import annotations

import pytest

from stencilpress.engine.plan import DropOrder, Fetched, FetchOrder, LoadOrder, Placed, PlaceOrder
from stencilpress.engine.pool import Pool
from stencilpress.engine.residency import BACKOFF_S, FETCHES_IN_FLIGHT, Residency


class Library:
    """A residency with a loader that does what it is told when it is told to; every adapter takes ``needs`` pages."""

    def __init__(self, *, pages: int = 8, needs: int = 2, max_cpu_loras: int = 4, max_prefetched: int = 4) -> None:
        self.now_s = 0.0
        self.needs = needs
        self.pool = Pool(pages)
        self.residency = Residency(
            self.pool, max_cpu_loras=max_cpu_loras, max_prefetched=max_prefetched, clock=lambda: self.now_s
        )
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
            self.residency.completed(Fetched(order.digest, 100, self.needs))
        elif isinstance(order, PlaceOrder):
            self.residency.completed(Placed(order.digest))

    def bring_in(self, *digests: str) -> None:
        """Leave adapters idle in the pool, the first longest unused."""
        for arrival, digest in enumerate(digests):
            self.residency.want(digest, arrival)
            self.turn()
            self.residency.unwant(digest)


def test_a_cold_adapter_is_fetched_then_placed_then_ready() -> None:
    library = Library()
    library.residency.want("a", 1)
    assert library.pump() == [FetchOrder("a")]
    assert library.pump() == []
    library.residency.completed(Fetched("a", 100, 3))
    [order] = library.pump()
    assert isinstance(order, PlaceOrder)
    assert len(order.pages) == 3
    assert library.pool.adapter == 3
    assert not library.residency.ready("a")
    library.residency.completed(Placed("a"))
    assert library.residency.ready("a")
    assert (library.residency.in_hbm, library.residency.in_host, library.residency.loads) == (1, 1, 1)


def test_many_wants_for_one_adapter_cause_one_fetch() -> None:
    library = Library()
    for arrival in (5, 4, 6, 4):
        library.residency.want("a", arrival)
    library.residency.check("a", 7)
    orders = library.turn()
    assert [type(order) for order in orders] == [FetchOrder, PlaceOrder]


def test_few_fetches_are_in_flight_and_the_oldest_wants_come_first() -> None:
    library = Library(max_cpu_loras=100)
    for arrival in reversed(range(10)):
        library.residency.want(f"a{arrival}", arrival)
    assert library.pump() == [FetchOrder(f"a{i}") for i in range(FETCHES_IN_FLIGHT)]
    assert library.pump() == []
    library.residency.completed(Fetched("a2", 100, 2))
    assert FetchOrder(f"a{FETCHES_IN_FLIGHT}") in library.pump()


def test_a_leased_adapter_is_never_evicted() -> None:
    library = Library(pages=4)
    library.bring_in("a", "b")
    library.residency.lease("a")
    library.residency.lease("b")
    assert not library.residency.make_room(1, 99)
    assert not library.residency.evict_one()
    library.residency.release("b")
    assert library.residency.evict_one()
    assert library.residency.ready("a")
    assert not library.residency.ready("b")


def test_idle_adapters_are_evicted_least_recently_used_first() -> None:
    library = Library(pages=6)
    library.bring_in("a", "b", "c")
    library.residency.lease("a")
    library.residency.release("a")
    assert library.residency.make_room(1, 99)
    assert library.residency.take_orders() == [DropOrder("b", "hbm")]
    assert library.residency.evictions == 1
    assert library.pool.free == 2


def test_wanted_adapters_go_only_for_older_requests_and_the_newest_first() -> None:
    library = Library(pages=6)
    for arrival, digest in enumerate("abc", 10):
        library.residency.want(digest, arrival)
    library.turn()
    assert not library.residency.make_room(2, 12)
    assert library.residency.make_room(2, 11)
    assert library.residency.take_orders() == [DropOrder("c", "hbm")]
    assert not library.residency.make_room(6, 10), "a is as old as the asker, so it stays"
    assert library.residency.ready("b"), "nothing is evicted in vain"


def test_room_counts_pages_that_come_back_after_the_step_in_flight() -> None:
    library = Library(pages=4)
    library.bring_in("a", "b")
    library.pool.begin(1)
    assert not library.residency.make_room(2, 99)
    assert [order.digest for order in library.residency.take_orders()] == ["a"]
    assert not library.residency.make_room(2, 99)
    assert library.residency.take_orders() == []
    library.pool.retire(1)
    assert library.residency.make_room(2, 99)


def test_an_evicted_adapter_comes_back_from_host_memory() -> None:
    library = Library(pages=2)
    library.bring_in("a", "b")
    library.residency.want("a", 9)
    orders = library.turn()
    assert [type(order) for order in orders] == [DropOrder, PlaceOrder]


def test_host_memory_is_bounded_and_drops_the_image_longest_unused() -> None:
    library = Library(max_cpu_loras=2)
    library.bring_in("a", "b")
    library.residency.lease("a")
    library.residency.want("c", 9)
    orders = library.turn()
    assert orders[:2] == [DropOrder("b", "host"), FetchOrder("c")]
    assert library.residency.in_host == 2
    assert library.residency.ready("b"), "what is in the pool stays there"


def test_an_adapter_that_lost_its_image_returns_to_disk() -> None:
    library = Library(pages=4, max_cpu_loras=1)
    library.bring_in("a", "b")
    while library.residency.evict_one():
        pass
    assert not library.residency.sound("a")
    library.residency.want("a", 9)
    assert FetchOrder("a") in library.turn()


def test_an_image_being_placed_is_not_dropped() -> None:
    library = Library(max_cpu_loras=1)
    library.residency.want("a", 1)
    [fetch] = library.pump()
    library.carry_out(fetch)
    library.residency.want("b", 2)
    [place] = library.pump()
    assert isinstance(place, PlaceOrder)
    library.carry_out(place)
    assert library.pump() == [DropOrder("a", "host"), FetchOrder("b")]


def test_an_older_want_takes_the_host_room_of_a_newer_one() -> None:
    library = Library(pages=0, max_cpu_loras=1)
    library.residency.want("new", 20)
    library.turn()
    library.residency.want("newer", 30)
    assert library.pump() == []
    library.residency.want("old", 10)
    assert library.pump() == [DropOrder("new", "host"), FetchOrder("old")]


def test_a_failed_fetch_pauses_longer_each_time_and_a_good_one_forgives() -> None:
    library = Library()
    pause_s = BACKOFF_S[0]
    for _ in range(3):
        library.residency.want("a", 1)
        assert library.pump() == [FetchOrder("a")]
        library.residency.completed(Fetched("a", 0, 0, "no such file"))
        library.residency.unwant("a")
        library.now_s += pause_s * 0.99
        assert library.residency.failure("a") == "no such file"
        library.now_s += pause_s * 0.02
        assert library.residency.failure("a") == ""
        pause_s *= 2
    library.residency.want("a", 1)
    library.turn()
    assert library.residency.ready("a")
    library.residency.unwant("a")
    library.residency.evict_one()


def test_a_failed_placement_gives_the_pages_back_and_reads_anew() -> None:
    library = Library()
    library.residency.want("a", 1)
    [fetch] = library.pump()
    library.carry_out(fetch)
    library.pump()
    library.residency.completed(Placed("a", "the copy failed"))
    assert library.residency.failure("a") == "the copy failed"
    assert library.pool.free == library.pool.total
    assert library.residency.in_host == 0
    assert library.pump() == [DropOrder("a", "host"), FetchOrder("a")]


def test_failures_and_cold_adapters_leave_nothing_behind() -> None:
    library = Library()
    for i in range(3000):
        library.residency.want(f"a{i}", i)
        [order] = library.pump()
        library.residency.completed(Fetched(order.digest, 0, 0, "no such file"))
        library.residency.unwant(f"a{i}")
    assert len(library.residency._failures) == 1024
    assert not library.residency._adapters


def test_a_want_that_ends_while_it_is_read_leaves_the_image_in_host_memory() -> None:
    library = Library()
    library.residency.want("a", 1)
    [fetch] = library.pump()
    library.residency.unwant("a")
    library.carry_out(fetch)
    assert library.pump() == []
    assert library.residency.sound("a")
    assert not library.residency.ready("a")


def test_a_want_that_ends_while_it_is_placed_leaves_it_idle() -> None:
    library = Library()
    library.residency.want("a", 1)
    [fetch] = library.pump()
    library.carry_out(fetch)
    [place] = library.pump()
    library.residency.unwant("a")
    assert not library.residency.evict_one(), "its pages are being written"
    library.carry_out(place)
    assert library.residency.evict_one()
    assert library.pool.free == library.pool.total


def test_a_check_reads_but_does_not_place() -> None:
    library = Library()
    library.residency.check("a", 1)
    assert library.turn() == [FetchOrder("a")]
    assert library.residency.sound("a")
    library.residency.check("a", 2)
    assert library.turn() == []


def test_checks_and_wants_take_turns_by_arrival() -> None:
    library = Library(max_cpu_loras=100, pages=100)
    library.residency.check("checked", 3)
    for arrival in (1, 2, 4, 5):
        library.residency.want(f"a{arrival}", arrival)
    assert library.pump() == [FetchOrder("a1"), FetchOrder("a2"), FetchOrder("checked"), FetchOrder("a4")]


def test_prefetch_is_bounded_by_what_can_run() -> None:
    library = Library(pages=100, max_cpu_loras=100, max_prefetched=2)
    for arrival, digest in enumerate("abcd"):
        library.residency.want(digest, arrival)
    library.turn()
    assert [library.residency.ready(digest) for digest in "abcd"] == [True, True, False, False]
    library.residency.lease("a")
    library.turn()
    assert [library.residency.ready(digest) for digest in "abcd"] == [True, True, True, False]


def test_an_older_want_is_placed_though_newer_ones_fill_the_prefetch() -> None:
    library = Library(pages=100, max_cpu_loras=100, max_prefetched=2)
    library.bring_in("new", "newer")
    library.residency.want("new", 20)
    library.residency.want("newer", 21)
    library.residency.want("old", 10)
    library.turn()
    assert library.residency.ready("old")


def test_placements_newer_than_a_request_that_lacks_pages_wait() -> None:
    library = Library()
    for arrival, digest in enumerate("abc", 1):
        library.residency.want(digest, arrival)
    library.turn(newest=2)
    assert [library.residency.ready(digest) for digest in "abc"] == [True, True, False]


def test_a_want_without_room_is_told_until_it_is_leased() -> None:
    library = Library(pages=2)
    blocker = library.pool.allocate(1, (1, 1))
    assert blocker is not None
    library.residency.want("a", 7)
    library.turn()
    assert library.residency.squeezed_since() == 7
    library.pool.release(blocker)
    library.turn()
    assert library.residency.ready("a")
    assert library.residency.squeezed_since() == 7, "it could be evicted again before its request is seated"
    library.residency.lease("a")
    assert library.residency.squeezed_since() is None


def test_a_wanted_adapter_that_was_evicted_is_told_as_well() -> None:
    library = Library(pages=2)
    library.residency.want("a", 7)
    library.turn()
    assert library.residency.squeezed_since() is None
    assert library.residency.evict_one()
    assert library.residency.squeezed_since() == 7
    library.residency.unwant("a")
    assert library.residency.squeezed_since() is None


def test_a_want_on_disk_squeezes_nobody() -> None:
    library = Library(pages=2, max_cpu_loras=1)
    library.residency.want("a", 7)
    library.turn()
    library.residency.want("b", 6)
    library.pump()
    assert library.residency.evict_one(), "a is wanted by 7 alone"
    assert library.residency.squeezed_since() is None, "a waits for a read now"


def test_only_what_is_in_the_pool_can_be_leased() -> None:
    library = Library()
    library.residency.check("a", 1)
    library.turn()
    with pytest.raises(ValueError, match="host"):
        library.residency.lease("a")
