"""Two versions side by side as a page shows them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stencilpress.gateway.api.admin.series_views import UsageTotals
from stencilpress.web.formats import milliseconds, number, percent

FEW_REQUESTS = 50
"""Below this a difference means little."""
_NOTABLE = 0.05

Reading = Callable[[UsageTotals], float | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One number of both. ``verdict`` is ``better``, ``worse`` or "" where the two are similar."""

    label: str
    stable: str
    canary: str
    change: str
    verdict: str


_LATENCIES: tuple[tuple[str, Reading], ...] = (
    ("First token, p50", lambda one: one.ttft_ms.p50),
    ("First token, p95", lambda one: one.ttft_ms.p95),
    ("First token, p99", lambda one: one.ttft_ms.p99),
    ("Between tokens, p99", lambda one: one.inter_token_ms.p99),
)


def compare(stable: UsageTotals, canary: UsageTotals) -> list[Row]:
    """The rows of the table; less is better for latencies and errors, more for speed and hits."""
    rows = [Row("Requests", number(stable.requests), number(canary.requests), _share(stable, canary), "")]
    rows.append(_row("Errors", lambda one: one.error_share, percent, stable, canary))
    rows += [_row(label, reading, milliseconds, stable, canary) for label, reading in _LATENCIES]
    rows.append(_row("Tokens/s of a stream", _speed, number, stable, canary, more_is_better=True))
    rows.append(_row("Hit rate", lambda one: one.hit_rate, percent, stable, canary, more_is_better=True))
    return rows


def _row(
    label: str,
    reading: Reading,
    text: Callable[[float | None], str],
    stable: UsageTotals,
    canary: UsageTotals,
    *,
    more_is_better: bool = False,
) -> Row:
    left, right = reading(stable), reading(canary)
    if left is None or right is None:
        return Row(label, text(left), text(right), "", "")
    change = (right - left) / left if left else (0.0 if right == left else float("inf"))
    if abs(change) < _NOTABLE:
        return Row(label, text(left), text(right), "similar", "")
    better = (change > 0) == more_is_better
    shown = "from none" if change == float("inf") else f"{'+' if change > 0 else '−'}{abs(100 * change):.0f} %"
    return Row(label, text(left), text(right), shown, "better" if better else "worse")


def _speed(one: UsageTotals) -> float | None:
    return one.tokens_per_s


def _share(stable: UsageTotals, canary: UsageTotals) -> str:
    """The canary's part of both."""
    both = stable.requests + canary.requests
    return f"{percent(canary.requests / both)} of both" if both else ""
