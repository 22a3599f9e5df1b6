from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stencilpress.engine.adapters import Tier
from stencilpress.engine.faults import BACKOFF_S
from stencilpress.engine.fetches import FETCHES_IN_FLIGHT, TURNS_REMEMBERED
from stencilpress.engine.placements import BARRED_S
from stencilpress.engine.plan import DropOrder, Fetched, FetchOrder, LoadOrder, Page, Placed, PlaceOrder, Sized
from stencilpress.engine.wishes import PREDICT_S
from tests.unit.library import Library


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
    library.residency.lease("b")
    library.residency.lease("a")
    library.pool.begin(1)
    library.residency.release("a")
    assert not library.residency.make_room(2, 99)
    assert [order.digest for order in library.residency.take_orders()] == ["a"]
    assert not library.residency.make_room(2, 99)
    assert library.residency.take_orders() == []
    library.pool.retire(1)
    assert library.residency.make_room(2, 99)


def test_pages_that_no_step_in_flight_reads_are_free_at_once() -> None:
    library = Library(pages=4)
    library.bring_in("a", "b")
    library.pool.begin(1)
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


def test_what_could_not_be_read_is_tried_at_once_when_it_has_been_deleted_and_enrolled_anew() -> None:
    library = Library()
    library.residency.want("a", 1)
    [fetch] = library.pump()
    library.residency.completed(Fetched("a", 0, 0, "damaged"))
    library.residency.unwant("a")
    assert library.residency.failure("a") == "damaged"
    library.residency.forget("a")
    assert library.residency.failure("a") == ""
    library.residency.want("a", 2)
    assert library.pump() == [fetch]


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
    assert library.pump() == [DropOrder("a", "host"), FetchOrder("a"), PlaceOrder("a", (1, 0))], "its size is known"


def test_a_placement_is_ordered_as_soon_as_the_size_is_known() -> None:
    library = Library()
    library.residency.want("a", 1)
    assert library.pump() == [FetchOrder("a")]
    assert library.pump() == []
    library.residency.completed(Sized("a", 2))
    [place] = library.pump()
    assert isinstance(place, PlaceOrder)
    assert not library.residency.sound("a")
    library.residency.completed(Fetched("a", 100, 2))
    assert library.residency.sound("a")
    assert not library.residency.ready("a")
    library.residency.completed(Placed("a"))
    assert library.residency.ready("a")
    assert library.pump() == []


def test_a_failed_read_that_a_placement_follows_is_one_failure() -> None:
    library = Library()
    library.residency.want("a", 1)
    library.pump()
    library.residency.completed(Sized("a", 2))
    library.pump()
    library.residency.completed(Fetched("a", 0, 0, "damaged"))
    assert library.pump() == [], "its pages are still written to"
    library.residency.completed(Placed("a", "the read that it follows has failed"))
    assert library.residency.failures == 1
    assert library.residency.failure("a") == "damaged"
    assert library.residency.activities.of("a").error == "damaged", "what an operator sees"
    assert library.pool.free == library.pool.total
    library.now_s += 1.0
    assert library.residency.failure("a") == ""


def test_nothing_is_placed_ahead_of_its_read_for_nobody() -> None:
    library = Library()
    library.residency.check("a", 1)
    assert library.pump() == [FetchOrder("a")]
    library.residency.completed(Sized("a", 2))
    assert library.pump() == []


def test_failures_and_cold_adapters_leave_nothing_behind() -> None:
    library = Library()
    for i in range(3000):
        library.residency.want(f"a{i}", i)
        [order] = library.pump()
        library.residency.completed(Fetched(order.digest, 0, 0, "no such file"))
        library.residency.unwant(f"a{i}")
    assert len(library.residency.faults) == 1024
    assert not list(library.residency._adapters)


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


