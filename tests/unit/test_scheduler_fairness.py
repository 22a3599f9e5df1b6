"""Gateways that do not read harm nobody, and nobody starves."""

from __future__ import annotations

import random

import pytest

from stencilpress.engine.starved import EVERY_STEPS, STARVED_STEPS
from tests.unit.simulator import Client, Engine, code, make_engine
from tests.unit.virtual_device import VOCAB


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


def test_a_parked_gateway_does_not_keep_steps_from_being_planned_ahead() -> None:
    """It has given up its seats by then, and may stay parked for long."""
    engine = make_engine(max_num_seqs=2, needs={})
    engine.ahead = True
    slow = engine.submit((1, 1), [1, 2], 9)
    for i in range(8):
        engine.submit((2, i), [1, 2], 9)
    engine.step()
    engine.parked.add(1)
    engine.scheduler.park(1)
    assert engine.step() is None, "its seat is taken when the step has landed"
    for _ in range(20):
        assert engine.step() is not None
    engine.parked.clear()
    engine.scheduler.unpark(1)
    engine.run_until_idle()
    assert slow.text == slow.expected


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


@pytest.mark.parametrize("slots", [1, 2])
def test_the_base_does_not_starve_beside_its_tenants_adapter_that_is_always_overdue(slots: int) -> None:
    engine = make_engine(needs={"A": 1, "B": 1}, max_num_seqs=1, max_loras=slots, patience_steps=32)
    base = None
    sent = 0
    while base is None or not base.text:
        for tenant, adapter in ((1, "A"), (2, "B")):
            while sum(key[0] == tenant for key in engine.live) < 4:
                sent += 1
                engine.submit((tenant, sent), [1] * 12, 12, adapter, tenant=tenant)
        if engine.steps == 100:
            base = engine.submit((3, 1), [1] * 12, 12, tenant=2)
        engine.step()
        assert engine.steps < 100 + 12 * 12, "those of both that came before it, and those between"
    engine.run_until_idle()


@pytest.mark.parametrize(
    ("slots", "seats", "own"), [(1, 1, "BC"), (1, 2, "BC"), (1, 4, "BCD"), (2, 1, "BC"), (2, 4, "BCD")]
)
def test_a_shared_adapter_does_not_starve_beside_its_tenants_own_that_are_always_overdue(
    slots: int, seats: int, own: str
) -> None:
    """Another tenant uses it all the time, so that it is never overdue itself."""
    engine = make_engine(needs=dict.fromkeys("ABCD", 1), max_num_seqs=seats, max_loras=slots, patience_steps=32)
    patient = None
    sent = 0
    while patient is None or not patient.text:
        for tenant, adapters in ((1, "A"), (2, own)):
            while sum(key[0] == tenant for key in engine.live) < 4 * len(adapters):
                sent += 1
                engine.submit((tenant, sent), [1] * 12, 12, adapters[sent % len(adapters)], tenant=tenant)
        if engine.steps == 100:
            patient = engine.submit((3, 1), [1] * 12, 12, "A", tenant=2)
        engine.step()
        assert engine.steps < 100 + 24 * (4 * len(own) + 2), "as many of both as came before it, and two more"
    engine.run_until_idle()


@pytest.mark.parametrize("adapter", ["A", "B"])
@pytest.mark.parametrize("room", [{}, {"adapter_pages": 4}, {"pages": 18}, {"adapter_pages": 2, "cpu_loras": 1}])
def test_an_adapter_does_not_starve_though_its_tenant_has_had_most_by_the_base(
    adapter: str, room: dict[str, int]
) -> None:
    """Which runs beside the adapters that another tenant has the slot for, one after another; ``B`` is one of these."""
    needs = dict.fromkeys("ABC", 2)
    engine = make_engine(needs=needs, max_num_seqs=8, max_loras=1, patience_steps=8, quick=True, **room)
    rng = random.Random(1)
    patient = None
    sent = 0
    busy: dict[int, int] = {}
    while patient is None or not patient.text:
        for nth, (tenant, own) in enumerate(((1, None), (1, None), (2, "B"), (2, "C"))):
            if nth not in busy.values():
                sent += 1
                busy[sent] = nth
                engine.submit((1, sent), [1] * rng.randint(1, 12), rng.randint(1, 4), own, tenant=tenant)
        if engine.steps == 100:
            patient = engine.submit((2, 1), [1], 1, adapter, tenant=1)
        engine.step()
        busy = {id_: nth for id_, nth in busy.items() if (1, id_) in engine.live}
        assert engine.steps < 100 + STARVED_STEPS + 2 * EVERY_STEPS
    engine.run_until_idle()


