from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stencilpress.engine.limits import Limits
from stencilpress.engine.messages import Sampling, Submit
from stencilpress.engine.plan import Fetched, FetchOrder, Sampled, StepPlan
from tests.unit.simulator import VOCAB, Client, Engine, Storm

LIMITS = Limits(
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_loras=4,
    max_waiting=100,
    max_model_len=64,
    page_tokens=4,
    vocab_size=VOCAB,
)


def make_engine(*, pages: int = 100, needs: dict[str, int] | None = None, cpu_loras: int = 4, **limits: Any) -> Engine:
    adapters = needs if needs is not None else dict.fromkeys("ABCDEFGH", 2)
    return Engine(replace(LIMITS, **limits), pages=pages, needs=adapters, max_cpu_loras=cpu_loras)


def shape(plan: StepPlan | None) -> dict[str | None, list[tuple[int, int]]]:
    """A plan as ``{adapter: [(request id, tokens), ...]}``."""
    assert plan is not None
    return {
        segment.adapter: [(chunk.key[1], len(chunk.tokens)) for chunk in segment.chunks] for segment in plan.segments
    }


def code(client: Client) -> str:
    assert client.finished is not None
    return client.finished.code


# Any traffic, any faults


@pytest.mark.parametrize("seed", range(80))
def test_storm(seed: int) -> None:
    """The simulator asserts at every step; what is left to see is that nothing is left."""
    engine = Storm(seed).run(400)
    assert engine.pool.kv == 0
    assert engine.pool.free + engine.pool.adapter == engine.pool.total
    assert all(client.finished is not None for client in engine.clients.values())
    engine.residency.pump()
    while engine.residency.evict_one():
        pass
    assert engine.pool.free == engine.pool.total


# One step


def test_a_step_mixes_decodes_and_prefills_of_base_and_adapters() -> None:
    engine = make_engine()
    engine.submit((1, 1), [1, 2, 3], 8)
    engine.submit((1, 2), [4, 5], 8, "A")
    engine.submit((1, 3), [6], 8, "B")
    while engine.scheduler.stats(0).running < 3:
        engine.step()
    engine.submit((1, 4), [7] * 9, 8)
    engine.submit((1, 5), [8] * 9, 8, "A")
    assert shape(engine.step()) == {None: [(1, 1), (4, 9)], "A": [(2, 1), (5, 4)], "B": [(3, 1)]}
    assert shape(engine.step()) == {None: [(1, 1), (4, 1)], "A": [(2, 1), (5, 5)], "B": [(3, 1)]}
    engine.run_until_idle()


def test_a_long_prompt_is_computed_in_chunks_and_draws_once() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    client = engine.submit((1, 1), list(range(20)), 1)
    assert [shape(engine.step()) for _ in range(3)] == [{None: [(1, 8)]}, {None: [(1, 8)]}, {None: [(1, 4)]}]
    assert client.text == client.expected


def test_seats_never_outnumber_the_tokens_of_a_step() -> None:
    engine = make_engine(max_num_batched_tokens=2)
    for i in range(5):
        engine.submit((1, i), [1, 2, 3, 4], 4)
    engine.step()
    assert engine.scheduler.stats(0).running <= 2
    engine.run_until_idle()


def test_only_so_many_adapters_run_but_the_base_needs_no_slot() -> None:
    engine = make_engine(max_loras=2)
    for i, adapter in enumerate(["A", "B", "C", None, "A"]):
        engine.submit((1, i), [1, 2], 6, adapter)
    running = {key for _ in range(4) for key in shape(engine.step())}
    assert running == {"A", "B", None}
    engine.run_until_idle()


def test_one_message_a_step_carries_all_of_a_gateway() -> None:
    engine = make_engine()
    for i in range(3):
        engine.scheduler.add((1, i), Submit(i, b"\x01\0\0\0", "", 1, Sampling()))
    engine.scheduler.add((2, 7), Submit(7, b"\x01\0\0\0", "", 2, Sampling()))
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.scheduler.commit(plan, engine.device.run(plan))
    replies = engine.scheduler.take_replies()
    assert [token.id for token in replies[1].tokens] == [0, 1, 2]
    assert [(end.id, end.reason) for end in replies[1].finished] == [(0, "length"), (1, "length"), (2, "length")]
    assert [token.id for token in replies[2].tokens] == [7]
    assert replies[2].finished == ()
    assert engine.scheduler.take_replies() == {}


def test_logprobs_pass_through() -> None:
    engine = make_engine()
    engine.scheduler.add((1, 1), Submit(1, b"\x01\0\0\0", "", 1, Sampling(logprobs=1)))
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.scheduler.commit(plan, [Sampled((1, 1), 5, -0.5, ((5, -0.5), (6, -1.5)))])
    [token] = engine.scheduler.take_replies()[1].tokens
    assert (token.token, token.logprob, token.top) == (5, -0.5, ((5, -0.5), (6, -1.5)))


