"""What Prometheus scrapes from a gateway. Labels are routes and status classes, never a name that a client chose."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stencilpress.engine.messages import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_ENGINE_GAUGES = {
    "running": "Requests in the running batch",
    "waiting": "Requests that wait for their turn, their adapter or memory",
    "pages_total": "Pages of the pool",
    "pages_free": "Pages that nothing uses",
    "pages_kv": "Pages of keys and values in use",
    "pages_cached": "Pages of keys and values kept for prompts to come",
    "pages_adapter": "Pages of adapters",
    "adapters_hbm": "Adapters in the pool",
    "adapters_host": "Adapters in host memory",
    "adapter_host_bytes": "Bytes of host memory that adapters take",
}
_ENGINE_COUNTERS = {
    "steps": "Steps run",
    "prompt_tokens": "Prompt tokens computed or taken from the cache",
    "completion_tokens": "Tokens generated",
    "preemptions": "Requests that gave up their pages and started again",
    "adapter_loads": "Adapters brought into the pool",
    "adapter_evictions": "Adapters that gave up their pages",
    "adapter_failures": "Loads of adapters that failed",
    "cached_tokens": "Prompt tokens taken from the cache",
}


class Metrics:
    """The metrics of one gateway process, in a registry of their own."""

    def __init__(self) -> None:
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
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "stencilpress_inter_token_seconds",
            "Between two arrivals of tokens for one choice",
            buckets=_GAP_BUCKETS_S,
            registry=self.registry,
        )
        self.answers_open = Gauge("stencilpress_answers_open", "Answers being made", registry=self.registry)
        self.websockets_open = Gauge("stencilpress_websockets_open", "WebSocket connections", registry=self.registry)
        self.slow_clients_cut = Counter(
            "stencilpress_slow_clients_cut", "Clients cut off because they did not read", registry=self.registry
        )
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

    def render(self, engine: Stats | None) -> bytes:
        """The exposition, with the engine's numbers of this moment; None when no engine answers."""
        self._engine.stats = engine
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own counts, passed on as they are."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("stencilpress_engine_up", "Whether the engine answers", float(self.stats is not None))
        if self.stats is None:
            return
        for name, text in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"stencilpress_engine_{name}", text, getattr(self.stats, name))
        for name, text in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"stencilpress_engine_{name}", text, getattr(self.stats, name))
