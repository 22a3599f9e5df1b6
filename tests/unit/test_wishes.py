"""Adapters that nobody waits for: what operators pin and preload, and what was used of late."""

from __future__ import annotations

from stencilpress.engine.faults import BACKOFF_S
from stencilpress.engine.messages import MAX_KEPT
from stencilpress.engine.plan import Fetched, FetchOrder
from stencilpress.engine.wishes import PREDICT_S
from tests.unit.library import Library


def kept(library: Library) -> str:
    """What is pinned in the pool."""
    return "".join(sorted(adapter.digest for adapter in library.residency._adapters if adapter.kept))


def test_what_is_pinned_comes_in_and_stays_whatever_else_is_wanted() -> None:
    library = Library(pages=8, max_cpu_loras=2)
    assert library.residency.keep(1, ["kept"], []) == ""
    library.turn()
    assert library.residency.ready("kept")
    for arrival in range(20):
        library.use(f"a{arrival}", arrival)
    assert library.residency.ready("kept")
    assert not library.residency.make_room(7, 99)
    library.residency.keep(1, [], [])
    assert library.residency.make_room(8, 99)


def test_pins_of_two_gateways_add_up_and_one_that_is_gone_takes_its_own_along() -> None:
    library = Library(pages=20)
    library.residency.keep(1, ["a", "b"], [])
    library.residency.keep(2, ["b"], [])
    library.turn()
    library.residency.keep(1, [], [])
    while library.residency.evict_one():
        pass
    assert [digest for digest in "ab" if library.residency.ready(digest)] == ["b"]


def test_pins_take_half_of_the_adapters_pages_at_most() -> None:
    library = Library(pages=100, max_cpu_loras=20, max_adapter_pages=8)
    library.residency.keep(1, list("abcdef"), [])
    library.turn()
    assert library.pool.adapter == 8
    assert sum(adapter.kept for adapter in library.residency._adapters) == 2
    library.use("z", 1)
    assert library.pool.adapter == 8


def test_too_many_pins_are_refused_and_change_nothing() -> None:
    library = Library(pages=8)
    library.residency.keep(1, ["a"], [])
    assert "at most" in library.residency.keep(1, [str(i) for i in range(MAX_KEPT + 1)], [])
    library.turn()
    assert library.residency.ready("a")


def test_what_is_preloaded_comes_when_nobody_waits_and_pushes_out_nobody() -> None:
    library = Library(pages=16, max_cpu_loras=20)
    library.use("used", 1)
    library.residency.want("wanted", 2)
    library.residency.keep(1, [], ["p1", "p2", "broken", "p3", "p4", "p5", "p6"])
    assert [order.digest for order in library.pump()] == ["wanted"]
    library.residency.completed(Fetched("wanted", 100, 2))
    while orders := library.pump():
        for order in orders:
            if order.digest == "broken":
                library.residency.completed(Fetched("broken", 0, 0, "damaged"))
            else:
                library.carry_out(order)
    assert library.residency.ready("wanted")
    assert library.residency.evictions == 0
    assert [p for p in ("p1", "p2", "p3", "p4", "p5", "p6") if library.residency.ready(p)] == [
        "p1",
        "p2",
        "p3",
        "p4",
        "p5",
    ]
    assert library.pool.free == 2, "an eighth stays free"


def test_what_was_used_of_late_comes_back_when_there_is_room() -> None:
    library = Library(pages=8, needs=2, max_cpu_loras=2)
    for arrival in range(3):
        library.use("often", arrival)
    library.use("once", 9)
    while library.residency.evict_one():
        pass
    library.turn()
    assert not library.residency.ready("often")
    library.now_s += PREDICT_S
    library.turn()
    assert library.residency.ready("often")
    assert not library.residency.ready("once"), "one at a time"
    library.now_s += 1000
    library.residency.evict_one()
    library.turn()
    assert not library.residency.ready("often"), "that was long ago"


def test_a_pin_beyond_the_part_for_pins_pushes_out_nobody_for_good() -> None:
    """It is merely preloaded, once: were it tried again each second, it would take the place of what is used."""
    library = Library(pages=8)
    library.residency.keep(1, list("abc"), [])
    library.turn()
    assert kept(library) == "ab"
    library.use("x", 1)
    library.use("y", 2)
    assert not library.residency.ready("c")
    library.now_s += 2 * PREDICT_S
    assert library.turn() == []
    assert library.residency.ready("x")
    assert library.residency.ready("y")


