"""What holds under any load: hypothesis picks the engine, the tenants and the traffic; the simulator checks each step.

Page books, pinned pages, adapters in a step, one terminal message a request, deadlines: all are asserted by
:class:`tests.unit.simulator.Engine` while these run. :func:`test_any_storm_leaves_nothing` has every kind of trouble
and looks at the books and the memory of each step; the others have many more requests and look now and then.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stencilpress.engine.limits import Limits
from tests.unit.simulator import LIMITS, Client, Engine
from tests.unit.storm import Storm, check_nothing_is_left
from tests.unit.virtual_device import VOCAB

EXAMPLES = 20
STEPS = 5_000
"""Of each example: 100,000 in all for each property."""
STORMS, STORM_STEPS = 200, 1_000
"""Of half as many steps each on average: 100,000 in all again."""

pytestmark = pytest.mark.timeout(300)  # ten seconds or so on a quiet machine


@dataclass(frozen=True)
class Load:
    """An engine and its tenants; tenant ``t`` has weight ``weights[t]`` and uses ``adapters[t]`` (None: the base) for
    prompts and answers of ``longest[t]`` tokens at most."""

    seed: int
    seats: int
    budget: int
    max_loras: int
    pages: int
    ahead: bool
    weights: tuple[float, ...]
    adapters: tuple[tuple[str | None, ...], ...]
    longest: tuple[tuple[int, int], ...]
    rng: random.Random = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(self.seed))

    def engine(self) -> Engine:
        digests = {digest for own in self.adapters for digest in own if digest is not None}
        limits = Limits(
            max_num_seqs=self.seats,
            max_num_batched_tokens=self.budget,
            max_loras=self.max_loras,
            max_waiting=10_000,
            max_model_len=64,
            page_tokens=4,
            vocab_size=VOCAB,
            patience_steps=32,
        )
        needs = {digest: 1 + i % 5 for i, digest in enumerate(sorted(digests))}
        return Engine(limits, pages=self.pages, needs=needs, max_cpu_loras=8, ahead=self.ahead, quick=True)

    def submit(self, engine: Engine, tenant: int, id_: int) -> Client:
        return engine.submit(
            (1 + id_ % 3, id_),
            [1] * self.rng.randint(1, self.longest[tenant][0]),
            self.rng.randint(1, self.longest[tenant][1]),
            self.rng.choice(self.adapters[tenant]),
            tenant=tenant,
            weight=self.weights[tenant],
        )


@st.composite
def loads(draw: st.DrawFn, *, shared: bool) -> Load:
    """``shared``: all tenants' adapters fit the slots side by side, so that nothing but its share limits a tenant."""
    tenants = draw(st.integers(2, 6))
    lengths = st.sampled_from((1, 2, 6, 24)) if shared else st.just(24)
    common = (None, *(f"common-{i}" for i in range(draw(st.integers(0, 2)))))
    own = [tuple(f"own-{t}-{i}" for i in range(1 if shared else draw(st.integers(1, 4)))) for t in range(tenants)]
    return Load(
        seed=draw(st.integers(0, 2**32)),
        seats=draw(st.integers(1, 12)),
        budget=draw(st.sampled_from((8, 16, 64))),
        max_loras=tenants + 2 if shared else draw(st.integers(1, 4)),
        pages=draw(st.integers(40, 300)),
        ahead=draw(st.booleans()),
        weights=tuple(draw(st.sampled_from((0.5, 1.0, 2.0, 3.0))) for _ in range(tenants)),
        adapters=tuple((*common, *own[t]) for t in range(tenants)),
        longest=tuple((draw(lengths), draw(lengths)) for _ in range(tenants)),
    )


@settings(max_examples=STORMS, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, STORM_STEPS), ahead=st.booleans())
def test_any_storm_leaves_nothing(seed: int, steps: int, ahead: bool) -> None:
    check_nothing_is_left(Storm(seed, ahead=ahead).run(steps))


SHORT_AND_LONG = Load(
    seed=0,
    seats=4,
    budget=16,
    max_loras=1,
    pages=100,
    ahead=False,
    weights=(1.0, 1.0),
    adapters=((None,), (None,)),
    longest=((24, 24), (1, 2)),
)
"""Requests of one tenant are short. The last token of an answer, which is never computed further, was not charged."""


