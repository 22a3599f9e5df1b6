"""The text that Prometheus scrapes: all gateways' numbers, the engines', and what routers of Kubernetes read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stencilpress.engine.messages import Stats
from stencilpress.gateway.adapter_metrics import Shown, adapter_series
from stencilpress.gateway.metrics import MAX_NAMED_ADAPTERS, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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
    "adapter_hits": "Requests whose adapter was in the pool when they began",
    "adapter_misses": "Requests that their adapter was loaded for",
}


@dataclass(frozen=True, slots=True)
class Disk:
    """The room on a disk, in bytes."""

    free: int
    total: int

    @classmethod
    def of(cls, folder: Path) -> Disk | None:
        """None if it cannot be told."""
        try:
            room = shutil.disk_usage(folder)
        except OSError:
            return None
        return cls(room.free, room.total)


def render(
    snapshots: Sequence[Snapshot],
    gateways: int,
    engines: Sequence[Stats | None],
    max_loras: int,
    now: Callable[[], float] = time.time,
    disk: Disk | None = None,
    adapters: Sequence[Shown] = (),
) -> bytes:
    """The exposition. ``snapshots`` has the gateways that answered, of ``gateways``; None stands for a silent engine.
    ``adapters`` have series of their own.

    A series has its gateway as a label, never the sum over gateways: each begins at 0 when its process does, which
    Prometheus understands only of a single one.
    """
    up = GaugeMetricFamily("stencilpress_gateway_up", "Whether the gateway answers", labels=["gateway"])
    answered = {snapshot.gateway for snapshot in snapshots}
    for number in range(1, gateways + 1):
        up.add_metric([str(number)], float(number in answered))
    routers = _for_routers(snapshots, [stats for stats in engines if stats is not None], max_loras, now())
    of_engines = chain(_engines(engines), adapter_series(adapters))
    return generate_latest(_Fixed([up, *_gateways(snapshots), *of_engines, *_disk(disk), *routers]))


class _Fixed(Collector):
    """Metrics as a registry gives them, to be written once."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


def _gateways(snapshots: Sequence[Snapshot]) -> list[Metric]:
    merged: dict[str, Metric] = {}
    for snapshot in snapshots:
        label = {"gateway": str(snapshot.gateway)}
        for family in snapshot.families:
            metric = merged.setdefault(family.name, Metric(family.name, family.text, family.kind))
            for name, labels, value in family.samples:
                if not name.endswith("_created"):
                    metric.add_sample(name, {**label, **labels}, value)
    return list(merged.values())


def _engines(engines: Sequence[Stats | None]) -> Iterator[Metric]:
    up = GaugeMetricFamily("stencilpress_engine_up", "Whether the engine answers", labels=["engine"])
    for number, stats in enumerate(engines, 1):
        up.add_metric([str(number)], float(stats is not None))
    yield up
    if not any(engines):
        return
    kinds = [(GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)]
    for kind, texts in kinds:
        for field, text in texts.items():
            name = field.removesuffix("_total")  # which Prometheus keeps for counters, and adds to them
            metric = kind(f"stencilpress_engine_{name}", text, labels=["engine"])
            for number, stats in enumerate(engines, 1):
                if stats is not None:
                    metric.add_metric([str(number)], getattr(stats, field))
            yield metric
    yield from _steps(engines)


_STEP_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_HISTOGRAMS = {
    "adapters_per_step": "Distinct adapters of a step",
    "requests_per_step": "Requests of a step",
}


def _steps(engines: Sequence[Stats | None]) -> Iterator[Metric]:
    """How full steps were: histograms out of exact counts."""
    for field, text in _STEP_HISTOGRAMS.items():
        metric = HistogramMetricFamily(f"stencilpress_engine_{field}", text, labels=["engine"])
        for number, stats in enumerate(engines, 1):
            if stats is None:
                continue
            counts: dict[int, int] = getattr(stats, field)
            buckets = [(str(bound), float(sum(n for v, n in counts.items() if v <= bound))) for bound in _STEP_BOUNDS]
            buckets.append(("+Inf", float(sum(counts.values()))))
            metric.add_metric([str(number)], buckets, float(sum(v * n for v, n in counts.items())))
        yield metric


def _disk(disk: Disk | None) -> Iterator[Metric]:
    if disk is None:
        return
    yield GaugeMetricFamily("stencilpress_disk_free_bytes", "Free bytes on the disk of the data folder", disk.free)
    yield GaugeMetricFamily("stencilpress_disk_total_bytes", "Bytes of the disk of the data folder", disk.total)


def _for_routers(
    snapshots: Sequence[Snapshot], engines: Sequence[Stats], max_loras: int, now: float
) -> Iterator[Metric]:
    """What the endpoint picker of Kubernetes' Gateway API Inference Extension reads, under vLLM's names."""
    running = sorted(set(chain.from_iterable(snapshot.running for snapshot in snapshots)))
    waiting = sorted(set(chain.from_iterable(snapshot.waiting for snapshot in snapshots)) - set(running))
    labels = {
        "max_lora": str(sum(stats.max_loras or max_loras for stats in engines) or max_loras),
        "running_lora_adapters": ",".join(running[:MAX_NAMED_ADAPTERS]),
        "waiting_lora_adapters": ",".join(waiting[:MAX_NAMED_ADAPTERS]),
    }
    adapters = GaugeMetricFamily("vllm:lora_requests_info", "Adapters with requests; the value is the time")
    adapters.add_sample("vllm:lora_requests_info", labels, now)
    yield adapters
    if engines:
        pages = sum(stats.pages_total for stats in engines)
        usage = sum(stats.pages_kv for stats in engines) / pages if pages else 0.0
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests that run", sum(s.running for s in engines))
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait", sum(s.waiting for s in engines))
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the pool that keys and values take", usage)
