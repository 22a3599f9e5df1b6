"""What an engine has counted, and its answer to a gateway that asks."""

from __future__ import annotations

from stencilpress.engine.limits import Limits
from stencilpress.engine.messages import Stats
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.residency import Residency


class Counters:
    """Counts since the engine's start, and the gauges of its parts."""

    def __init__(self, limits: Limits, pool: Pool, residency: Residency, prefixes: PrefixCache) -> None:
        self.steps = 0
        self._adapters_per_step = [0] * (limits.max_loras + 1)
        self._requests_per_step = [0] * (limits.seats + 1)
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.preemptions = 0
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self._prefixes = prefixes

    def step(self, *, adapters: int, requests: int) -> int:
        """Count a step, with its distinct adapters and its requests. Returns its number, from 1."""
        self.steps += 1
        self._adapters_per_step[adapters] += 1
        self._requests_per_step[requests] += 1
        return self.steps

    def stats(self, ask: int, *, running: int, waiting: int) -> Stats:
        """All of them at this moment, as the answer to question ``ask``."""
        pool, residency, prefixes = self._pool, self._residency, self._prefixes
        return Stats(
            id=ask,
            running=running,
            waiting=waiting,
            pages_total=pool.total,
            pages_free=pool.free,
            pages_kv=pool.kv + pool.cached - prefixes.idle_pages,
            pages_adapter=pool.adapter,
            adapters_hbm=residency.in_hbm,
            adapters_host=residency.in_host,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            preemptions=self.preemptions,
            adapter_loads=residency.loads,
            adapter_evictions=residency.evictions,
            pages_cached=prefixes.idle_pages,
            cached_tokens=prefixes.hit_tokens,
            adapter_host_bytes=residency.host.bytes,
            adapter_failures=residency.failures,
            max_loras=self._limits.max_loras,
            adapter_hits=residency.activities.hits,
            adapter_misses=residency.activities.misses,
            adapters_per_step=_seen(self._adapters_per_step),
            requests_per_step=_seen(self._requests_per_step),
        )


def _seen(counts: list[int]) -> dict[int, int]:
    return {value: count for value, count in enumerate(counts) if count}
