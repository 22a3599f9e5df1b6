"""Tenants beside each other: shares, floods, priorities, deadlines and the queue."""

from __future__ import annotations

import pytest

from tests.unit.simulator import Client, Engine, code, make_engine, shape
from tests.unit.virtual_device import VOCAB


def flood(engine: Engine, tenant: int, depth: int, *, tokens: int = 16, **asked: object) -> list[Client]:
    """So many requests of a tenant on a connection of its own, beside those it has."""
    first = max((key[1] for key in engine.clients if key[0] == tenant), default=0) + 1
    return [
        engine.submit((tenant, first + i), [1] * 8, tokens, tenant=tenant, **asked)  # type: ignore[arg-type]
        for i in range(depth)
    ]


def test_another_tenants_request_is_next_whatever_waits_before_it() -> None:
    """Two hundred long requests hold all seats and the queue; a short one takes the first seat that is free."""
    engine = make_engine(max_num_seqs=4, max_waiting=1000)
    flooding = flood(engine, 1, 200, tokens=40)
    engine.step()
    small = engine.submit((2, 1), [2] * 5, 5, tenant=2)
    while small.finished is None:
        engine.step()
    assert sum(client.finished is not None for client in flooding) <= 8
    engine.run_until_idle(20_000)


@pytest.mark.parametrize("ahead", [False, True])
def test_who_has_all_seats_gives_one_to_who_has_none(ahead: bool) -> None:
    """Long before an answer ends, at the price of one preemption."""
    engine = make_engine(max_num_seqs=4, max_model_len=300, pages=1000)
    engine.ahead = ahead
    greedy = flood(engine, 1, 6, tokens=200)
    for _ in range(3):
        engine.step()
    small = engine.submit((2, 1), [2] * 5, 5, tenant=2)
    while small.finished is None:
        engine.step()
    assert engine.steps < 70
    assert engine.scheduler.stats(0).preemptions == 1
    assert not any(client.finished is not None for client in greedy)
    engine.run_until_idle()
    assert small.text == small.expected
    assert all(client.text == client.expected for client in greedy)


@pytest.mark.parametrize("ahead", [False, True])
def test_who_has_all_pages_gives_some_to_who_has_none(ahead: bool) -> None:
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=300, pages=150)
    engine.ahead = ahead
    greedy = flood(engine, 1, 4, tokens=140)
    for _ in range(80):
        engine.step()
    large = engine.submit((2, 1), [2] * 200, 5, tenant=2)
    while large.finished is None:
        engine.step()
    assert engine.steps < 80 + 60
    assert not any(client.finished is not None for client in greedy)
    engine.run_until_idle()
    assert large.text == large.expected
    assert all(client.text == client.expected for client in greedy)


def test_tenants_share_across_gateways() -> None:
    """A tenant gains nothing by coming through many gateways."""
    engine = make_engine(max_num_seqs=2)
    many = [engine.submit((1 + i, i), [1] * 8, 8, tenant=1) for i in range(10)]
    one = [engine.submit((99, i), [1] * 8, 8, tenant=2) for i in range(5)]
    while any(client.finished is None for client in one):
        engine.step()
    assert sum(client.finished is not None for client in many) in (4, 5, 6)
    engine.run_until_idle()


def test_long_answers_count_as_they_grow() -> None:
    """Equal prompts, but one tenant's answers end at once: it gets many more of them."""
    engine = make_engine(max_num_seqs=1, max_model_len=64)
    long = flood(engine, 1, 30, tokens=50)
    short = flood(engine, 2, 60, tokens=1)
    while sum(client.finished is not None for client in long) < 3:
        engine.step()
    assert sum(client.finished is not None for client in short) > 20
    engine.run_until_idle()


def test_a_tenant_saves_nothing_up_while_it_is_away() -> None:
    engine = make_engine(max_num_seqs=1)
    early = flood(engine, 1, 20)
    while sum(client.finished is not None for client in early) < 10:
        engine.step()
    late = flood(engine, 2, 10)
    while any(client.finished is None for client in late):
        engine.step()
    assert sum(client.finished is not None for client in early) in (19, 20)
    engine.run_until_idle()