# Refusals


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = make_engine(pages=10)
    refused = {
        "context_exceeded": engine.submit((1, 1), [1] * 60, 5),
        "capacity": engine.submit((1, 2), [1] * 30, 11),
        "internal": engine.submit((1, 3), [], 5),
    }
    fits = engine.submit((1, 4), [1] * 30, 10)
    engine.deliver()
    assert {name: code(client) for name, client in refused.items()} == {name: name for name in refused}
    engine.run_until_idle()
    assert fits.text == fits.expected


@pytest.mark.parametrize(
    "submit",
    [
        Submit(1, b"\1\0\0", "", 1, Sampling()),
        Submit(1, b"\xff\xff\xff\xff", "", 1, Sampling()),
        Submit(1, b"\xff\0\0\0", "", 1, Sampling()),
        Submit(1, b"\1\0\0\0", "", 0, Sampling()),
    ],
    ids=["torn ids", "negative id", "id outside the vocabulary", "nothing to generate"],
)
def test_malformed_requests_reach_no_device(submit: Submit) -> None:
    engine = make_engine()
    engine.scheduler.add((1, 1), submit)
    [finished] = engine.scheduler.take_replies()[1].finished
    assert (finished.reason, finished.code) == ("error", "internal")
    assert engine.scheduler.plan() is None


def test_an_adapters_pages_count_against_the_pool_once_they_are_known() -> None:
    engine = make_engine(pages=10, needs={"A": 6})
    small, large = engine.submit((1, 1), [1] * 10, 6, "A"), engine.submit((1, 2), [1] * 10, 7, "A")
    engine.run_until_idle()
    assert small.text == small.expected
    assert code(large) == "capacity"
    later = engine.submit((1, 3), [1] * 10, 7, "A")
    engine.deliver()
    assert code(later) == "capacity"


def test_a_full_queue_refuses_but_free_seats_are_no_queue() -> None:
    engine = make_engine(max_num_seqs=2, max_waiting=3)
    clients = [engine.submit((1, i), [1, 2], 4) for i in range(6)]
    engine.deliver()
    assert code(clients[5]) == "overloaded"
    assert all(client.finished is None for client in clients[:5])
    engine.run_until_idle()


def test_an_id_in_use_is_the_callers_fault() -> None:
    engine = make_engine()
    engine.submit((1, 1), [1], 4)
    with pytest.raises(ValueError, match="in use"):
        engine.scheduler.add((1, 1), Submit(1, b"\1\0\0\0", "", 1, Sampling()))
    engine.run_until_idle()


# Ends


def test_a_stop_id_is_delivered_and_ends_the_text() -> None:
    engine = make_engine()
    free = engine.submit((1, 1), [1, 2, 3], 20)
    stopped = engine.submit((1, 2), [1, 2, 3], 20, stop_ids=(free.expected[4],))
    engine.run_until_idle()
    assert stopped.text == free.text[: free.text.index(free.expected[4]) + 1]
    assert stopped.finished is not None
    assert stopped.finished.reason == "stop"


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_at_any_moment_frees_everything(steps: int, in_flight: bool) -> None:
    """Over the steps the request is waiting for its adapter, prefilling in chunks, and running."""
    engine = make_engine(max_num_batched_tokens=4)
    client = engine.submit((1, 1), [1] * 10, 10, "A")
    for _ in range(steps):
        engine.step()
    if in_flight:
        engine.step(in_flight=[(1, 1)])
    else:
        engine.scheduler.abort((1, 1))
    engine.step()
    if client.finished is None:
        assert in_flight, "there was no step to abort it in"
        engine.scheduler.abort((1, 1))
        engine.deliver()
    assert client.finished is not None
    assert client.finished.reason == "aborted"
    assert engine.pool.kv == 0
    engine.scheduler.abort((1, 1))
    assert engine.scheduler.take_replies() == {}


def test_pages_of_a_request_aborted_in_flight_wait_for_the_step() -> None:
    engine = make_engine(pages=3)
    engine.submit((1, 1), [1] * 8, 4)
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.scheduler.abort((1, 1))
    assert (engine.pool.free, engine.pool.quarantined) == (1, 2)
    engine.scheduler.commit(plan, engine.device.run(plan))
    assert (engine.pool.free, engine.pool.quarantined) == (3, 0)
    engine.deliver()


def test_a_dead_gateway_leaves_nothing_and_is_told_nothing() -> None:
    engine = make_engine(max_num_seqs=2)
    for i in range(4):
        engine.submit((1, i), [1, 2], 9, "A")
    survivor = engine.submit((2, 1), [1, 2], 9, "B")
    for _ in range(3):
        engine.step()
    engine.scheduler.abort_connection(1)
    assert 1 not in engine.scheduler.take_replies()
    engine.live = {(2, 1)}
    engine.run_until_idle()
    assert survivor.text == survivor.expected


