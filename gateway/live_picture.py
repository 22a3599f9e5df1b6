"""One moment of all gateways and engines: what a live picture shows, and how it is added up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from stencilpress.engine.messages import Stats
from stencilpress.gateway.engine_reader import EngineNow
from stencilpress.gateway.live_counts import LiveSlice, LiveTenant
from stencilpress.gateway.usage.engine_sums import GAUGES, NOTHING
from stencilpress.gateway.usage.histogram import Counts, add, quantiles

LATENCY_PICTURES = 15
"""Percentiles are over so many pictures: half a minute."""
TENANTS_SHOWN = 20
EVERYBODY = 0
"""Stands for all tenants; ids begin at 1."""


class LatencyNow(msgspec.Struct, frozen=True):
    """In milliseconds, of the last half minute; null if nothing was timed."""

    p50: float | None
    p95: float | None
    p99: float | None


class TenantNow(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant on all gateways. `tenant` is empty in the sum over all."""

    tenant: str
    open: int
    waiting: int
    requests_per_s: float
    failures_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    refusals_per_s: dict[str, float]


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: gauges now; means and rates since the picture before."""

    engine: int
    up: bool
    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_kv: int
    pages_cached: int
    pages_adapter: int
    adapters_hbm: int
    adapters_host: int
    max_loras: int
    steps_per_s: float
    completion_tokens_per_s: float
    adapters_per_step: float | None
    requests_per_step: float | None


class LivePicture(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. A tenant's has its own numbers alone: no engines, no others."""

    at: datetime
    interval_s: float
    gateways: int
    gateways_up: int
    total: TenantNow
    ttft_ms: LatencyNow
    tenants: list[TenantNow]
    engines: list[EngineLine]


class Sampler:
    """The last picture's numbers, added up over gateways."""

    def __init__(self) -> None:
        self.engines: list[EngineLine] = []
        self._rates: dict[int, _Rates] = {}
        self._ttft: deque[dict[int, Counts]] = deque(maxlen=LATENCY_PICTURES)
        self._stats: dict[int, tuple[int | None, Stats]] = {}
        self._asked_at = 0.0

    def take(self, slices: Iterable[LiveSlice], engines: Sequence[EngineNow]) -> None:
        rates: dict[int, _Rates] = {EVERYBODY: _Rates(EVERYBODY)}
        ttft: dict[int, Counts] = {EVERYBODY: {}}
        for one in slices:
            for tenant in one.tenants:
                for tenant_id in (tenant.tenant_id, EVERYBODY):
                    rates.setdefault(tenant_id, _Rates(tenant_id)).add(tenant, one.window_s)
                    add(ttft.setdefault(tenant_id, {}), tenant.ttft)
        self._rates = rates
        self._ttft.append(ttft)
        now = asyncio.get_running_loop().time()
        seconds, self._asked_at = now - self._asked_at, now
        self.engines = [self._engine(one, seconds) for one in engines]

    def busiest(self) -> list[_Rates]:
        """Tenants, those with the most tokens first."""
        tenants = [one for one in self._rates.values() if one.tenant_id != EVERYBODY]
        return sorted(tenants, key=lambda one: (-one.tokens, -one.open, one.tenant_id))[:TENANTS_SHOWN]

    def tenant(self, tenant_id: int, name: str) -> TenantNow:
        one = self._rates.get(tenant_id) or _Rates(tenant_id)
        return TenantNow(
            tenant=name,
            open=one.open,
            waiting=one.waiting,
            requests_per_s=round(one.requests, 3),
            failures_per_s=round(one.failures, 3),
            prompt_tokens_per_s=round(one.prompt_tokens, 1),
            completion_tokens_per_s=round(one.completion_tokens, 1),
            refusals_per_s={dimension: round(rate, 3) for dimension, rate in sorted(one.refused.items())},
        )

    def latency(self, tenant_id: int) -> LatencyNow:
        counts: Counts = {}
        for picture in self._ttft:
            add(counts, picture.get(tenant_id, {}))
        return LatencyNow(*(None if ms is None else round(ms, 3) for ms in quantiles(counts, (0.5, 0.95, 0.99))))

    def _engine(self, now: EngineNow, seconds: float) -> EngineLine:
        stats, generation = now.stats or NOTHING, now.welcome.generation if now.welcome is not None else None
        before = self._stats.get(now.engine)
        self._stats[now.engine] = (generation, stats)
        known = before is not None and before[0] == generation and before[1].steps <= stats.steps
        then = before[1] if before is not None and known else stats
        return EngineLine(
            engine=now.engine,
            up=now.stats is not None,
            **{name: getattr(stats, name) for name in _GAUGES},
            steps_per_s=round((stats.steps - then.steps) / seconds, 2),
            completion_tokens_per_s=round((stats.completion_tokens - then.completion_tokens) / seconds, 1),
            adapters_per_step=_mean(then.adapters_per_step, stats.adapters_per_step),
            requests_per_step=_mean(then.requests_per_step, stats.requests_per_step),
        )


class _Rates:
    """One tenant over all gateways, a second."""

    def __init__(self, tenant_id: int) -> None:
        self.tenant_id = tenant_id
        self.open = self.waiting = 0
        self.requests = self.failures = self.prompt_tokens = self.completion_tokens = 0.0
        self.refused: dict[str, float] = {}

    @property
    def tokens(self) -> float:
        return self.prompt_tokens + self.completion_tokens

    def add(self, one: LiveTenant, window_s: float) -> None:
        self.open += one.open
        self.waiting += one.waiting
        if not window_s:
            return
        self.requests += one.requests / window_s
        self.failures += one.failures / window_s
        self.prompt_tokens += one.prompt_tokens / window_s
        self.completion_tokens += one.completion_tokens / window_s
        for dimension, count in one.refused.items():
            self.refused[dimension] = self.refused.get(dimension, 0.0) + count / window_s


def _mean(before: Mapping[int, int], now: Mapping[int, int]) -> float | None:
    """Of a distribution over steps, what came since then."""
    steps = sum(now.values()) - sum(before.values())
    total = sum(value * count for value, count in now.items()) - sum(value * count for value, count in before.items())
    return round(total / steps, 2) if steps > 0 else None


_GAUGES = (*(name for name in GAUGES if name != "adapter_host_bytes"), "max_loras")
"""What a picture shows of an engine as it is."""
