"""Tenants get their shares of several engines together, though each engine shares its own time alone.

The gateway's real choice of an engine over the real schedulers in virtual engines; requests come through one gateway or
several that know nothing of each other.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stencilpress.engine.client import EngineClient
from stencilpress.gateway.engines import Engines, ranking
from tests.unit.simulator import Client, Engine, make_engine

COUNT = 3
SEATS = 8
SETTLING_STEPS, STEPS = 600, 1_500
"""What waits where it came first is served there: shares are counted once that is done."""
PROBE_STEPS = 100
"""Steps of 20 ms between two looks at an engine's queue."""

pytestmark = pytest.mark.timeout(300)  # half a minute on a quiet machine


@dataclass
class Reach:
    """What a gateway knows of one engine, as :class:`EngineClient` tells it."""

    engine: Engine
    ready: bool = True
    responsive: bool = True
    crowded: bool = False
    open_by_tenant: Counter[int] = field(default_factory=Counter)

    @property
    def open_requests(self) -> int:
        return self.open_by_tenant.total()

    def open_requests_of(self, tenant: int) -> int:
        return self.open_by_tenant[tenant]


@dataclass(frozen=True)
class Tenant:
    """``depth`` requests of it are always there, each for one of its adapters, "" for the base."""

    weight: float
    depth: int
    adapters: tuple[str, ...]


class Fleet:
    """Engines, the gateways before them and what was computed for each tenant."""

    def __init__(self, tenants: list[Tenant], gateways: int, seed: int) -> None:
        adapters = {adapter for tenant in tenants for adapter in tenant.adapters if adapter}
        self.tenants = tenants
        self.engines = [self._engine(adapters) for _ in range(COUNT)]
        self.reaches = [[Reach(engine) for engine in self.engines] for _ in range(gateways)]
        self.gateways = [Engines(cast(list[EngineClient], reaches)) for reaches in self.reaches]
        self.served = [0.0] * len(tenants)
        self._random = random.Random(seed)
        self._open: list[tuple[int, Reach, Client]] = []
        self._last = 0

    def shares(self) -> list[float]:
        """Each tenant's share of what is served, beside the one by its weight."""
        self._run(SETTLING_STEPS)
        self.served = [0.0] * len(self.tenants)
        self._run(STEPS)
        fair = sum(self.served) / sum(tenant.weight for tenant in self.tenants)
        return [served / tenant.weight / fair for served, tenant in zip(self.served, self.tenants, strict=True)]

    def _run(self, steps: int) -> None:
        for step in range(steps):
            for reach in (reach for reaches in self.reaches for reach in reaches if step % PROBE_STEPS == 0):
                reach.crowded = reach.engine.scheduler.stats(0).waiting > 0
            live = Counter(tenant for tenant, _, _ in self._open)
            for number, tenant in enumerate(self.tenants):
                for _ in range(tenant.depth - live[number]):
                    self._submit(number, tenant)
            for engine in self.engines:
                engine.step()
            self._take_ended()

    def _submit(self, number: int, tenant: Tenant) -> None:
        self._last += 1
        adapter = self._random.choice(tenant.adapters)
        gateway = self._last % len(self.gateways)
        reach = self.reaches[gateway][self.gateways[gateway].choose(adapter, number)]
        client = reach.engine.submit(
            (gateway, self._last),
            [1] * self._random.randint(1, 24),
            self._random.randint(1, 24),
            adapter or None,
            tenant=number,
            weight=tenant.weight,
        )
        reach.open_by_tenant[number] += 1
        self._open.append((number, reach, client))

    def _take_ended(self) -> None:
        for number, reach, client in self._open:
            if client.finished is not None:
                reach.open_by_tenant[number] -= 1
                self.served[number] += len(client.prompt) + 2 * len(client.text)
        self._open = [one for one in self._open if one[2].finished is None]

    @staticmethod
    def _engine(adapters: set[str]) -> Engine:
        engine = make_engine(
            needs=dict.fromkeys(adapters, 1),
            pages=400,
            max_loras=max(1, len(adapters)),
            max_num_seqs=SEATS,
            max_num_batched_tokens=64,
            max_waiting=10_000,
            cpu_loras=64,
            quick=True,
        )
        engine.check_every = 1_000
        return engine


def at_home_on(engine: int, nth: int = 0) -> str:
    """An adapter whose requests belong to an engine; another one for each ``nth``."""
    digests = (f"{number:064x}" for number in range(1_000 * nth, 1_000 * (nth + 1)))
    return next(digest for digest in digests if ranking(digest, COUNT)[0] == engine)


@pytest.mark.parametrize("gateways", [1, 3])
def test_whoever_is_alone_on_an_engine_shares_it_with_those_who_are_due_more(gateways: int) -> None:
    tenants = [Tenant(weight, 60, (at_home_on(home),)) for home, weight in enumerate((1.0, 2.0, 3.0))]
    assert Fleet(tenants, gateways, seed=1).shares() == pytest.approx([1, 1, 1], abs=0.05)


def test_who_has_one_adapter_gets_as_much_as_who_has_many_or_none() -> None:
    many = tuple(f"{number:064x}" for number in range(5_000, 5_020))
    tenants = [Tenant(1.0, 60, (at_home_on(0),)), Tenant(1.0, 60, many), Tenant(1.0, 60, ("",))]
    assert Fleet(tenants, 1, seed=1).shares() == pytest.approx([1, 1, 1], abs=0.05)


@settings(max_examples=10, deadline=None)
@given(
    weights=st.lists(st.sampled_from((0.5, 1.0, 2.0, 3.0)), min_size=2, max_size=4),
    homes=st.lists(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=3), min_size=4, max_size=4),
    gateways=st.sampled_from((1, 2)),
    seed=st.integers(0, 2**32),
)
def test_wherever_adapters_live_tenants_get_their_shares_of_all_engines(
    weights: list[float], homes: list[list[int]], gateways: int, seed: int
) -> None:
    """Each has work for all seats of all engines."""
    adapters = [
        tuple(at_home_on(home, 10 * tenant + nth) for nth, home in enumerate(homes[tenant]))
        for tenant in range(len(weights))
    ]
    tenants = [Tenant(weight, 3 * COUNT * SEATS, own) for weight, own in zip(weights, adapters, strict=True)]
    shares = Fleet(tenants, gateways, seed).shares()
    assert shares == pytest.approx([1] * len(weights), abs=0.1)
