"""From requests to the values that rules judge, by adapter and by tenant. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stencilpress.gateway.alerts.incidents import Incident, Measured, Subject
from stencilpress.gateway.alerts.rules import DEFINITIONS, Kind, Place, Rules
from stencilpress.gateway.names import ANY_BASE
from stencilpress.gateway.usage.histogram import Counts, add, quantiles


@dataclass(slots=True)
class Traffic:
    """Requests of one adapter, or of a whole tenant, in the window."""

    requests: int = 0
    failures: int = 0
    cold_starts: int = 0
    ttft: Counts = field(default_factory=dict)
    cold_start: Counts = field(default_factory=dict)


class Loads(NamedTuple):
    """Requests for an adapter over some time, and those of them for which it had to be loaded."""

    requests: int = 0
    cold_starts: int = 0

    @property
    def hit_rate(self) -> float:
        return 1 - self.cold_starts / self.requests


Past = Mapping[tuple[int, str], Loads]
"""By tenant and adapter the day before this hour, which a hit rate is compared with."""


class TrafficJudge:
    """Takes adapters one after the other and keeps what breaks a rule, or is open and may be well again."""

    def __init__(self, rules: Rules, open_: Mapping[Subject, Incident], past: Past) -> None:
        self._rules = rules
        self._open = open_
        self._past = past
        self._found: dict[Subject, Measured] = {}
        self._all: defaultdict[int, Traffic] = defaultdict(Traffic)
        self._adapters: defaultdict[int, Traffic] = defaultdict(Traffic)
        """Without the base, which is always loaded; first tokens are no tenant's."""

    def take(self, tenant_id: int, adapter: str, traffic: Traffic) -> None:
        """``adapter`` is ``base`` for the base alone. Each at most once."""
        _count(self._all[tenant_id], traffic)
        values = [_errors(traffic), _first_token(traffic)]
        if adapter != ANY_BASE:
            total = self._adapters[tenant_id]
            _count(total, traffic)
            add(total.cold_start, traffic.cold_start)
            values += _of_loads(traffic, self._past.get((tenant_id, adapter)))
        self._keep(tenant_id, adapter, values)

    def found(self) -> dict[Subject, Measured]:
        """Of adapters and of their tenants, once all have been taken."""
        past = _by_tenant(self._past)
        for tenant_id, traffic in self._all.items():
            values = [_errors(traffic), *_of_loads(self._adapters[tenant_id], past.get(tenant_id))]
            self._keep(tenant_id, "", values)
        return self._found

    def _keep(self, tenant_id: int, adapter: str, values: list[_Value]) -> None:
        place = Place(tenant_id, adapter)
        for kind, requests, value, note in values:
            rule = self._rules.of(kind, place)
            if value is None or requests < rule.min_requests:
                continue
            subject = Subject(kind, tenant_id, adapter)
            if subject in self._open or (rule.enabled and DEFINITIONS[kind].breached(value, rule)):
                self._found[subject] = Measured(value, f"{requests} requests in ten minutes{note}")


class _Value(NamedTuple):
    """``requests`` stand behind it; None is no value."""

    kind: Kind
    requests: int
    value: float | None
    note: str = ""


def _errors(traffic: Traffic) -> _Value:
    share = traffic.failures / traffic.requests if traffic.requests else None
    return _Value(Kind.ERRORS_HIGH, traffic.requests, share)


def _first_token(traffic: Traffic) -> _Value:
    return _Value(Kind.FIRST_TOKEN_SLOW, sum(traffic.ttft.values()), quantiles(traffic.ttft, [0.99])[0])


def _of_loads(traffic: Traffic, past: Loads | None) -> Iterator[_Value]:
    """What rests on whether adapters were loaded. A hit rate has fallen from a day that had as many requests."""
    yield _Value(Kind.COLD_START_SLOW, sum(traffic.cold_start.values()), quantiles(traffic.cold_start, [0.99])[0])
    if not traffic.requests:
        return
    now = Loads(traffic.requests, traffic.cold_starts)
    yield _Value(Kind.HIT_RATE_LOW, now.requests, now.hit_rate)
    if past is not None and past.requests >= now.requests:
        note = f", {now.hit_rate:.0%} after {past.hit_rate:.0%} in the day before"
        yield _Value(Kind.HIT_RATE_FALLING, now.requests, past.hit_rate - now.hit_rate, note)


def _count(total: Traffic, traffic: Traffic) -> None:
    total.requests += traffic.requests
    total.failures += traffic.failures
    total.cold_starts += traffic.cold_starts


def _by_tenant(past: Past) -> dict[int, Loads]:
    sums: dict[int, Loads] = {}
    for (tenant_id, _), loads in past.items():
        before = sums.get(tenant_id, Loads())
        sums[tenant_id] = Loads(before.requests + loads.requests, before.cold_starts + loads.cold_starts)
    return sums