def test_who_comes_back_between_requests_owes_for_the_last_one() -> None:
    """One tenant's queue is never empty; the other sends its next long request when it has heard the last one out."""
    engine = make_engine(max_num_seqs=1, needs={})
    served = {1: 0, 2: 0}
    sent = 0
    for _ in range(2000):
        for tenant, (outstanding, tokens) in {1: (1, 56), 2: (10, 4)}.items():
            while sum(key[0] == tenant for key in engine.live) < outstanding:
                sent += 1
                engine.submit((tenant, sent), [1] * 4, tokens, tenant=tenant)
        engine.step()
        for key in [key for key, client in engine.clients.items() if client.finished is not None]:
            client = engine.clients.pop(key)
            served[key[0]] += len(client.prompt) + 2 * len(client.text)
    assert abs(2 * served[1] / sum(served.values()) - 1) < 0.1, served


def test_a_row_of_new_tenants_does_not_hold_up_one_that_has_had_more() -> None:
    """Each comes once and has had nothing yet; each is served, but the old one in between."""
    engine = make_engine(max_num_seqs=1)
    old = flood(engine, 1, 40)
    while sum(client.finished is not None for client in old) < 3:
        engine.step()
    newcomers: list[Client] = []
    for tenant in range(100, 300):
        while sum(client.finished is None for client in newcomers) < 3:
            newcomers.append(engine.submit((2, tenant + 1000 * len(newcomers)), [1] * 8, 16, tenant=len(newcomers) + 9))
        engine.step()
    begun = sum(client.began_at_step is not None for client in newcomers)
    assert begun > 4
    assert sum(client.finished is not None for client in old) >= 3 + begun // 4
    engine.run_until_idle()


@pytest.mark.parametrize("ahead", [False, True])
def test_short_answers_that_end_by_themselves_have_their_share(ahead: bool) -> None:
    """Planned ahead, one that ends is computed once more, in vain: no token of that is its tenant's."""
    engine = make_engine(needs={})
    engine.ahead = ahead
    served = {1: 0, 2: 0}
    sent = 0
    for _ in range(1000):
        for tenant in served:
            while sum(key[0] == tenant for key in engine.live) < 12:
                sent += 1
                length = 2 if tenant == 1 else 24
                stops = tuple(range(VOCAB)) if tenant == 1 else ()
                engine.submit((tenant, sent), [1] * length, 24, stop_ids=stops, tenant=tenant)
        engine.step()
        for key in [key for key, client in engine.clients.items() if client.finished is not None]:
            client = engine.clients.pop(key)
            served[key[0]] += len(client.prompt) + 2 * len(client.text)
    assert abs(2 * served[1] / sum(served.values()) - 1) < 0.1


def test_priority_orders_one_tenants_requests_and_nobody_elses() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit((1, 0), [1], 4, tenant=1)
    engine.step()
    low = engine.submit((1, 1), [1], 4, tenant=1)
    high = engine.submit((1, 2), [1], 4, tenant=1, priority=5)
    other = engine.submit((2, 1), [1], 4, tenant=2, priority=-5)
    order = []
    while not engine.scheduler.idle:
        engine.step()
        order += [client for client in (low, high, other) if client.finished is not None and client not in order]
    assert order == [other, high, low]


def test_priority_is_worth_a_bounded_wait() -> None:
    """A stream of high priority lets one of low priority in after its time."""
    engine = make_engine(max_num_seqs=1)
    low = engine.submit((1, 1), [1], 4, priority=-1)
    last = 1
    while low.began_at_step is None:
        while len(engine.live) < 4:
            last += 1
            engine.submit((1, last), [1], 4, priority=0)
        engine.step()
        assert engine.steps < 300
    assert engine.steps > 250
    engine.run_until_idle()