def test_a_pin_that_was_beyond_comes_in_once_another_has_been_taken_back() -> None:
    """Though at that moment requests hold all pages."""
    library = Library(pages=8)
    library.residency.keep(1, list("abc"), [])
    library.turn()
    for arrival, digest in enumerate("xyb"):
        library.begin(digest, arrival)
    library.residency.keep(1, list("ac"), [])
    library.turn()
    assert kept(library) == "a"
    library.residency.release("b")
    library.turn()
    library.now_s += PREDICT_S
    library.turn()
    assert kept(library) == "ac"
    assert not library.residency.ready("b")


def test_a_pin_that_the_pool_cannot_have_is_read_once() -> None:
    """However often its image has to go: it would take the place of one that is of use."""
    library = Library(pages=20, max_adapter_pages=4, max_cpu_loras=1)
    library.needs = 5
    library.residency.keep(1, ["large"], [])
    assert FetchOrder("large") in library.turn()
    library.needs = 2
    for arrival in range(5):
        library.use("a", arrival)
        library.now_s += PREDICT_S
        assert FetchOrder("large") not in library.turn()
    assert library.residency.ready("a")


def test_files_that_are_not_there_for_a_pin_are_no_fault_of_the_request_that_brings_them() -> None:
    """They are in the cold tier alone, and a gateway fetches them before it hands the request over; it may come while
    the read for the pin is under way."""
    library = Library()
    residency = library.residency
    residency.keep(1, ["a"], [])
    for arrival in (1, 2):
        assert library.pump() == [FetchOrder("a")]
        if arrival == 2:
            residency.want("a", arrival)
        residency.completed(Fetched("a", 0, 0, "adapter is not stored here", absent=True))
        assert (residency.failure("a"), residency.failures, residency.activities.of("a").error) == ("", 0, "")
        if arrival == 1:
            assert library.turn() == [], "it is not looked for all the time"
            library.now_s += max(PREDICT_S, BACKOFF_S[0])
    library.turn()
    assert residency.ready("a")


def test_files_that_are_not_there_for_a_request_are_a_failure() -> None:
    library = Library()
    library.residency.want("a", 1)
    assert library.pump() == [FetchOrder("a")]
    library.residency.completed(Fetched("a", 0, 0, "adapter is not stored here", absent=True))
    assert (library.residency.failure("a"), library.residency.failures) == ("adapter is not stored here", 1)


def test_pins_that_the_pool_has_no_room_for_now_are_not_read_over_and_over() -> None:
    """Requests hold all of it for long. Once they end, the pins come, in their order."""
    library = Library(pages=8, max_cpu_loras=6, max_prefetched=8)
    for arrival, digest in enumerate("wxyz"):
        library.begin(digest, arrival)
    library.residency.keep(1, list("abcdef"), [])
    assert [order.digest for order in library.turn()] == ["a", "b"], "host memory has room for two"
    for _ in range(5):
        library.now_s += PREDICT_S
        assert library.turn() == []
    for digest in "wxyz":
        library.residency.release(digest)
    library.now_s += PREDICT_S
    library.turn()
    assert kept(library) == "ab", "half of the pool is for pins"


def test_pins_that_take_others_place_are_pinned_though_all_are_in_the_pool() -> None:
    """A pinned alias points at other versions from now on."""
    library = Library(pages=20, max_adapter_pages=8)
    old, new = "ab", "cd"
    for pinned, others in ((old, new), (new, old), (old, new)):
        library.residency.keep(1, list(pinned), [])
        library.turn()
        assert kept(library) == pinned
        for arrival, digest in enumerate(others):
            library.use(digest, arrival)


def test_a_pin_that_was_beyond_is_pinned_where_it_is_once_there_is_room() -> None:
    library = Library(pages=8)
    library.residency.keep(1, list("abc"), [])
    library.turn()
    assert library.residency.ready("c")
    assert kept(library) == "ab"
    library.residency.keep(1, list("ac"), [])
    assert kept(library) == "ac"


def test_what_comes_back_is_looked_for_once_in_a_while() -> None:
    """Looking goes through all adapters that are remembered, in the loop of the steps."""
    library = Library(pages=8)
    for arrival in range(3):
        library.use("a", arrival)
    library.now_s += PREDICT_S
    library.turn()
    library.residency.evict_one()
    library.turn()
    library.now_s += PREDICT_S / 2
    assert library.turn() == []
    library.now_s += PREDICT_S / 2
    assert library.turn()
    assert library.residency.ready("a")
