"""What a time series shows, as the charts of ``static/chart.js`` take it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stencilpress.gateway.api.admin.engine_views import EngineSeriesView
from stencilpress.gateway.api.admin.series_views import PercentileLines, SeriesView, UsageTotals

Chart = dict[str, Any]
_SHARES = (("p50", 1), ("p95", 3), ("p99", 4))
"""With their colours, the same on every chart."""
DIMENSIONS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrent_streams": "requests at once",
    "tokens_per_day": "tokens a day",
    "tokens_per_month": "tokens a month",
}


ENGINE_CHARTS = (
    ("adapters-per-step", "Distinct adapters in a batch"),
    ("requests-per-step", "Requests in a batch"),
    ("occupancy", "Batches over time"),
    ("pool", "Pages of the pool"),
    ("tiers", "Adapters at hand"),
    ("loads", "Adapters loaded and evicted"),
)
"""Ids and titles of what only operators see."""


def charts_of(view: SeriesView) -> dict[str, Chart]:
    """By the ids of their figures."""
    lines, before = view.lines, view.previous
    chart = _Charts(view)
    rates = [("answers", "completion_tokens_per_s", 1), ("prompts", "prompt_tokens_per_s", 2)]
    rates.append(("from the prefix cache", "cached_tokens_per_s", 5))
    return {
        "traffic": chart(
            [line("requests", lines.requests_per_s, 1)]
            + ([line("before", before.requests_per_s, 8, dashed=True)] if before else []),
            "/s",
            kind="area",
        ),
        "tokens": chart(
            [line(label, getattr(lines, name), color) for label, name, color in rates]
            + ([line("answers before", before.completion_tokens_per_s, 8, dashed=True)] if before else []),
            "tok/s",
            kind="area",
        ),
        "ttft": chart(percentiles(lines.ttft_ms, before.ttft_ms if before else None), "ms"),
        "inter-token": chart(percentiles(lines.inter_token_ms, before.inter_token_ms if before else None), "ms"),
        "queue": chart(percentiles(lines.queue_ms, before.queue_ms if before else None), "ms"),
        "cold-starts": chart(
            [line("cold starts", lines.cold_starts, 3)]
            + ([line("before", before.cold_starts, 8, dashed=True)] if before else []),
            kind="counts",
        ),
        "hit-rate": chart([line("found in memory", _percent(lines.hit_rate), 2)], "%"),
        "refusals": chart(
            [
                line(DIMENSIONS.get(name, name) + suffix, counts, at + 1, dashed=bool(suffix))
                for at, (name, each) in enumerate(view.refusals.items())
                for suffix, counts in (("", each.refused), (", watched", each.watched))
                if any(counts)
            ]
            or [line("refused", [0] * len(view.times), 4)],
            kind="counts",
        ),
        "failures": chart(
            [line(code.replace("_", " "), counts, at + 3) for at, (code, counts) in enumerate(lines.errors.items())]
            or [line("failed", lines.failures, 4)],
            kind="counts",
        ),
    }


def engine_charts_of(view: EngineSeriesView) -> dict[str, Chart]:
    """The charts of :data:`ENGINE_CHARTS`."""
    lines, chart = view.lines, _Charts(view)
    return {
        "adapters-per-step": distribution({int(value): count for value, count in view.adapters_per_step.items()}),
        "requests-per-step": distribution({int(value): count for value, count in view.requests_per_step.items()}),
        "occupancy": chart(
            [
                line("requests in a step", lines.requests_per_step, 1),
                line("adapters in a step", lines.adapters_per_step, 2),
                line("waiting", lines.waiting, 3),
            ]
        ),
        "pool": chart(
            [
                line("adapters", lines.pages_adapter, 1),
                line("keys and values", lines.pages_kv, 2),
                line("prefix cache", lines.pages_cached, 6),
                line("free", lines.pages_free, 8),
            ],
            "pages",
        ),
        "tiers": chart([line("in HBM", lines.adapters_hbm, 1), line("in host memory", lines.adapters_host, 6)]),
        "loads": chart(
            [
                line("loaded", lines.adapter_loads, 1),
                line("evicted", lines.adapter_evictions, 3),
                line("failed", lines.adapter_failures, 4),
            ],
            kind="steps",
        ),
    }


class _Charts:
    def __init__(self, view: SeriesView | EngineSeriesView) -> None:
        self._x = [int(at.timestamp()) for at in view.times]

    def __call__(self, series: list[dict[str, Any]], unit: str = "", kind: str = "line") -> Chart:
        """``counts`` are bars where nothing could be hidden behind another."""
        if kind == "counts":
            kind = "bars" if len(series) == 1 else "steps"
        return {"x": self._x, "series": series, "unit": unit, "kind": kind}


def line(label: str, values: Sequence[float | None], color: int, *, dashed: bool = False) -> dict[str, Any]:
    return {"label": label, "values": list(values), "color": (color - 1) % 8 + 1, "dashed": dashed}


def percentiles(lines: PercentileLines, before: PercentileLines | None) -> list[dict[str, Any]]:
    """Three lines, and p99 of the span before."""
    shown = [line(name, getattr(lines, name), color) for name, color in _SHARES]
    return shown + ([line("p99 before", before.p99, 8, dashed=True)] if before else [])


def distribution(steps: Mapping[int, int]) -> Chart:
    """Shares of the engines' steps by how many of something each ran, in classes of 0, 1, 2, 3–4, 5–8, …"""
    total = sum(steps.values())
    classes: dict[int, int] = {}
    for value, count in steps.items():
        at = 0 if value <= 0 else 1 + (value - 1).bit_length()
        classes[at] = classes.get(at, 0) + count
    ordered = range(min(classes, default=0), max(classes, default=0) + 1)
    shares = [round(100 * classes.get(at, 0) / total, 2) if total else None for at in ordered]
    return {"labels": [_class_name(at) for at in ordered], "series": [line("of steps", shares, 1)], "unit": "%"}


def changes(now: UsageTotals, before: UsageTotals | None) -> dict[str, float | None]:
    """Relative changes against the span before, by fact; None where there is nothing to compare."""
    if before is None:
        return {}
    pairs: Iterable[tuple[str, float | None, float | None]] = (
        ("requests", now.requests, before.requests),
        ("completion_tokens", now.completion_tokens, before.completion_tokens),
        ("ttft_p99", now.ttft_ms.p99, before.ttft_ms.p99),
        ("inter_token_p99", now.inter_token_ms.p99, before.inter_token_ms.p99),
        ("cold_starts", now.cold_starts, before.cold_starts),
    )
    return {name: value / old - 1 if value is not None and old else None for name, value, old in pairs}


def _class_name(at: int) -> str:
    low, high = (at, at) if at < 3 else (2 ** (at - 2) + 1, 2 ** (at - 1))
    return str(low) if low == high else f"{low}–{high}"


def _percent(shares: Sequence[float | None]) -> list[float | None]:
    return [None if share is None else round(100 * share, 2) for share in shares]