def test_a_deadline_refuses_who_has_not_begun_even_while_nothing_runs() -> None:
    engine = make_engine()
    engine.parked.add(1)
    engine.scheduler.park(1)
    parked = engine.submit((1, 1), [1], 3, max_wait_ms=50)
    cold = engine.submit((2, 1), [1], 3, "A", max_wait_ms=50)
    assert engine.scheduler.seconds_to_deadline() == pytest.approx(0.05)
    for _ in range(4):
        engine.step(load_speed=0)
    assert (code(parked), code(cold)) == ("deadline", "deadline")
    assert engine.scheduler.seconds_to_deadline() == float("inf")
    assert engine.scheduler.idle


def test_a_deadline_is_for_the_begin_not_for_the_end() -> None:
    engine = make_engine(pages=6, needs={})
    clients = [engine.submit((1, i), [i] * 6, 12, max_wait_ms=30) for i in range(2)]
    engine.run_until_idle()
    assert engine.scheduler.stats(0).preemptions == 1
    assert all(client.text == client.expected for client in clients)


def test_who_waits_long_keeps_nobody_in_memory_who_is_done() -> None:
    """Texts of requests that have ended, behind one that an adapter on a hanging disk holds up for an hour."""
    engine = make_engine(needs={"A": 2})
    held_up = engine.submit((1, 0), [1], 1, "A", max_wait_ms=3_600_000)
    for i in range(1, 1000):
        engine.submit((1, i), [1], 1, max_wait_ms=7_200_000)
        while engine.clients[1, i].finished is None:
            engine.step(load_speed=0)
    assert len(engine.scheduler._deadlines) < 100
    engine.run_until_idle()
    assert held_up.text == held_up.expected


def test_a_request_tells_how_long_it_waited_and_for_what() -> None:
    engine = make_engine(max_num_seqs=1)
    first = engine.submit((1, 1), [1], 10)
    cold = engine.submit((1, 2), [1], 2, "A")
    for _ in range(4):
        engine.step(load_speed=0)
    engine.run_until_idle()
    assert first.finished is not None
    assert first.finished.queue_ms == pytest.approx(20)
    assert first.finished.cold_start_ms == 0
    assert cold.finished is not None
    assert cold.finished.cold_start_ms == pytest.approx(6 * 20)
    assert cold.finished.queue_ms == pytest.approx(11 * 20)


def test_in_a_full_queue_the_longest_line_makes_way() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=8)
    flooding = flood(engine, 1, 9)
    engine.step()
    polite = flood(engine, 2, 2)
    engine.deliver()
    assert [code(client) for client in flooding if client.finished is not None] == ["overloaded"] * 2
    assert all(client.finished is not None for client in flooding[-2:]), "those that came last"
    assert all(client.finished is None for client in polite)
    [refused] = flood(engine, 1, 1)
    engine.deliver()
    assert code(refused) == "overloaded"
    engine.run_until_idle()


def test_places_in_a_full_queue_go_by_weight() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=12)
    flood(engine, 9, 1)
    engine.step()
    light, heavy = flood(engine, 1, 20, weight=1.0), flood(engine, 2, 20, weight=2.0)
    engine.deliver()
    waiting = [sum(client.finished is None for client in clients) for clients in (light, heavy)]
    assert waiting == [4, 8]
    engine.run_until_idle()


def test_who_has_had_most_gives_up_pages_first() -> None:
    """Not whoever was seated last."""
    engine = make_engine(pages=9, needs={}, page_tokens=4)
    greedy = [engine.submit((1, i), [1] * 8, 20, tenant=1) for i in range(2)]
    for _ in range(3):
        engine.step()
    modest = engine.submit((2, 1), [1] * 4, 20, tenant=2)
    preemptions = engine.scheduler.stats(0).preemptions
    while engine.scheduler.stats(0).preemptions == preemptions:
        plan = engine.step()
    assert 1 in [id_ for id_, _ in shape(plan)[None]], "one of the greedy tenant's"
    assert modest.began_at_step is not None
    while modest.finished is None:
        engine.step()
    assert any(client.finished is None for client in greedy)
    engine.run_until_idle()


