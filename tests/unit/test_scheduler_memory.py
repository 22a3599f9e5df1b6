"""Pages, preemption and adapters that come and go; random storms of everything at once."""

from __future__ import annotations

import pytest

from stencilpress.engine.plan import Fetched, FetchOrder
from tests.unit.simulator import Engine, code, make_engine, shape
from tests.unit.storm import Storm, check_nothing_is_left, settle


def is_kept(engine: Engine, adapter: str) -> bool:
    seen = engine.residency.known(adapter)
    return seen is not None and seen.kept


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_storm(seed: int, ahead: bool) -> None:
    """The simulator asserts at every step; what is left to see is that nothing is left."""
    check_nothing_is_left(Storm(seed, ahead=ahead).run(400))


def test_preemption_takes_the_last_seated_and_changes_no_text() -> None:
    engine = make_engine(pages=6, needs={})
    clients = [engine.submit((1, i), [i] * 6, 12) for i in range(2)]
    preempted = []
    while not engine.scheduler.idle:
        before = engine.scheduler.stats(0).preemptions
        plan = engine.step()
        if engine.scheduler.stats(0).preemptions > before:
            preempted.append(shape(plan))
    assert [[id_ for id_, _ in plan[None]] for plan in preempted] == [[0]]
    assert all(client.text == client.expected for client in clients)


def test_a_preempted_request_is_counted_once_among_those_of_its_adapter() -> None:
    engine = make_engine(pages=8, needs={"A": 2})
    for i in range(2):
        engine.submit((1, i), [i] * 6, 12, "A")
    engine.run_until_idle()
    stats = engine.scheduler.stats(0)
    assert stats.preemptions > 0
    assert (stats.adapter_misses, stats.adapter_hits) == (1, 1)
    seen = engine.residency.activities.of("A")
    assert (seen.misses, seen.hits) == (1, 1)


def test_what_a_preempted_request_finds_of_its_own_is_not_counted_as_saved() -> None:
    engine = make_engine(pages=6, needs={})
    clients = [engine.submit((1, i), [i] * 6, 12, salt=b"salt") for i in range(2)]
    engine.run_until_idle()
    assert engine.scheduler.stats(0).preemptions > 0
    told = [client.finished.cached_tokens for client in clients if client.finished is not None]
    assert told == [0, 0]
    assert engine.scheduler.stats(0).cached_tokens == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_answers_that_go_on_alike_outlive_their_version(ahead: bool) -> None:
    """The version is deleted while both run. What the first one then computes leaves with it, before the second one
    comes that far."""
    engine = make_engine(pages=30)
    engine.ahead = ahead
    first = engine.submit((1, 1), [5] * 9, 16, "A", salt=b"salt")
    while len(first.text) < 8:
        engine.step()
    second = engine.submit((1, 2), [5] * 9, 16, "A", salt=b"salt")
    while not second.text:
        engine.step()
    assert engine.scheduler.forget("A") == 2 + 4, "its own pages and full ones of the texts"
    while first.finished is None:
        engine.step()
    assert second.finished is None
    engine.submit((1, 3), [7] * 20, 20)
    engine.run_until_idle()
    assert engine.pool.adapter == 0
    assert second.text == first.text


def test_idle_adapters_go_before_anybody_is_preempted() -> None:
    engine = make_engine(pages=8, needs={"A": 2, "B": 2})
    for i, adapter in enumerate("AB"):
        engine.submit((1, i), [1], 1, adapter)
    engine.run_until_idle()
    assert engine.scheduler.stats(0).adapters_hbm == 2
    clients = [engine.submit((1, i), [1] * 6, 10) for i in (10, 11)]
    engine.run_until_idle()
    stats = engine.scheduler.stats(0)
    assert (stats.preemptions, stats.adapter_evictions) == (0, 2)
    assert all(client.text == client.expected for client in clients)


def test_the_last_request_seated_waits_in_its_seat_for_a_page() -> None:
    """It keeps what it has computed, instead of being preempted for its own sake."""
    engine = make_engine(pages=5, needs={})
    first, last = engine.submit((1, 1), [1] * 5, 7), engine.submit((1, 2), [2] * 4, 8)
    engine.run_until_idle()
    assert engine.scheduler.stats(0).preemptions == 0
    assert first.text == first.expected
    assert last.text == last.expected


def test_a_newcomer_leaves_a_page_to_each_who_sits() -> None:
    engine = make_engine(pages=4, needs={})
    elder = engine.submit((1, 1), [1] * 4, 5)
    newcomer = engine.submit((1, 2), [2] * 12, 1)
    assert shape(engine.step()) == {None: [(1, 4)]}
    engine.run_until_idle()
    assert engine.scheduler.stats(0).preemptions == 0
    assert elder.text == elder.expected
    assert newcomer.text == newcomer.expected


def test_adapters_of_newer_requests_leave_the_pages_that_an_older_one_waits_for() -> None:
    engine = make_engine(pages=6, needs={"A": 2})
    engine.submit((1, 1), [1] * 8, 8)
    engine.step()
    engine.submit((1, 2), [2] * 12, 1)
    engine.submit((1, 3), [3], 1, "A")
    for _ in range(3):
        engine.step()
        assert engine.pool.adapter == 0
    engine.run_until_idle()


def test_a_request_as_large_as_the_pool_runs_in_the_end() -> None:
    engine = make_engine(pages=12, needs={"A": 4, "B": 4})
    for i in range(6):
        engine.submit((1, i), [1] * 8, 8, "AB"[i % 2])
    large = engine.submit((1, 9), [1] * 20, 12, "A")
    engine.run_until_idle()
    assert large.text == large.expected


