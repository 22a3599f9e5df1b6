"""More adapters than fit: no cliff in first-token time, and one tenant's flood is that tenant's own trouble.

Time is counted in steps of the simulator's engine; a load takes at least one.
"""

from __future__ import annotations

import random
import statistics

import pytest

from tests.unit.simulator import Client, Engine, make_engine
from tests.unit.virtual_device import VOCAB

PAGES = 3
"""Of one adapter."""


def first_token_steps(adapters: int, room: int, rate: float, seed: int) -> list[int]:
    """Steps to the first token of each request, of which ``rate`` come per step, over ``adapters`` equally popular."""
    rng = random.Random(seed)
    names = [f"a{i}" for i in range(adapters)]
    engine = make_engine(
        pages=300,
        needs=dict.fromkeys(names, PAGES),
        cpu_loras=adapters,
        adapter_pages=PAGES * room,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_loras=8,
        max_waiting=10_000,
    )
    waits: list[int] = []
    unheard: list[Client] = []
    sent = 0
    for _ in range(1500):
        while rng.random() < rate / (1 + rate):
            sent += 1
            prompt = [rng.randrange(VOCAB) for _ in range(6)]
            unheard.append(engine.submit((1, sent), prompt, 12, rng.choice(names), tenant=1 + sent % 4))
        engine.step(load_speed=1)
        waits += [engine.steps - client.came_at_step for client in unheard if client.text]
        unheard = [client for client in unheard if not client.text]
    engine.run_until_idle()
    return waits


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_sixteen_adapters_on_room_for_eight_take_at_most_twice_as_long_as_eight(rate: float, seed: int) -> None:
    eight = statistics.median(first_token_steps(8, 8, rate, seed))
    sixteen = statistics.median(first_token_steps(16, 8, rate, seed))
    assert sixteen <= 2 * eight


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_where_more_than_eight_adapters_are_in_use_at_once_the_wait_is_for_seats_to_end(seed: int) -> None:
    """A request a step keeps 13 of 16 seats, over nine adapters on average: more than there is room for."""
    waits = first_token_steps(16, 8, 1.0, seed)
    assert statistics.median(waits) <= 4
    assert max(waits) <= 100


def test_a_batch_over_many_more_adapters_than_fit_keeps_the_seats_taken() -> None:
    """They come at once, a few for each adapter: those passed over for long must not leave the rest unseated."""
    rng = random.Random(3)
    names = [f"a{i}" for i in range(300)]
    engine = make_engine(
        pages=4000,
        needs=dict.fromkeys(names, PAGES),
        cpu_loras=len(names),
        adapter_pages=64 * PAGES,
        prefetched=8,
        quick=True,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_loras=60,
        max_waiting=1000,
        max_model_len=128,
        patience_steps=100,
    )
    weights = [1 / (i + 1) for i in range(len(names))]
    for i, adapter in enumerate(rng.choices(names, weights, k=256)):
        engine.submit((1, i), [1] * 16, 64, adapter)
    assert engine.run_until_idle() < 4.5 * 64, "two full batches take twice 64"
    assert engine.residency.loads < 1.5 * len({client.submit.adapter for client in engine.clients.values()})


def test_a_flood_of_cold_adapters_leaves_other_tenants_warm_ones_alone() -> None:
    """Tenant 2 asks for 500 adapters at once; tenant 1 goes on with its five, which take half of the room."""
    warm, cold = [f"warm{i}" for i in range(5)], [f"cold{i}" for i in range(500)]
    engine = make_engine(
        pages=200,
        needs=dict.fromkeys((*warm, *cold), PAGES),
        cpu_loras=12,
        adapter_pages=10 * PAGES,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_loras=8,
        max_waiting=1000,
    )
    for i, adapter in enumerate(warm):
        engine.submit((1, i), [1, 2], 4, adapter, tenant=1)
    engine.run_until_idle()
    for i, adapter in enumerate(cold):
        engine.submit((2, i), [1, 2], 4, adapter, tenant=2)
    asked = _keep_asking(engine, warm)
    assert asked > 10
    assert engine.loader.fetches.count("warm0") == 1
    assert [engine.residency.activities.of(adapter).evictions for adapter in warm] == [0] * 5
    assert engine.residency.evictions > 400


def _keep_asking(engine: Engine, warm: list[str]) -> int:
    """A request on a warm adapter now and then, until all others have ended."""
    rng = random.Random(0)
    asked = 0
    while not engine.scheduler.idle:
        if engine.steps % 20 == 0 and any(key[0] == 2 for key in engine.live):
            asked += 1
            engine.submit((1, 100 + asked), [1, 2], 4, rng.choice(warm), tenant=1)
        engine.step(load_speed=3)
    return asked