def test_a_starved_requests_adapter_is_read_and_kept_though_host_memory_is_small() -> None:
    """Two images fit; those of tenants who have had less would always push it out again."""
    engine = make_engine(
        pages=45,
        needs={**dict.fromkeys("ACEFH", 9), "B": 1},
        adapter_pages=9,
        cpu_loras=2,
        max_num_seqs=3,
        patience_steps=8,
        quick=True,
    )
    uses: list[tuple[int, str | None]] = [(0, "E"), (0, "H"), (2, "C"), (3, "F"), (3, "A"), (1, None)]
    uses += [(1, adapter) for adapter in "CEHFA"]
    rng = random.Random(1)
    patient = None
    sent = 0
    busy: dict[int, int] = {}
    while patient is None or not patient.text:
        for nth, (tenant, own) in enumerate(uses):
            if nth not in busy.values():
                sent += 1
                busy[sent] = nth
                weight = (0.5, 1.0, 2.0, 2.0)[tenant]
                engine.submit((1, sent), [1] * 6, rng.randint(1, 12), own, tenant=tenant, weight=weight)
        if engine.steps == 150:
            patient = engine.submit((2, 1), [1], 1, "B", tenant=1)
        engine.step(load_speed=1)
        busy = {id_: nth for id_, nth in busy.items() if (1, id_) in engine.live}
        assert engine.steps < 150 + STARVED_STEPS + (len(uses) + 2) * EVERY_STEPS
    engine.run_until_idle()


def steps_beside_a_read(adapter: str) -> int:
    """Steps that twenty requests take beside one that is starved, for whose adapter nothing is read meanwhile."""
    engine = make_engine(needs={"A": 2, "B": 2}, max_num_seqs=2, max_loras=1)
    for i in range(20):
        engine.submit((1, i), [1], 1 + i % 7, "B", tenant=1)
    while not engine.residency.ready("B"):
        engine.step()
    starved = engine.submit((2, 1), [1], 1, adapter, tenant=2)
    engine.scheduler._waiting.favoured = engine.scheduler._register.get((2, 1))
    start = engine.steps
    while engine.live - {(2, 1)}:
        engine.step(load_speed=0)
    steps = engine.steps - start
    engine.run_until_idle()
    assert starved.text == starved.expected
    return steps


def test_nobody_stands_back_for_a_starved_request_whose_adapter_is_being_read() -> None:
    """It was at hand when the request was found, and has left host memory since."""
    assert steps_beside_a_read("A") <= steps_beside_a_read("B")


@pytest.mark.parametrize("tenant", [1, 2])
@pytest.mark.parametrize(("pages", "adapter_pages"), [(100, 6), (10, 6), (100, 4)])
def test_nobody_stands_back_for_an_adapter_that_is_copied_while_it_is_read(
    tenant: int, pages: int, adapter_pages: int
) -> None:
    """Its size is known, so it has pages, but the read does not end; those who have the slot have their turns."""
    engine = make_engine(
        needs={"A": 4, "B": 2},
        pages=pages,
        adapter_pages=adapter_pages,
        max_num_seqs=2,
        max_loras=1,
        patience_steps=8,
    )
    engine.loader.tells = True
    for i in range(40):
        engine.submit((1, i), [1], 3 + i % 7, "B", tenant=1)
    while not engine.residency.ready("B"):
        engine.step()
    engine.submit((2, 1), [1], 1, "A", tenant=tenant)
    while not engine.loader.told:
        engine.step(load_speed=1)
    for _ in range(300):
        engine.step(load_speed=0)
    assert engine.live == {(2, 1)}
    engine.run_until_idle()


def test_waits_that_all_have_make_nobody_starve() -> None:
    """A thousand requests of one tenant at once: their order is what it was."""
    engine = make_engine(needs=dict.fromkeys("ABC", 2), max_num_seqs=1, max_loras=1, max_waiting=1000, quick=True)
    clients = [engine.submit((1, i), [1], 12, "ABC"[i % 3]) for i in range(600)]
    favoured = set()
    while not engine.scheduler.idle:
        engine.step()
        favoured.add(engine.scheduler._waiting.favoured)
    assert favoured == {None}
    assert all(client.text for client in clients)


@pytest.mark.parametrize("room", [{"pages": 300}, {"pages": 300, "adapter_pages": 11}, {"pages": 240}])
@pytest.mark.parametrize("tenant", [0, 7])
@pytest.mark.parametrize("patience", [5, 10_000])
@pytest.mark.parametrize("longest", [20, 200])
def test_a_stream_on_one_adapter_lets_another_start_within_two_of_its_longest(
    longest: int, patience: int, tenant: int, room: dict[str, int]
) -> None:
    """Of the same tenant as the stream, or another one; however patient the settings are; with room for both adapters,
    for one of them, or for one beside what is being answered."""
    engine = make_engine(
        needs={"A": 10, "B": 10 if "adapter_pages" in room else 30},
        max_loras=1,
        max_num_seqs=4,
        max_model_len=longest + 8,
        patience_steps=patience,
        quick=True,
        **room,
    )
    rng = random.Random(longest)
    last = 0
    patient = None
    while patient is None or patient.began_at_step is None:
        while sum(key[0] == 2 for key in engine.live) < 6:
            last += 1
            engine.submit((2, last), [1] * 8, rng.choice((longest // 4, longest)), "A", tenant=7)
        if engine.steps == 3 * longest:
            patient = engine.submit((1, 1), [1], 4, "B", tenant=tenant)
        engine.step()
        if patient is not None:
            assert engine.steps - patient.came_at_step <= 2 * (longest + 4), "prompts take some steps, too"
    engine.run_until_idle()


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
