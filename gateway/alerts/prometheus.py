"""The rules as a rules file of Prometheus, over what ``/metrics`` shows. Pure.

The metrics have no labels of adapters, so rules on adapters become rules on all of them together: a Prometheus that
watches many servers gets the same defaults, the gateways themselves judge each adapter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from stencilpress.gateway.alerts.rules import DEFINITIONS, WINDOW_S, Kind, Place, Rule, Rules
from stencilpress.gateway.alerts.words import TITLES, alert_name

MEDIA_TYPE = "application/yaml"

_W = f"[{WINDOW_S // 60}m]"
_PAST = "[1d] offset 1h"
_INFERENCE = '{route=~"/v1/.+"}'


@dataclass(frozen=True, slots=True)
class _Query:
    """A kind in PromQL; ``text`` takes the rule and gives the expression. ``shown`` is a template of Prometheus."""

    kind: Kind
    text: Callable[[Rule], str]
    shown: str


def _enough(rule: Rule, counter: str) -> str:
    return f"sum(increase({counter}{_W})) >= {rule.min_requests}"


def _errors(rule: Rule) -> str:
    failed = 'stencilpress_requests_total{route=~"/v1/.+", status="5xx"}'
    share = f"sum(rate({failed}{_W})) / sum(rate(stencilpress_requests_total{_INFERENCE}{_W}))"
    return f"{share} > {rule.threshold:g} and {_enough(rule, f'stencilpress_requests_total{_INFERENCE}')}"


def _slow(histogram: str, rule: Rule) -> str:
    quantile = f"histogram_quantile(0.99, sum by (le) (rate({histogram}_bucket{_W})))"
    return f"{quantile} > {rule.threshold / 1000:g} and {_enough(rule, f'{histogram}_count')}"


def _loads(span: str) -> tuple[str, str]:
    """Requests in a range that found their adapter loaded, and all."""
    hits, misses = (f"sum(increase(stencilpress_engine_adapter_{name}_total{span}))" for name in ("hits", "misses"))
    return hits, f"({hits} + {misses})"


def _hit_rate(rule: Rule) -> str:
    hits, all_ = _loads(_W)
    return f"{hits} / {all_} < {rule.threshold:g} and {all_} >= {rule.min_requests}"


def _hit_rate_fall(rule: Rule) -> str:
    (hits, all_), (past_hits, past) = _loads(_W), _loads(_PAST)
    fall = f"{past_hits} / {past} - {hits} / {all_}"
    return f"{fall} > {rule.threshold:g} and {all_} >= {rule.min_requests} and {past} >= {all_}"


def _disk_share(rule: Rule) -> str:
    return f"stencilpress_disk_free_bytes / stencilpress_disk_total_bytes < {rule.threshold:g}"


QUERIES = (
    _Query(Kind.HIT_RATE_FALLING, _hit_rate_fall, "by {{ $value | humanizePercentage }}"),
    _Query(Kind.HIT_RATE_LOW, _hit_rate, "{{ $value | humanizePercentage }}"),
    _Query(Kind.COLD_START_SLOW, partial(_slow, "stencilpress_cold_start_seconds"), "{{ $value | humanizeDuration }}"),
    _Query(
        Kind.FIRST_TOKEN_SLOW,
        partial(_slow, "stencilpress_time_to_first_token_seconds"),
        "{{ $value | humanizeDuration }}",
    ),
    _Query(Kind.ERRORS_HIGH, _errors, "{{ $value | humanizePercentage }}"),
    _Query(Kind.ENGINE_DOWN, lambda _: "stencilpress_engine_up == 0", "engine {{ $labels.engine }}"),
    _Query(Kind.DISK_SHARE_LOW, _disk_share, "{{ $value | humanizePercentage }} free"),
    _Query(
        Kind.DISK_BYTES_LOW,
        lambda rule: f"stencilpress_disk_free_bytes < {rule.threshold:.0f}",
        "{{ $value | humanize1024 }}B free",
    ),
    _Query(
        Kind.ADAPTER_CORRUPT,
        lambda _: f"increase(stencilpress_engine_adapter_failures_total{_W}) > 0",
        "{{ $value | humanize }} loads failed on engine {{ $labels.engine }}",
    ),
)


_BUDGETS = 'stencilpress_quota_refusals_total{dimension=~"tokens_per_(day|month)"}'
_ALONE = (
    (
        "StencilpressGatewayDown",
        "stencilpress_gateway_up == 0",
        "Gateway is down: {{ $labels.gateway }}",
        "A gateway does not answer the others within half a second",
    ),
    (
        "StencilpressQuotaSpent",
        f"sum by (dimension) (increase({_BUDGETS}{_W})) > 0",
        "Quota is spent: {{ $value | humanize }} requests refused by {{ $labels.dimension }}",
        "Requests are refused because the tokens of a tenant's day or month are spent",
    ),
)
"""What only Prometheus is told of: a name, an expression, a summary, a description."""


def rules_file(rules: Rules) -> str:
    """The rules that hold for all, as YAML; those that are switched off are left out."""
    return "\n".join(_lines(rules)) + "\n"


def _lines(rules: Rules) -> Iterator[str]:
    yield "# The alerts of Stencilpress over its metrics: docs/alerts.md says what each means."
    yield "groups:"
    yield "  - name: stencilpress"
    yield "    rules:"
    for query in QUERIES:
        rule = rules.of(query.kind, Place())
        if rule.enabled:
            yield from _rule(query, rule)
    for name, expr, summary, description in _ALONE:
        yield from _item(name, expr, 20, 60, "warning", {"summary": summary, "description": description})


def _rule(query: _Query, rule: Rule) -> Iterator[str]:
    words = {
        "summary": f"{TITLES[query.kind]}: {query.shown}",
        "description": DEFINITIONS[query.kind].summary,
    }
    name = alert_name(query.kind)
    yield from _item(name, query.text(rule), rule.for_s, rule.clear_s, rule.severity.value, words)


def _item(name: str, expr: str, for_s: int, clear_s: int, severity: str, words: dict[str, str]) -> Iterator[str]:
    """One rule. Texts are quoted as JSON does, which YAML takes."""
    yield f"      - alert: {name}"
    yield f"        expr: {json.dumps(expr)}"
    yield f"        for: {for_s}s"
    yield f"        keep_firing_for: {clear_s}s"
    yield "        labels:"
    yield f"          severity: {severity}"
    yield "        annotations:"
    for key, text in words.items():
        yield f"          {key}: {json.dumps(text)}"
