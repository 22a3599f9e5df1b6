"""Whether a canary is as good as the version beside it: what its guard says, given how both did. Pure.

Too few requests decide nothing. What is as bad on both sides is not the canary's fault: an engine that is down fails
requests of every version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stencilpress.gateway.catalog.records import CanaryGuard
from stencilpress.gateway.usage.histogram import Counts, quantiles


class Judgement(StrEnum):
    UNGUARDED = "unguarded"
    """Nobody has set a limit."""
    UNDECIDED = "undecided"
    """Fewer requests than the guard wants to see."""
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Side:
    """What a guard looks at of one version."""

    requests: int = 0
    failures: int = 0
    ttft: Counts | None = None

    @property
    def error_share(self) -> float | None:
        return self.failures / self.requests if self.requests else None

    @property
    def first_tokens(self) -> int:
        return sum((self.ttft or {}).values())

    @property
    def ttft_p95_ms(self) -> float | None:
        return quantiles(self.ttft or {}, [0.95])[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reason`` says for people why it is bad, or what is missing."""

    judgement: Judgement
    reason: str = ""


def judge(guard: CanaryGuard | None, current: Side, canary: Side) -> Verdict:
    """What the guard says of a canary."""
    if guard is None:
        return Verdict(Judgement.UNGUARDED)
    if canary.requests < guard.min_requests:
        return Verdict(Judgement.UNDECIDED, f"{canary.requests} of {guard.min_requests} requests so far")
    reasons = [*_too_many_errors(guard, current, canary), *_too_slow(guard, current, canary)]
    return Verdict(Judgement.BAD, "; ".join(reasons)) if reasons else Verdict(Judgement.GOOD)


def _too_many_errors(guard: CanaryGuard, current: Side, canary: Side) -> Iterator[str]:
    share, usual, most = canary.error_share, current.error_share, guard.max_error_share
    if share is None or most is None or share <= most:
        return
    if usual is not None and current.requests >= guard.min_requests and usual >= share:
        return
    beside = "" if usual is None else f" ({100 * usual:.3g} % of the current version's)"
    yield f"{100 * share:.3g} % of {canary.requests} requests failed, more than {100 * most:.3g} %{beside}"


def _too_slow(guard: CanaryGuard, current: Side, canary: Side) -> Iterator[str]:
    most, slow, usual = guard.max_ttft_ratio, canary.ttft_p95_ms, current.ttft_p95_ms
    if most is None or slow is None or usual is None:
        return
    if min(canary.first_tokens, current.first_tokens) < guard.min_requests or slow <= most * usual:
        return
    yield f"p95 of the first token is {slow:.0f} ms, {slow / usual:.2g} times the current version's {usual:.0f} ms"