@settings(max_examples=EXAMPLES, deadline=None)
@given(loads(shared=True))
@example(SHORT_AND_LONG)
def test_under_saturation_tenants_get_their_shares(load: Load) -> None:
    engine = load.engine()
    last = 0
    waiting = [0] * len(load.weights)
    tenants: dict[int, tuple[int, Client]] = {}
    served = [0.0] * len(load.weights)
    for _ in range(STEPS):
        for tenant in range(len(load.weights)):
            while waiting[tenant] < load.seats + 2:
                last += 1
                tenants[last] = tenant, load.submit(engine, tenant, last)
                waiting[tenant] += 1
        engine.step()
        for id_ in [id_ for id_, (_, client) in tenants.items() if client.finished is not None]:
            tenant, client = tenants.pop(id_)
            waiting[tenant] -= 1
            served[tenant] += len(client.prompt) + 2 * len(client.text)
    shares = [tokens / weight for tokens, weight in zip(served, load.weights, strict=True)]
    fair = sum(served) / sum(load.weights)
    assert all(abs(share / fair - 1) < 0.1 for share in shares), [share / fair for share in shares]
    engine.run_until_idle(STEPS)


ONE_SEAT = Load(
    seed=0,
    seats=1,
    budget=8,
    max_loras=2,
    pages=40,
    ahead=True,
    weights=(2.0, 1.0, 0.5, 0.5, 3.0, 0.5),
    adapters=tuple((None, *(f"own-{t}-{i}" for i in range(count))) for t, count in enumerate((4, 1, 2, 3, 1, 1))),
    longest=((24, 24),) * 6,
)
"""An adapter that had lacked room was in the pool, but its request's turn had not come: no other adapter came in."""


@settings(max_examples=EXAMPLES, deadline=None)
@given(loads(shared=False))
@example(ONE_SEAT)
@example(replace(ONE_SEAT, max_loras=1))
def test_no_request_starves(load: Load) -> None:
    """Ten of each tenant are always there, of a price of 72 at most. The slowest engine, with a single seat, computes a
    price of 2 a step; a tenant's part of that is its weight, and each adapter has its turn of a slot and of the pool.
    """
    engine = load.engine()
    live = dict.fromkeys(range(len(load.weights)), 0)
    clients: dict[int, tuple[int, Client]] = {}
    last = 0
    slots = 64 * (1 + len({digest for own in load.adapters for digest in own}))
    bounds = [360 * sum(load.weights) / weight + slots for weight in load.weights]
    for _ in range(STEPS):
        for tenant, count in live.items():
            for _ in range(10 - count):
                last += 1
                clients[last] = tenant, load.submit(engine, tenant, last)
                live[tenant] += 1
        engine.step(load_speed=load.rng.choice((0, 1, 3)))
        for id_ in [id_ for id_, (_, client) in clients.items() if client.finished is not None]:
            live[clients.pop(id_)[0]] -= 1
        for tenant, client in clients.values():
            assert engine.steps - client.came_at_step < bounds[tenant], "it has not ended"
    engine.run_until_idle(STEPS)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    warm=st.integers(1, 6),
    size=st.integers(1, 6),
    slots=st.integers(1, 8),
    seats=st.integers(1, 16),
    every=st.integers(1, 40),
    ahead=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_cold_flood_evicts_nobody_elses_warm_adapters(
    warm: int, size: int, slots: int, seats: int, every: int, ahead: bool, seed: int
) -> None:
    """Tenant 1 goes on with adapters that take no more than half of the room; tenant 2 asks for one after another."""
    rng = random.Random(seed)
    own, cold = [f"warm-{i}" for i in range(warm)], [f"cold-{i}" for i in range(200)]
    limits = replace(LIMITS, max_num_seqs=seats, max_num_batched_tokens=64, max_loras=slots, max_waiting=10_000)
    engine = Engine(
        limits,
        pages=2 * warm * size + 40 * seats,
        needs=dict.fromkeys((*own, *cold), size),
        max_cpu_loras=4 * warm + 8,
        ahead=ahead,
        quick=True,
        max_adapter_pages=2 * warm * size,
        max_prefetched=max(1, min(slots, warm)),
    )
    for i, adapter in enumerate(own):
        engine.submit((1, i), [1, 2], 4, adapter, tenant=1)
    engine.run_until_idle()
    for i, adapter in enumerate(cold):
        engine.submit((2, i), [1, 2], rng.randint(1, 6), adapter, tenant=2)
    asked = warm
    while not engine.scheduler.idle:
        if engine.steps % every == 0 and any(key[0] == 2 for key in engine.live):
            asked += 1
            engine.submit((1, asked), [1, 2], rng.randint(1, 6), rng.choice(own), tenant=1)
        engine.step(load_speed=rng.choice((0, 1, 3)))
    assert [engine.residency.activities.of(adapter).evictions for adapter in own] == [0] * warm
