"""What an engine did over some time, out of what it says now and then: gauges are averaged, counters subtracted."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stencilpress.engine.messages import Stats
from stencilpress.gateway.usage.histogram import Counts, add

GAUGES = (
    "running",
    "waiting",
    "pages_total",
    "pages_free",
    "pages_kv",
    "pages_cached",
    "pages_adapter",
    "adapters_hbm",
    "adapters_host",
    "adapter_host_bytes",
)
COUNTERS = (
    "steps",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "preemptions",
    "adapter_loads",
    "adapter_evictions",
    "adapter_failures",
    "adapter_hits",
    "adapter_misses",
)
DISTRIBUTIONS = ("adapters_per_step", "requests_per_step")


class EngineSum(msgspec.Struct):
    """One engine over some time.

    ``gauges`` are sums over ``samples``; ``down`` are samples that it did not answer. The distributions count steps by
    how many distinct adapters, and how many requests, they ran.
    """

    samples: int = 0
    down: int = 0
    gauges: dict[str, int] = {}
    peaks: dict[str, int] = {}
    counters: dict[str, int] = {}
    adapters_per_step: dict[int, int] = {}
    requests_per_step: dict[int, int] = {}

    @classmethod
    def between(cls, before: Stats | None, now: Stats | None) -> EngineSum:
        """One sample: what ``now`` says, and what was counted since ``before`` (None: not known, so nothing).

        A counter that went backwards began anew: all of it is new then.
        """
        if now is None:
            return cls(down=1)
        gauges = {name: int(getattr(now, name)) for name in GAUGES}
        one = cls(samples=1, gauges=gauges, peaks=dict(gauges))
        if before is None:
            return one
        anew = now.steps < before.steps
        one.counters = {
            name: getattr(now, name) - (0 if anew else min(getattr(before, name), getattr(now, name)))
            for name in COUNTERS
        }
        for name in DISTRIBUTIONS:
            setattr(one, name, _added(getattr(now, name), {} if anew else getattr(before, name)))
        return one

    def merge(self, other: EngineSum) -> None:
        self.samples += other.samples
        self.down += other.down
        for name, value in other.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, 0), value)
        for mine, theirs in ((self.gauges, other.gauges), (self.counters, other.counters)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0) + value
        for name in DISTRIBUTIONS:
            add(getattr(self, name), getattr(other, name))


NOTHING = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""What an engine has counted that has just begun."""


def _added(now: Mapping[int, int], before: Mapping[int, int]) -> Counts:
    return {value: more for value, count in now.items() if (more := count - before.get(value, 0)) > 0}


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(EngineSum).decode