def test_what_is_to_be_checked_and_comes_in_for_a_pin_is_read_once() -> None:
    """The check found no room, since images that are read for checks alone are nobody's; the pin is of a tenant that
    has an idle one."""
    library = Library(max_cpu_loras=2, pages=20)
    library.use("idle", 1, tenant=5)
    library.residency.check("placed", 2)
    library.turn()
    library.residency.want("placed", 3, 5)
    assert isinstance(library.pump()[0], PlaceOrder)
    library.residency.want("pinned", 4, 5)
    library.residency.check("pinned", 5)
    library.residency.unwant("pinned")
    library.residency.keep(1, ["pinned"], [])
    orders = library.turn()
    library.residency.completed(Placed("placed"))
    orders += library.turn()
    assert orders.count(FetchOrder("pinned")) == 1
    assert library.residency.sound("pinned")
    assert (library.residency.host.reading, library.residency.in_host, library.residency.in_hbm) == (0, 2, 3)


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
    assert list(library.residency.squeezed()) == ["a"]
    library.pool.release(blocker)
    library.turn()
    assert library.residency.ready("a")
    assert list(library.residency.squeezed()) == ["a"], "it could be evicted again before its request is seated"
    library.residency.lease("a")
    assert list(library.residency.squeezed()) == []


def test_a_wanted_adapter_that_was_evicted_is_told_as_well() -> None:
    library = Library(pages=2)
    library.residency.want("a", 7)
    library.turn()
    assert list(library.residency.squeezed()) == []
    assert library.residency.evict_one()
    assert list(library.residency.squeezed()) == ["a"]
    library.residency.unwant("a")
    assert list(library.residency.squeezed()) == []


def test_a_want_on_disk_squeezes_nobody() -> None:
    library = Library(pages=2, max_cpu_loras=1)
    library.residency.want("a", 7)
    library.turn()
    library.residency.want("b", 6)
    library.pump()
    assert library.residency.evict_one(), "a is wanted by 7 alone"
    assert list(library.residency.squeezed()) == [], "a waits for a read now"


def test_only_what_is_in_the_pool_can_be_leased() -> None:
    library = Library()
    library.residency.check("a", 1)
    library.turn()
    with pytest.raises(ValueError, match="host"):
        library.residency.lease("a")