def test_shutting_down_ends_every_request_once() -> None:
    engine = make_engine(max_num_seqs=2)
    clients = [engine.submit((i % 2, i), [1, 2], 9, "A") for i in range(5)]
    engine.step()
    engine.step()
    engine.scheduler.abort_all()
    engine.deliver()
    assert all(client.finished is not None and client.finished.reason == "aborted" for client in clients)
    assert engine.scheduler.idle


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    engine = make_engine(max_num_seqs=2)
    doomed = [engine.submit((1, i), [1, 2], 9) for i in range(2)]
    spared = engine.submit((1, 2), [1, 2], 9)
    engine.step(fails=True)
    assert [code(client) for client in doomed] == ["internal", "internal"]
    aborted = engine.submit((1, 3), [1, 2], 9)
    engine.step(fails=True, in_flight=[(1, 2)])
    assert spared.finished is not None
    assert spared.finished.reason == "aborted"
    assert code(aborted) == "internal"
    spared = engine.submit((1, 4), [1, 2], 9)
    engine.run_until_idle()
    assert spared.text == spared.expected


def test_a_commit_that_does_not_match_the_plan_changes_nothing() -> None:
    engine = make_engine()
    client = engine.submit((1, 1), [1, 2], 3)
    plan = engine.scheduler.plan()
    assert plan is not None
    for wrong in ([], [Sampled((1, 2), 5)], [Sampled((1, 1), 5), Sampled((1, 1), 5)]):
        with pytest.raises(ValueError, match="do not match"):
            engine.scheduler.commit(plan, wrong)
    with pytest.raises(RuntimeError, match="in flight"):
        engine.scheduler.plan()
    with pytest.raises(ValueError, match="not in flight"):
        engine.scheduler.commit(replace(plan), [])
    engine.scheduler.commit(plan, engine.device.run(plan))
    engine.run_until_idle()
    assert client.text == client.expected


# Memory


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


# Adapters


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


# Parked gateways


def test_a_parked_gateway_is_not_planned_and_loses_nothing() -> None:
    engine = make_engine()
    slow = [engine.submit((1, i), [1, 2], 9, "A") for i in range(2)]
    fast = engine.submit((2, 1), [1, 2], 9)
    for _ in range(4):
        engine.step()
    engine.parked.add(1)
    engine.scheduler.park(1)
    late = engine.submit((1, 5), [3], 4)
    heard = [len(client.text) for client in slow]
    while fast.finished is None:
        engine.step()
    engine.step()
    assert [len(client.text) for client in slow] == heard
    assert late.finished is None
    engine.parked.clear()
    engine.scheduler.unpark(1)
    engine.run_until_idle()
    assert all(client.text == client.expected for client in (*slow, late))


def test_a_parked_gateway_keeps_its_seats_until_somebody_waits() -> None:
    engine = make_engine(max_num_seqs=2)
    slow = [engine.submit((1, i), [1, 2], 9) for i in range(2)]
    engine.step()
    engine.parked.add(1)
    engine.scheduler.park(1)
    assert engine.step() is None
    assert engine.scheduler.stats(0).preemptions == 0
    fast = engine.submit((2, 1), [1, 2], 3)
    while fast.finished is None:
        assert engine.step() is not None
    assert engine.scheduler.stats(0).preemptions == 2
    engine.parked.clear()
    engine.scheduler.unpark(1)
    engine.run_until_idle()
    assert all(client.text == client.expected for client in slow)


def test_parked_seats_are_the_first_to_go_when_pages_run_out() -> None:
    engine = make_engine(pages=8, needs={})
    parked = engine.submit((1, 1), [1] * 7, 8)
    others = [engine.submit((2, i), [i] * 5, 11) for i in range(2)]
    engine.step()
    engine.step()
    assert engine.scheduler.stats(0).running == 3
    engine.parked.add(1)
    engine.scheduler.park(1)
    while any(client.finished is None for client in others):
        engine.step()
    assert engine.scheduler.stats(0).preemptions == 1
    engine.parked.clear()
    engine.scheduler.unpark(1)
    engine.run_until_idle()
    assert parked.text == parked.expected


def test_a_parked_gateway_fills_no_queue_but_its_own() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=2)
    engine.scheduler.park(1)
    slow = [engine.submit((1, i), [1], 3) for i in range(4)]
    fast = [engine.submit((2, i), [1], 3) for i in range(3)]
    engine.deliver()
    assert [client.finished is None for client in slow] == [True, True, True, False]
    assert [client.finished is None for client in fast] == [True, True, True]
    engine.scheduler.unpark(1)
    engine.run_until_idle()


