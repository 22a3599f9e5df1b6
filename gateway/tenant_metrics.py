"""What is shown by tenant, of those with the most tokens: a bounded number of series."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

import msgspec

from stencilpress.gateway.usage.histogram import value_of

TTFT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
MAX_TENANTS = 10_000
"""Tenants that are counted; beyond, the one that was idle longest is forgotten."""

Sample = tuple[str, dict[str, str], float]


class Family(msgspec.Struct, array_like=True, frozen=True):
    """One metric with all its series."""

    name: str
    kind: str
    text: str
    samples: list[Sample]


class Durations:
    """A histogram of fixed bounds, small enough for ten thousand of them."""

    __slots__ = ("_bounds_s", "_counts", "_sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def add(self, counts: Mapping[int, int], sum_s: float) -> None:
        """Count those of a histogram as gateway/usage/histogram.py has them."""
        for bucket, count in counts.items():
            self._counts[_place(bucket, self._bounds_s)] += count
        self._sum_s += sum_s

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[Sample]:
        """As Prometheus has them: each bucket counts what is below it as well."""
        below = 0
        for bound_s, count in zip((*self._bounds_s, inf), self._counts, strict=True):
            below += count
            le = "+Inf" if bound_s == inf else str(bound_s)
            yield f"{name}_bucket", {**labels, "le": le}, float(below)
        yield f"{name}_count", dict(labels), float(below)
        yield f"{name}_sum", dict(labels), self._sum_s


@lru_cache(4096)
def _place(bucket: int, bounds_s: tuple[float, ...]) -> int:
    return bisect_left(bounds_s, value_of(bucket) / 1000)


@dataclass(slots=True)
class _TenantCount:
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: Durations = field(default_factory=lambda: Durations(TTFT_BOUNDS_S))
    gaps: Durations = field(default_factory=lambda: Durations(GAP_BOUNDS_S))


class TenantCounts:
    """Requests, tokens and latencies by tenant; those with the most tokens are shown, ``shown`` at most.

    A tenant that drops out of them and comes back has gone on counting, so its series never runs backwards.
    """

    def __init__(self, shown: int) -> None:
        self._shown = shown
        self._counts: OrderedDict[str, _TenantCount] = OrderedDict()

    def add(
        self,
        tenant: str,
        prompt_tokens: int,
        completion_tokens: int,
        *,
        ttft_ms: float | None = None,
        gaps: Mapping[int, int] | None = None,
        gaps_ms: float = 0.0,
    ) -> None:
        """Count one request that reached an engine; ``gaps`` are times between its tokens, ``gaps_ms`` their sum."""
        count = self._counts.pop(tenant, None) or _TenantCount()
        count.requests += 1
        count.prompt_tokens += prompt_tokens
        count.completion_tokens += completion_tokens
        if ttft_ms is not None:
            count.ttft.observe(ttft_ms / 1000)
        if gaps:
            count.gaps.add(gaps, gaps_ms / 1000)
        self._counts[tenant] = count
        if len(self._counts) > MAX_TENANTS:
            self._counts.popitem(last=False)

    def families(self) -> Iterator[Family]:
        """What is shown."""
        by_tokens = sorted(self._counts.items(), key=lambda item: -(item[1].prompt_tokens + item[1].completion_tokens))
        shown = by_tokens[: self._shown]
        for name, text in (
            ("requests", "Requests of the tenants with the most tokens"),
            ("prompt_tokens", "Prompt tokens of the tenants with the most tokens"),
            ("completion_tokens", "Tokens of answers for the tenants with the most tokens"),
        ):
            whole = f"stencilpress_tenant_{name}"
            samples = [(f"{whole}_total", {"tenant": tenant}, float(getattr(count, name))) for tenant, count in shown]
            yield Family(whole, "counter", text, samples)
        yield _histogram("time_to_first_token", "Time to the first token", [(one, of.ttft) for one, of in shown])
        yield _histogram("inter_token", "Time between tokens", [(one, of.gaps) for one, of in shown])


def _histogram(name: str, text: str, shown: Sequence[tuple[str, Durations]]) -> Family:
    whole = f"stencilpress_tenant_{name}_seconds"
    samples = [sample for tenant, durations in shown for sample in durations.samples(whole, {"tenant": tenant})]
    return Family(whole, "histogram", f"{text} of the tenants with the most tokens", samples)