def test_a_flood_of_cold_adapters_does_not_push_out_anothers_warm_ones() -> None:
    """500 adapters of one tenant, wanted all at once and used one after the other, beside ten that are in use."""
    library = Library(pages=41, max_cpu_loras=20, max_prefetched=8)
    assert library.pool.allocate(1, (1, 1)), "somebody runs all the time"
    warm = [f"warm{i}" for i in range(10)]
    for arrival, digest in enumerate(warm):
        library.use(digest, arrival, tenant=1)
    read_before = library.residency.activities.of(warm[0]).reads
    flood = [f"cold{i}" for i in range(500)]
    for arrival, digest in enumerate(flood, 100):
        library.residency.want(digest, arrival, tenant=2)
    served = 0
    while served < len(flood):
        library.now_s += 0.01
        library.turn()
        assert all(library.residency.ready(digest) for digest in warm)
        running = [digest for _, digest in library.residency.ready_wants()][:4]
        for digest in running:
            library.residency.lease(digest, tenant=2)
            library.residency.unwant(digest)
        library.turn()
        for digest in running:
            library.residency.release(digest)
        served += len(running)
        if served % 100 < 4:
            library.use(warm[served // 100 % 10], 10_000 + served, tenant=1)
    assert all(library.residency.activities.of(digest).evictions == 0 for digest in warm)
    assert library.residency.activities.of(warm[0]).reads == read_before


def test_a_tenant_over_its_share_waits_for_its_own_but_not_for_long() -> None:
    library = Library(pages=9, needs=2, max_cpu_loras=20)
    assert library.pool.allocate(1, (1, 1)), "somebody runs all the time"
    library.use("theirs", 1, tenant=1)
    for arrival, digest in enumerate("abc", 2):
        library.begin(digest, arrival, tenant=2)
    library.residency.want("d", 9, tenant=2)
    library.turn()
    assert not library.residency.ready("d")
    assert list(library.residency.squeezed()) == [], "it holds up nobody else"
    library.residency.release("b")
    library.turn()
    assert library.residency.ready("d")
    assert not library.residency.ready("b")
    library.residency.want("e", 10, tenant=2)
    library.residency.lease("d", tenant=2)
    library.turn()
    assert not library.residency.ready("e")
    library.now_s += BARRED_S
    library.turn()
    assert library.residency.ready("e")
    assert not library.residency.ready("theirs")


def test_a_tenant_that_comes_below_its_share_while_room_is_made_gets_all_of_it() -> None:
    """It holds more than its share, so those within theirs are spared; then its own go, and nobody exceeds any more."""
    library = Library(pages=8)
    for digest, tenant, library.needs in (("own", 2, 3), ("a", 1, 4), ("b", 1, 1)):
        library.use(digest, 1, tenant=tenant)
    library.needs = 8
    library.residency.want("large", 9, tenant=2)
    for order in library.pump():
        library.carry_out(order)
    assert isinstance(library.pump()[-1], PlaceOrder), "at once: an idle engine sleeps before the next turn"


def test_an_older_want_is_read_though_the_tenant_whose_turn_it_is_finds_no_room() -> None:
    """Host memory holds three images that wait for pages, which all are in use."""
    library = Library(pages=2, max_cpu_loras=3)
    library.use("runs", 0, tenant=1)
    library.residency.lease("runs", tenant=1)
    for digest, arrival, tenant in (("a", 5, 1), ("b", 6, 1), ("c", 9, 2), ("d", 12, 3)):
        library.residency.want(digest, arrival, tenant=tenant)
    library.turn()
    library.residency.want("newest", 20, tenant=4)
    assert library.pump() == []
    library.residency.want("oldest", 1, tenant=1)
    assert FetchOrder("oldest") in library.pump()


def test_turns_of_tenants_that_wait_for_no_read_are_forgotten() -> None:
    library = Library(pages=8, max_cpu_loras=8)
    for digest in "abc":
        library.residency.want(digest, 0, tenant=1)
    assert len(library.pump()) == FETCHES_IN_FLIGHT - 1, "reads that never end"
    library.residency.want("waits", 1, tenant=1)
    for tenant in range(2, 3 * TURNS_REMEMBERED):
        library.residency.want(f"of {tenant}", tenant, tenant=tenant)
        [order] = library.pump()
        library.carry_out(order)
        library.residency.unwant(order.digest)
        library.residency.forget(order.digest)
        library.residency.take_orders()
    assert len(library.residency._fetches._turns) <= TURNS_REMEMBERED + 1


def test_another_tenants_cold_read_does_not_queue_behind_a_flood() -> None:
    library = Library(pages=100, max_cpu_loras=100)
    for arrival in range(50):
        library.residency.want(f"flood{arrival}", arrival, tenant=1)
    first = library.pump()
    library.residency.want("mine", 99, tenant=2)
    library.carry_out(first[0])
    assert FetchOrder("mine") in library.pump()


def test_adapters_keep_to_their_part_of_the_pool_and_push_out_each_other_alone() -> None:
    library = Library(pages=20, max_cpu_loras=20, max_adapter_pages=6)
    cached = library.pool.allocate(10, (1, 1))
    assert cached is not None
    for arrival, digest in enumerate("abcde"):
        library.use(digest, arrival)
        assert library.pool.adapter <= 6
    assert [digest for digest in "abcde" if library.residency.ready(digest)] == ["c", "d", "e"]
    assert library.pool.free == 4


def test_host_memory_keeps_to_its_bytes() -> None:
    library = Library(pages=100, max_cpu_loras=100, max_cpu_lora_bytes=350)
    for arrival, digest in enumerate("abcdefg"):
        library.use(digest, arrival)
        assert library.residency.host.bytes <= 350
    assert library.residency.in_host == 3
    assert library.residency.in_hbm == 7


def test_images_of_unknown_size_exceed_the_bytes_only_while_they_are_needed() -> None:
    library = Library(pages=100, max_cpu_loras=100, max_prefetched=7, max_cpu_lora_bytes=350)
    for arrival, digest in enumerate("abcdefg"):
        library.residency.want(digest, arrival)
    assert library.pump() == [FetchOrder("a")], "nobody knows how large they are"
    library.residency.completed(Fetched("a", 10, 2))
    assert library.pump() == [*map(FetchOrder, "bcde"), PlaceOrder("a", (1, 0))]
    library.carry_out(PlaceOrder("a", (1, 0)))
    for digest in "bcde":
        library.residency.completed(Fetched(digest, 300, 2))
    assert library.residency.host.bytes == 1210
    library.turn()
    for digest in "abcdefg":
        library.residency.unwant(digest)
    library.turn()
    assert 0 < library.residency.host.bytes <= 350
    assert library.residency.in_hbm == 7


def test_without_a_limit_of_bytes_the_first_reads_are_at_the_same_time() -> None:
    library = Library(pages=100, max_cpu_loras=100)
    for arrival, digest in enumerate("abcdefg"):
        library.residency.want(digest, arrival)
    assert len(library.pump()) == FETCHES_IN_FLIGHT


def test_hits_misses_loads_and_evictions_are_counted_by_adapter() -> None:
    library = Library(pages=2, max_cpu_loras=1)
    library.use("a", 1)
    library.use("a", 2)
    library.use("b", 3)
    library.use("a", 4)
    seen = library.residency.activities.of("a")
    assert (seen.hits, seen.misses, seen.reads, seen.copies, seen.evictions) == (1, 2, 2, 2, 1)
    assert (seen.read_s, seen.copy_s) == (1.0, 0.5)
    library.residency.want("c", 5)
    library.pump()
    library.residency.completed(Fetched("c", 0, 0, "damaged"))
    assert library.residency.activities.of("c").error == "damaged"


def test_a_thousand_loads_and_unloads_leave_nothing_behind() -> None:
    library = Library(pages=4, max_cpu_loras=2)
    for cycle in range(1000):
        library.use(f"a{cycle % 7}", cycle, tenant=cycle % 3)
    assert library.residency.evictions > 900
    while library.residency.evict_one():
        pass
    assert library.pool.free == library.pool.total
    assert not library.room._held
    assert library.residency.in_host <= 2
    assert len(list(library.residency._adapters)) == library.residency.in_host


@pytest.mark.parametrize("when", ["on disk", "fetching", "hosted", "loading", "leased", "idle"])
def test_what_is_forgotten_leaves_when_nobody_needs_it(when: str) -> None:
    library = Library()
    residency = library.residency
    if when != "on disk":
        residency.want("a", 1)
        library.pump()
    if when not in ("on disk", "fetching"):
        residency.completed(Fetched("a", 100, 2))
    if when in ("loading", "leased", "idle"):
        library.pump()
    if when in ("leased", "idle"):
        residency.completed(Placed("a"))
        residency.lease("a")
    residency.unwant("a")
    if when == "idle":
        residency.release("a")
    assert residency.forget("a") == {"loading": 2, "leased": 2}.get(when, 0)
    if when == "fetching":
        residency.completed(Fetched("a", 100, 2))
    elif when == "loading":
        residency.completed(Placed("a"))
    elif when == "leased":
        residency.release("a")
    assert residency.known("a") is None
    assert library.pool.free == library.pool.total
    assert residency.in_host == 0
    assert not residency._forgotten


def test_what_is_forgotten_while_it_is_pinned_leaves_with_the_last_pin() -> None:
    library = Library()
    library.residency.keep(1, ["a"], [])
    library.residency.keep(2, ["a"], ["a"])
    library.turn()
    assert library.residency.forget("a") == 2
    library.residency.keep(1, [], [])
    assert library.residency.ready("a"), "the other gateway may know better: versions may share a content"
    library.residency.keep(2, [], [])
    assert library.residency.known("a") is None
    assert library.pool.free == library.pool.total
    library.now_s += PREDICT_S
    assert not any(isinstance(order, FetchOrder) for order in library.turn())


def test_what_is_forgotten_on_disk_and_pinned_by_a_late_gateway_leaves_when_that_has_heard() -> None:
    library = Library(pages=2)
    library.use("b", 1)
    library.residency.lease("b")
    library.residency.keep(1, ["a"], [])
    library.turn()
    while library.residency.host.reclaim(0):
        pass
    assert library.residency.known("a") is None
    library.residency.forget("a")
    library.residency.release("b")
    library.now_s += PREDICT_S
    library.turn()
    library.residency.keep(1, [], [])
    library.turn()
    assert library.residency.known("a") is None
    assert not library.residency._forgotten


def test_what_comes_back_is_on_the_account_of_who_used_it_last() -> None:
    library = Library()
    for arrival in range(3):
        library.use("a", arrival, tenant=5)
    library.residency.evict_one()
    while library.residency.host.reclaim(0):
        pass
    library.pump()
    library.now_s += PREDICT_S
    library.turn()
    assert library.residency.ready("a")
    assert library.room._held == {5: 2}
    assert set(library.residency.host.room._held) == {5}


def test_who_waits_for_a_first_read_is_seen() -> None:
    library = Library()
    library.residency.want("a", 1, tenant=5)
    library.pump()
    [seen] = library.residency.activities
    assert (seen.digest, seen.tenant) == ("a", 5)
    adapter = library.residency.known("a")
    assert adapter is not None
    assert adapter.tier is Tier.FETCHING


def test_what_is_forgotten_was_used_often_and_does_not_come_back_for_that() -> None:
    library = Library()
    for arrival in range(5):
        library.use("a", arrival)
    library.residency.forget("a")
    library.now_s += PREDICT_S
    assert library.turn() == [DropOrder("a", "hbm"), DropOrder("a", "host")]
    assert library.residency.known("a") is None


def test_what_is_forgotten_on_its_way_back_does_not_come() -> None:
    library = Library()
    for arrival in range(5):
        library.use("a", arrival)
    library.residency.evict_one()
    while library.residency.host.reclaim(0):
        pass
    library.pump()
    library.now_s += PREDICT_S
    [fetch] = library.pump()
    library.residency.forget("a")
    library.carry_out(fetch)
    assert library.turn() == [DropOrder("a", "host")]
    assert library.residency.known("a") is None


def test_held_is_what_is_in_memory_or_wanted_or_may_come_back() -> None:
    library = Library()
    for arrival, digest in enumerate("aabbc"):
        library.use(digest, arrival)
    library.residency.forget("a")
    while library.residency.evict_one():
        pass
    while library.residency.host.reclaim(0):
        pass
    library.pump()
    assert not list(library.residency.holdings())
    library.residency.want("d", 9)
    assert set(library.residency.held()) == {"b", "c", "d"}, "two were used of late"
    library.now_s += 3600
    assert set(library.residency.held()) == {"d"}
    library.residency.unwant("d")
    assert set(library.residency.held()) == set()


class ResidencyMachine(RuleBasedStateMachine):
    """Requests of three tenants come, run and go over few pages and little host memory, and loads fail."""

    @initialize(pages=st.integers(2, 12), images=st.integers(1, 4), most=st.sampled_from([4, 6, 99]))
    def start(self, pages: int, images: int, most: int) -> None:
        self.library = Library(pages=pages, max_cpu_loras=images, max_adapter_pages=most)
        self.arrivals = 0
        self.leased: list[tuple[str, tuple[Page, ...]]] = []
        self.kv: list[tuple[Page, ...]] = []
        self.orders: list[LoadOrder] = []
        self.most = most
        self.images = images

    @rule(digest=st.sampled_from("abcdef"), tenant=st.integers(1, 3))
    def want(self, digest: str, tenant: int) -> None:
        self.arrivals += 1
        self.library.residency.want(digest, self.arrivals, tenant)

    @rule(digest=st.sampled_from("abcdef"))
    def unwant(self, digest: str) -> None:
        self.library.residency.unwant(digest)

    @rule(digest=st.sampled_from("abcdef"), tenant=st.integers(1, 3))
    def lease(self, digest: str, tenant: int) -> None:
        if self.library.residency.ready(digest):
            self.library.residency.lease(digest, tenant)
            adapter = self.library.residency.known(digest)
            assert adapter is not None
            self.leased.append((digest, adapter.held))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest, _ = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        self.library.residency.release(digest)

    @rule(pages=st.integers(1, 4), tenant=st.integers(1, 3))
    def make_room(self, pages: int, tenant: int) -> None:
        self.arrivals += 1
        if self.library.residency.make_room(pages, self.arrivals, tenant):
            self.kv.append(self.library.pool.allocate(pages, (1, 1)) or ())

    @precondition(lambda self: self.kv)
    @rule()
    def end_request(self) -> None:
        self.library.pool.release(self.kv.pop())

    @rule(pinned=st.sets(st.sampled_from("abcdef")), preloaded=st.sets(st.sampled_from("abcdef")))
    def keep(self, pinned: set[str], preloaded: set[str]) -> None:
        self.library.residency.keep(1, sorted(pinned), sorted(preloaded))

    @rule(digest=st.sampled_from("abcdef"))
    def forget(self, digest: str) -> None:
        self.library.residency.forget(digest)

    @rule(seconds=st.sampled_from([0.5, 30.0]))
    def wait(self, seconds: float) -> None:
        self.library.now_s += seconds

    @rule()
    def pump(self) -> None:
        self.orders += self.library.pump()

    @precondition(lambda self: self.orders)
    @rule(fails=st.booleans())
    def carry_out(self, fails: bool) -> None:
        order = self.orders.pop(0)
        if isinstance(order, PlaceOrder) and self.library.residency._adapters[order.digest].image is None:
            self.library.residency.completed(Placed(order.digest, "the read that it follows has failed"))
        elif isinstance(order, DropOrder) or not fails:
            self.library.carry_out(order)
        elif isinstance(order, FetchOrder):
            self.library.residency.completed(Fetched(order.digest, 0, 0, "damaged"))
        else:
            self.library.residency.completed(Placed(order.digest, "the copy failed"))

    @precondition(lambda self: any(isinstance(order, FetchOrder) for order in self.orders))
    @rule()
    def size_is_known(self) -> None:
        order = next(order for order in self.orders if isinstance(order, FetchOrder))
        self.library.residency.completed(Sized(order.digest, self.library.needs))

    @invariant()
    def books_balance(self) -> None:
        residency = self.library.residency
        self.library.pool.check([*residency.holdings(), *(((1, 1), pages) for pages in self.kv)])
        assert self.library.pool.adapter <= self.most
        assert residency.host.images + residency.host.reading <= self.images
        known = list(residency._adapters)
        assert residency.host.images == sum(adapter.image is not None for adapter in known)
        assert residency.host.bytes == 100 * residency.host.images
        assert sum(self.library.room._held.values()) == self.library.pool.adapter
        assert 2 * sum(adapter.size for adapter in known if adapter.kept) <= min(self.most, self.library.pool.total)
        assert self.library.room.idle == sum(adapter.size for adapter in known if adapter.idle)

    @invariant()
    def what_is_forgotten_is_there_only_while_somebody_needs_it(self) -> None:
        residency = self.library.residency
        for digest in residency._forgotten - residency._wishes._kept.pinned.keys():
            adapter = residency.known(digest)
            assert adapter is not None
            under_way = adapter.tier in (Tier.FETCHING, Tier.LOADING)
            assert under_way or adapter.leases or adapter.wanted is not None or digest in residency._adapters.checks

    @invariant()
    def what_is_leased_stays(self) -> None:
        for digest, pages in self.leased:
            adapter = self.library.residency.known(digest)
            assert adapter is not None
            assert adapter.held == pages


TestResidencyMachine = ResidencyMachine.TestCase
