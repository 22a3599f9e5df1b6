"""Series of single adapters for Prometheus: where each is, and what it has cost. Only so many of each engine, those
with the most requests: there may be thousands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from stencilpress.engine.messages import AdapterSeen
from stencilpress.gateway.api.admin.engine_views import named
from stencilpress.gateway.catalog.digests import Owner
from stencilpress.gateway.engine_reader import EngineReader, Seen
from stencilpress.gateway.errors import UnavailableError

_LABELS = ("engine", "tenant", "adapter", "version")
_NUMBERS: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {
    "hits": (CounterMetricFamily, "Requests that found the adapter in the pool"),
    "misses": (CounterMetricFamily, "Requests that the adapter was loaded for"),
    "evictions": (CounterMetricFamily, "Times that the adapter gave up its pages"),
    "waiting": (GaugeMetricFamily, "Requests that wait for the adapter"),
    "active": (GaugeMetricFamily, "Requests of the adapter in the running batch"),
    "pages": (GaugeMetricFamily, "Pages of the pool that the adapter holds"),
}
_FROM: dict[str, tuple[Callable[[AdapterSeen], int], Callable[[AdapterSeen], float]]] = {
    "disk": (lambda one: one.reads, lambda one: one.read_s),
    "host": (lambda one: one.copies, lambda one: one.copy_s),
}
"""By the tier that a load comes from: how many there were, and the seconds that they took."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What an engine has seen of an adapter that the catalog knows."""

    seen: Seen
    owner: Owner

    @property
    def labels(self) -> list[str]:
        return [str(self.seen.engine), self.owner.tenant, self.owner.adapter, str(self.owner.version)]


async def most_used(view: EngineReader, most: int) -> Sequence[Shown]:
    """At most so many of each engine; none while the catalog does not tell their names."""
    if not most:
        return ()
    by_engine: defaultdict[int, list[Seen]] = defaultdict(list)
    for one in await view.adapters():
        by_engine[one.engine].append(one)
    chosen = list(chain.from_iterable(nlargest(most, some, key=_uses) for some in by_engine.values()))
    try:
        owners = await view.owners([one.adapter.digest for one in chosen])
    except UnavailableError:
        return ()
    shown = ((one, named(owners.get(one.adapter.digest, ()), one.adapter.tenant)) for one in chosen)
    return [Shown(one, owner) for one, owner in shown if owner is not None]


def adapter_series(shown: Sequence[Shown]) -> Iterator[Metric]:
    """The metrics of those adapters."""
    if not shown:
        return
    tier = GaugeMetricFamily("stencilpress_adapter_tier", "1 for the tier that has it", labels=[*_LABELS, "tier"])
    for one in shown:
        tier.add_metric([*one.labels, one.seen.adapter.tier], 1.0)
    yield tier
    for field, (kind, text) in _NUMBERS.items():
        metric = kind(f"stencilpress_adapter_{field}", text, labels=_LABELS)
        for one in shown:
            metric.add_metric(one.labels, getattr(one.seen.adapter, field))
        yield metric
    loads = CounterMetricFamily("stencilpress_adapter_loads", "Loads by where from", labels=[*_LABELS, "tier"])
    seconds = CounterMetricFamily(
        "stencilpress_adapter_load_seconds", "Seconds that loads took, by where from", labels=[*_LABELS, "tier"]
    )
    for one in shown:
        for name, (count, spent_s) in _FROM.items():
            loads.add_metric([*one.labels, name], count(one.seen.adapter))
            seconds.add_metric([*one.labels, name], spent_s(one.seen.adapter))
    yield from (loads, seconds)


def _uses(one: Seen) -> tuple[int, int]:
    return one.adapter.hits + one.adapter.misses, one.adapter.waiting