def test_a_long_prompt_lets_other_tenants_prompts_go_first() -> None:
    """It has the step's tokens to itself for a while only; decodes go on all the time."""
    engine = make_engine(max_num_batched_tokens=512, max_model_len=30_000, pages=10_000, page_tokens=16, quick=True)
    talker = engine.submit((3, 1), [1] * 4, 100, tenant=3)
    engine.step()
    engine.submit((1, 1), [1] * 20_000, 1, tenant=1)
    for _ in range(2):
        engine.step()
    short = engine.submit((2, 1), [1] * 300, 1, tenant=2)
    while short.finished is None:
        assert (1, 1) not in engine.live or engine.clients[1, 1].finished is None
        engine.step()
    assert engine.steps <= 7
    assert len(talker.text) == engine.steps
    engine.run_until_idle()


def test_prompts_of_equal_length_are_computed_one_by_one() -> None:
    engine = make_engine(max_num_batched_tokens=256, max_model_len=2000, pages=1000, page_tokens=16, quick=True)
    blocker = engine.submit((9, 1), [1] * 1, 4, tenant=9)
    engine.step()
    clients = [engine.submit((i, 1), [1] * 510, 1, tenant=i) for i in range(4)]
    engine.run_until_idle()
    assert [client.began_at_step for client in clients] == [3, 5, 7, 9]
    assert blocker.text == blocker.expected


def test_a_pool_too_small_for_all_answers_is_not_thrashed() -> None:
    """Eight could sit by their prompts; two fit with their answers."""
    engine = make_engine(pages=34, needs={}, max_model_len=64)
    clients = [engine.submit((1, i), [1 + i % (VOCAB - 1)] * 4, 60) for i in range(60)]
    engine.run_until_idle(20_000)
    assert all(client.text == client.expected for client in clients)
    assert engine.scheduler.stats(0).preemptions < 30


def make_cautious(engine: Engine, *, requests: int, prompt_tokens: int, max_tokens: int) -> None:
    """By preemptions, of requests that are gone then."""
    for i in range(requests):
        engine.submit((1, i), [1 + i] * prompt_tokens, max_tokens)
    while engine.scheduler.stats(0).preemptions < 4:
        engine.step()
    for i in range(requests):
        engine.scheduler.abort((1, i))


def test_once_answers_end_early_newcomers_need_not_leave_room_for_all_of_them() -> None:
    """Preemptions made it cautious; whole answers make it bold again, and requests that are gone owe nothing."""
    engine = make_engine(pages=34, needs={}, max_model_len=64)
    make_cautious(engine, requests=8, prompt_tokens=4, max_tokens=60)
    for i in range(300):
        engine.submit((2, i), [1 + i % (VOCAB - 1)] * 4, 1)
        engine.run_until_idle()
    for i in range(8):
        engine.submit((3, i), [1 + i] * 4, 60)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.stats(0).running == 8
    engine.run_until_idle()


def test_who_is_alone_has_all_pages_however_cautious_the_engine_is() -> None:
    engine = make_engine(pages=16, needs={}, max_model_len=64)
    make_cautious(engine, requests=12, prompt_tokens=5, max_tokens=35)
    large = engine.submit((2, 1), [9] * 5, 59)
    engine.run_until_idle()
    assert large.text == large.expected


def test_who_has_a_seat_takes_none_from_others() -> None:
    engine = make_engine(max_num_seqs=4, max_model_len=300, pages=1000)
    flood(engine, 1, 3, tokens=200)
    first = engine.submit((2, 1), [2] * 5, 200, tenant=2)
    engine.step()
    second = engine.submit((2, 2), [2] * 5, 5, tenant=2)
    while first.finished is None and second.finished is None:
        engine.step()
    assert engine.scheduler.stats(0).preemptions == 0
    engine.run_until_idle()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 5e-324, 1e308])
def test_a_weight_that_is_none_ends_no_engine(weight: float) -> None:
    """A tenant's counter is a sum of quotients by its weight, and virtual time of quotients by the sum of weights."""
    engine = make_engine()
    for i in range(3):
        engine.submit((1, i), [1], 3, "A", weight=weight, tenant=1)
        engine.submit((2, i), [1], 3, "A", weight=1e-3, tenant=2)
    engine.run_until_idle()
    assert all(client.text == client.expected for client in engine.clients.values())
