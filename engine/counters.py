"""What an engine has counted, and its answer to a gateway that asks."""

from __future__ import annotations

from dataclasses import dataclass

from stencilpress.engine.messages import Stats
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.residency import Residency


@dataclass(slots=True)
class Counters:
    """Since the engine's start."""

    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0


def read_stats(
    ask: int,
    counters: Counters,
    pool: Pool,
    residency: Residency,
    prefixes: PrefixCache,
    *,
    running: int,
    waiting: int,
    max_loras: int,
) -> Stats:
    """Gauges and counters at this moment, as the answer to question ``ask``."""
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
        steps=counters.steps,
        prompt_tokens=counters.prompt_tokens,
        completion_tokens=counters.completion_tokens,
        preemptions=counters.preemptions,
        adapter_loads=residency.loads,
        adapter_evictions=residency.evictions,
        pages_cached=prefixes.idle_pages,
        cached_tokens=prefixes.hit_tokens,
        adapter_host_bytes=residency.host.bytes,
        adapter_failures=residency.failures,
        max_loras=max_loras,
    )
