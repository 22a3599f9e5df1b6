"""What a step holds, who is refused, and how requests end."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from stencilpress.engine.messages import Sampling, Submit
from stencilpress.engine.plan import FAILED, Sampled
from tests.unit.simulator import code, make_engine, shape


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


def test_steps_are_counted_by_their_adapters_and_requests() -> None:
    engine = make_engine(max_loras=3)
    for i, adapter in enumerate(["A", "B", None, "C", "A", "D", None, "B"]):
        engine.submit((1, i), [1] * (i + 1), 3 + i, adapter)
    adapters, requests = Counter[int](), Counter[int]()
    while not engine.scheduler.idle:
        plan = engine.step()
        if plan is not None:
            adapters[sum(segment.adapter is not None for segment in plan.segments)] += 1
            requests[sum(len(segment.chunks) for segment in plan.segments)] += 1
    stats = engine.scheduler.stats(0)
    assert (stats.adapters_per_step, stats.requests_per_step) == (adapters, requests)
    assert sum(adapters.values()) == stats.steps
    assert (stats.adapter_hits, stats.adapter_misses) == (2, 4)


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


@pytest.mark.parametrize(("pages", "adapter_pages"), [(50, 5), (5, 1 << 30)])
def test_an_adapter_that_the_pool_cannot_have_is_no_fault_of_its_requests(pages: int, adapter_pages: int) -> None:
    """A shorter prompt would not help. The operator is told, as of one that cannot be read."""
    engine = make_engine(needs={"A": 6}, pages=pages, adapter_pages=adapter_pages)
    for number in (1, 2):
        client = engine.submit((1, number), [1], 1, "A")
        engine.run_until_idle()
        assert code(client) == "adapter_unavailable"
        assert engine.residency.activities.of("A").error == "adapter needs 6 pages, and all of them may have 5"
    assert (engine.residency.failures, engine.loader.fetches) == (1, ["A"])


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


def test_a_draw_that_failed_ends_its_own_request() -> None:
    engine = make_engine()
    doomed, spared = (engine.submit((1, i), [1, 2], 9) for i in range(2))
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.scheduler.commit(plan, [replace(s, token=FAILED) if s.key == (1, 0) else s for s in engine.device.run(plan)])
    engine.run_until_idle()
    assert (code(doomed), doomed.text) == ("internal", [])
    assert spared.text == spared.expected


def test_what_a_draw_that_failed_was_computed_from_is_not_found_again() -> None:
    engine = make_engine()
    engine.submit((1, 1), [1] * 9, 9, salt=b"salt")
    plan = engine.scheduler.plan()
    assert plan is not None
    engine.scheduler.commit(plan, [replace(s, token=FAILED) for s in engine.device.run(plan)])
    told = []
    for i in (2, 3):
        client = engine.submit((1, i), [1] * 9, 1, salt=b"salt")
        engine.run_until_idle()
        assert client.finished is not None
        told.append(client.finished.cached_tokens)
    assert told == [0, 8]


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
