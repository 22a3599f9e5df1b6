"""What a gateway counts. Labels are routes, status classes and the names of the busiest tenants: all bounded."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import inf

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stencilpress.gateway.live_counts import LiveCounts
from stencilpress.gateway.quota.terms import DIMENSIONS
from stencilpress.gateway.tenant_metrics import GAP_BOUNDS_S, TTFT_BOUNDS_S, Family, TenantCounts
from stencilpress.gateway.usage.histogram import add, bucket_of, value_of
from stencilpress.gateway.usage.refusals import RefusalCounts

MAX_NAMED_ADAPTERS = 256
"""Adapters that a snapshot names as running, and as waiting."""


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """All numbers of one gateway at one moment, as gateways show them to each other."""

    gateway: int
    families: list[Family]
    running: list[str]
    """Adapters whose answers have begun."""
    waiting: list[str]
    """Adapters of which a request waits for its first token."""


class Metrics:
    """The metrics of one gateway process, in a registry of their own."""

    def __init__(self, gateway: int = 1, tenants_shown: int = 20) -> None:
        self._gateway = gateway
        self.registry = CollectorRegistry()
        self.requests = Counter("stencilpress_requests", "HTTP requests", ["route", "status"], registry=self.registry)
        self.prompt_tokens = Counter(
            "stencilpress_prompt_tokens", "Prompt tokens of admitted requests", registry=self.registry
        )
        self.completion_tokens = Counter(
            "stencilpress_completion_tokens", "Tokens of answers, sent or not", registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "stencilpress_time_to_first_token_seconds",
            "From the request's arrival to the first token of its answer",
            buckets=TTFT_BOUNDS_S,
            registry=self.registry,
        )
        self.inter_token = LatencyHistogram(
            "stencilpress_inter_token_seconds",
            "Between two arrivals of tokens for one choice",
            GAP_BOUNDS_S,
        )
        self.queue = LatencyHistogram(
            "stencilpress_queue_seconds", "From a request's arrival at its engine to its first step", TTFT_BOUNDS_S
        )
        self.cold_start = LatencyHistogram(
            "stencilpress_cold_start_seconds", "Waits of requests whose adapter had to be loaded", TTFT_BOUNDS_S
        )
        for histogram in (self.inter_token, self.queue, self.cold_start):
            self.registry.register(histogram)
        self.answers_open = Gauge("stencilpress_answers_open", "Answers being made", registry=self.registry)
        self.websockets_open = Gauge("stencilpress_websockets_open", "WebSocket connections", registry=self.registry)
        self.slow_clients_cut = Counter(
            "stencilpress_slow_clients_cut", "Clients cut off because they did not read", registry=self.registry
        )
        self.quota_refusals = Counter(
            "stencilpress_quota_refusals", "Requests over a limit", ["dimension"], registry=self.registry
        )
        self.quota_shadow_refusals = Counter(
            "stencilpress_quota_shadow_refusals",
            "Requests over a limit that was only watched",
            ["dimension"],
            registry=self.registry,
        )
        for counter, dimension in product((self.quota_refusals, self.quota_shadow_refusals), DIMENSIONS):
            counter.labels(dimension)  # at 0: of a series that begins at 1, Prometheus has not seen the first increase
        self.quota_store_failures = Counter(
            "stencilpress_quota_store_failures",
            "Requests that the quota store did not answer for",
            ["policy"],
            registry=self.registry,
        )
        self.refusals = RefusalCounts()
        self.live = LiveCounts(gateway)
        self.tenants = TenantCounts(tenants_shown)
        self.adapters = AdapterActivity()

    def refused(self, tenant_id: int, dimension: str, *, watched: bool) -> None:
        """A request was over a limit of its tenant; ``watched``: it went on."""
        (self.quota_shadow_refusals if watched else self.quota_refusals).labels(dimension).inc()
        self.refusals.add(tenant_id, dimension, watched=watched)
        if not watched:
            self.live.refused(tenant_id, dimension)

    def snapshot(self) -> Snapshot:
        """The numbers of this moment."""
        families = [
            Family(
                metric.name, metric.type, metric.documentation, [(s.name, s.labels, s.value) for s in metric.samples]
            )
            for metric in self.registry.collect()
        ]
        running, waiting = self.adapters.running, self.adapters.waiting
        return Snapshot(
            self._gateway,
            [*families, *self.tenants.families()],
            sorted(running)[:MAX_NAMED_ADAPTERS],
            sorted(waiting)[:MAX_NAMED_ADAPTERS],
        )


class LatencyHistogram(Collector):
    """A histogram that is fed with whole histograms (gateway/usage/histogram.py), a request's at its end.

    Its own bounds in seconds are coarser than those: a duration is counted by the middle of its bucket.
    """

    def __init__(self, name: str, text: str, bounds_s: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds_s = bounds_s
        self._counts: dict[int, int] = {}
        self._sum_ms = 0.0

    def add(self, counts: Mapping[int, int], sum_ms: float) -> None:
        """Count durations by their buckets; ``sum_ms`` is their exact sum."""
        add(self._counts, counts)
        self._sum_ms += sum_ms

    def observe(self, ms: float) -> None:
        """Count one duration."""
        self.add({bucket_of(ms): 1}, ms)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        buckets = [
            (
                "+Inf" if bound_s == inf else str(bound_s),
                float(sum(n for b, n in self._counts.items() if value_of(b) <= 1000 * bound_s)),
            )
            for bound_s in (*self._bounds_s, inf)
        ]
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum_ms / 1000)


class AdapterActivity:
    """Which adapters have requests, by whether their answers have begun. Bounded by the open requests."""

    def __init__(self) -> None:
        self.running: Counts[str] = Counts()
        self.waiting: Counts[str] = Counts()

    @contextmanager
    def request(self, adapter: str) -> Iterator[ActiveRequest]:
        """Wraps the making of an answer; ``adapter`` is "" for the base, which is not kept."""
        active = ActiveRequest(self, adapter)
        try:
            yield active
        finally:
            active.end()


class ActiveRequest:
    """One request of an adapter: first it waits, then it runs."""

    def __init__(self, activity: AdapterActivity, adapter: str) -> None:
        self._activity = activity
        self._adapter = adapter
        self._state: Counts[str] | None = None
        self._move(activity.waiting)

    def begin(self) -> None:
        """Its first token is there."""
        self._move(self._activity.running)

    def end(self) -> None:
        self._move(None)

    def _move(self, to: Counts[str] | None) -> None:
        if not self._adapter:
            return
        if self._state is not None:
            self._state[self._adapter] -= 1
            if not self._state[self._adapter]:
                del self._state[self._adapter]
        if to is not None:
            to[self._adapter] += 1
        self._state = to