def test_a_cold_adapter_blocks_nobody() -> None:
    engine = make_engine()
    cold = engine.submit((1, 1), [1], 3, "A")
    warm = engine.submit((1, 2), [1], 3)
    for _ in range(4):
        engine.step(load_speed=0)
    assert warm.text == warm.expected
    assert cold.text == []
    engine.run_until_idle()
    assert cold.text == cold.expected


def test_requests_for_one_cold_adapter_share_one_read() -> None:
    engine = make_engine()
    for i in range(20):
        engine.submit((1, i), [1], 2, "A")
    engine.run_until_idle()
    assert engine.loader.fetches == ["A"]
    assert engine.scheduler.stats(0).adapter_loads == 1


def test_a_missing_adapter_fails_its_own_requests_and_is_not_hammered() -> None:
    engine = make_engine()
    engine.loader.broken.add("A")
    doomed = [engine.submit((1, i), [1], 3, "A") for i in range(3)]
    spared = engine.submit((1, 9), [1], 3, "B")
    engine.run_until_idle()
    assert [code(client) for client in doomed] == ["adapter_unavailable"] * 3
    assert spared.text == spared.expected
    hasty = engine.submit((1, 10), [1], 3, "A")
    engine.deliver()
    assert code(hasty) == "adapter_unavailable"
    assert engine.loader.fetches.count("A") == 1
    engine.loader.broken.clear()
    engine.now_s += 60
    later = engine.submit((1, 11), [1], 3, "A")
    engine.run_until_idle()
    assert later.text == later.expected


def test_a_check_reads_an_adapter_without_a_request() -> None:
    engine = make_engine()
    engine.scheduler.check_adapter("A")
    assert engine.scheduler.plan() is None
    assert engine.residency.take_orders() == [FetchOrder("A")]
    engine.scheduler.loaded(Fetched("A", 10, 2))
    assert engine.residency.sound("A")


@pytest.mark.parametrize(("adapter", "prompt", "answer"), [(None, 40, 4), (None, 10, 36), ("B", 2, 4)])
def test_what_is_pinned_gives_way_only_to_who_could_never_run_otherwise_and_comes_back(
    adapter: str | None, prompt: int, answer: int
) -> None:
    """For its prompt, for its answer, for its adapter: the pool has too few pages beside those that are pinned."""
    engine = make_engine(pages=12, needs={"A": 4, "B": 9}, max_model_len=64)
    assert engine.residency.keep(9, ["A"], []) == ""
    settle(engine)
    for i in range(6):
        engine.submit((1, i), [i] * 9, 6)
    engine.run_until_idle()
    assert engine.residency.activities.of("A").evictions == 0
    large = engine.submit((2, 1), [1] * prompt, answer, adapter)
    engine.run_until_idle(200)
    assert large.text == large.expected
    assert engine.residency.activities.of("A").evictions == 1
    engine.now_s += 2
    settle(engine)
    assert is_kept(engine, "A")


@pytest.mark.parametrize(("prompt", "answer"), [(34, 4), (20, 30)])
def test_what_is_pinned_gives_way_though_another_adapter_is_being_read(prompt: int, answer: int) -> None:
    """It has pages while it is read, but the read does not end: nothing is to be had there soon."""
    engine = make_engine(pages=20, needs={"A": 8, "B": 4}, max_model_len=64)
    assert engine.residency.keep(9, ["A"], []) == ""
    settle(engine)
    engine.loader.tells = True
    engine.submit((1, 1), [1], 1, "B")
    while not engine.loader.told:
        engine.step(load_speed=1)
    large = engine.submit((2, 1), [1] * prompt, answer)
    for _ in range(60):
        engine.step(load_speed=0)
    assert large.text == large.expected
    engine.run_until_idle()


def test_a_thousand_pinned_adapters_give_way_to_one_request() -> None:
    digests = [str(i) for i in range(1000)]
    engine = make_engine(pages=2000, needs=dict.fromkeys(digests, 1), cpu_loras=1000, max_model_len=8000, quick=True)
    assert engine.residency.keep(9, digests, []) == ""
    settle(engine)
    large = engine.submit((1, 1), [1] * 7990, 2)
    engine.run_until_idle(1000)
    assert large.text == large.expected
    assert engine.residency.evictions > 990


def test_a_pin_that_found_no_room_at_first_is_tried_again() -> None:
    engine = make_engine(pages=12, needs={"A": 6}, max_model_len=64)
    long = engine.submit((1, 1), [1] * 30, 14)
    engine.step()
    assert engine.residency.keep(9, ["A"], []) == ""
    while long.finished is None:
        engine.step()
    assert not engine.residency.ready("A")
    engine.now_s += 2
    settle(engine)
    assert is_kept(engine, "A")


def test_an_adapter_without_room_is_not_brought_in_before_its_requests_turn() -> None:
    """Between requests of a single step nobody runs for a moment: no reason to copy A out, B in, and A in again."""
    engine = make_engine(pages=16, needs={"A": 10, "B": 9}, max_num_batched_tokens=8)
    engine.submit((2, 1), [1] * 8, 40, tenant=2)
    engine.run_until_idle()
    for i in range(12):
        engine.submit((1, i), [1 + i] * 8, 1, "A", tenant=1)
    indebted = engine.submit((2, 2), [1] * 4, 4, "B", tenant=2)
    engine.run_until_idle()
    assert indebted.text == indebted.expected
    assert engine.residency.loads <= 3