def test_a_parked_gateways_requests_can_be_aborted_and_refused() -> None:
    engine = make_engine(pages=10, needs={"A": 2})
    waiting = engine.submit((1, 1), [1], 3, "A")
    engine.scheduler.park(1)
    engine.parked.add(1)
    aborted = engine.submit((1, 2), [1], 3, "A")
    engine.scheduler.abort((1, 2))
    engine.deliver()
    assert aborted.finished is not None
    engine.loader.broken.add("A")
    engine.submit((2, 1), [1], 3, "A")
    engine.step()
    engine.step()
    assert waiting.finished is None
    engine.scheduler.unpark(1)
    engine.parked.clear()
    engine.deliver()
    assert code(waiting) == "adapter_unavailable"


# Nobody starves


def wait_behind_a_stream(engine: Engine, adapter: str | None, patient: Client, limit: int) -> int:
    """Steps until ``patient`` ends, with six requests of ``adapter`` always there."""
    last = 100
    for step in range(limit):
        while sum(key[0] == 2 for key in engine.live) < 6:
            last += 1
            engine.submit((2, last), [1] * 8, 3 + last % 4, adapter)
        engine.step()
        if patient.finished is not None:
            return step
    return limit


@pytest.mark.parametrize(("patience", "starves"), [(10, False), (10_000, True)])
def test_a_stream_on_one_adapter_lets_another_have_the_only_slot(patience: int, starves: bool) -> None:
    engine = make_engine(max_loras=1, max_num_seqs=4, patience_steps=patience)
    for i in range(3):
        engine.submit((2, i), [1] * 8, 4 + 2 * i, "A")
    for _ in range(3):
        engine.step()
    patient = engine.submit((1, 1), [1], 4, "B")
    assert (wait_behind_a_stream(engine, "A", patient, 500) == 500) == starves


@pytest.mark.parametrize(("patience", "starves"), [(10, False), (10_000, True)])
def test_a_stream_on_the_base_lets_a_large_adapter_have_its_pages(patience: int, starves: bool) -> None:
    engine = make_engine(pages=12, needs={"A": 9}, max_num_seqs=3, patience_steps=patience)
    for i in range(3):
        engine.submit((2, i), [1] * 8, 4)
    engine.step()
    patient = engine.submit((1, 1), [1], 4, "A")
    assert (wait_behind_a_stream(engine, None, patient, 500) == 500) == starves


def test_a_starving_adapter_stops_no_more_slots_than_it_needs() -> None:
    engine = make_engine(max_loras=2, max_num_seqs=4, patience_steps=5)
    for i, adapter in enumerate("ABC"):
        engine.submit((1, i), [1], 30, adapter)
    for _ in range(12):
        engine.step()
    held_up = engine.submit((2, 1), [1], 30, "A")
    passing = engine.submit((2, 2), [1], 30, "B")
    engine.step()
    engine.step()
    assert passing.text, "the slot of A frees first, so B goes on as ever"
    assert not held_up.text
    engine.run_until_idle()


@pytest.mark.parametrize("seed", range(6))
def test_every_wait_in_a_flood_is_bounded(seed: int) -> None:
    """More adapters than slots, skewed popularity, a tight pool: nobody waits longer than all before it take."""
    rng = random.Random(seed)
    needs = {f"a{i}": rng.randint(1, 20) for i in range(rng.randint(2, 10))}
    engine = make_engine(
        pages=rng.randint(30, 50),
        needs=needs,
        cpu_loras=rng.randint(1, 8),
        max_num_seqs=rng.randint(2, 8),
        max_loras=rng.randint(1, 3),
        max_model_len=32,
        patience_steps=20,
    )
    choices = [None, *needs]
    weights = [1 / (i + 1) ** 2 for i in range(len(choices))]
    for last in range(1500):
        if len(engine.live) < 20:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 16))]
            engine.submit((1, last), prompt, rng.randint(1, 16), rng.choices(choices, weights)[0])
        engine.step(load_speed=rng.choice((0, 1, 3)))
        waits = [engine.steps - engine.clients[key].came_at_step for key in engine.live]
        assert max(waits, default=0) < 20 + 20 * 16
    engine.run_until_idle()


def test_stats_count() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit((1, 1), [1, 2, 3], 4, "A")
    engine.submit((1, 2), [1, 2], 4)
    while engine.clients[1, 2].finished is None:
        engine.step()
    stats = engine.scheduler.stats(7)
    assert (stats.id, stats.pages_total) == (7, 100)
    engine.run_until_idle()
    stats = engine.scheduler.stats(8)
    assert (stats.running, stats.waiting, stats.prompt_tokens, stats.completion_tokens) == (0, 0, 5, 8)
    assert (stats.adapters_hbm, stats.adapters_host, stats.adapter_loads, stats.pages_adapter) == (1, 1, 1, 2)
    assert stats.steps == engine.scheduler.stats(9).steps > 0
