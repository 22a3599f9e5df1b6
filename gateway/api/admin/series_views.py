"""What the admin API shows of usage over time, of versions side by side, and of who is on top."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import msgspec

from stencilpress.gateway.api.admin.tables import Cell, Table
from stencilpress.gateway.api.admin.usage import SHARES, Percentiles
from stencilpress.gateway.catalog.refusals import Refusals
from stencilpress.gateway.catalog.series import Activity, Axis, total
from stencilpress.gateway.catalog.tops import Top
from stencilpress.gateway.catalog.usage_sums import UsageSum
from stencilpress.gateway.usage.histogram import Counts, quantiles


class PercentileLines(msgspec.Struct, frozen=True):
    """In milliseconds, to 5 %, one value a point; null where there was nothing to time."""

    p50: list[float | None]
    p95: list[float | None]
    p99: list[float | None]

    @classmethod
    def of(cls, histograms: Sequence[Counts]) -> PercentileLines:
        found = [[None if ms is None else round(ms, 3) for ms in quantiles(one, SHARES)] for one in histograms]
        lines = zip(*found, strict=True)
        return cls(*(list(line) for line in lines))


class UsageLines(msgspec.Struct, frozen=True, kw_only=True):
    """One value a point. Rates are over a step, in the last one over the part of it that has passed.

    `hit_rate` is the share of requests that did not wait for their adapter, `errors` failures by their code.
    """

    requests: list[int]
    failures: list[int]
    cold_starts: list[int]
    requests_per_s: list[float]
    prompt_tokens_per_s: list[float]
    completion_tokens_per_s: list[float]
    cached_tokens_per_s: list[float]
    hit_rate: list[float | None]
    ttft_ms: PercentileLines
    inter_token_ms: PercentileLines
    queue_ms: PercentileLines
    cold_start_ms: PercentileLines
    errors: dict[str, list[int]]

    @classmethod
    def of(cls, steps: Sequence[UsageSum], axis: Axis, end_s: float) -> UsageLines:
        seconds = [
            max(min(axis.start_s + (at + 1) * axis.step_s, end_s) - (axis.start_s + at * axis.step_s), 1.0)
            for at in range(axis.count)
        ]

        def rates(name: str) -> list[float]:
            return [round(getattr(one, name) / of, 4) for one, of in zip(steps, seconds, strict=True)]

        codes = sorted({code for one in steps for code in one.errors})
        return cls(
            requests=[one.requests for one in steps],
            failures=[one.failures for one in steps],
            cold_starts=[one.cold_starts for one in steps],
            requests_per_s=rates("requests"),
            prompt_tokens_per_s=rates("prompt_tokens"),
            completion_tokens_per_s=rates("completion_tokens"),
            cached_tokens_per_s=rates("cached_tokens"),
            hit_rate=[_hit_rate(one) for one in steps],
            ttft_ms=PercentileLines.of([one.ttft for one in steps]),
            inter_token_ms=PercentileLines.of([one.inter_token for one in steps]),
            queue_ms=PercentileLines.of([one.queue for one in steps]),
            cold_start_ms=PercentileLines.of([one.cold_start for one in steps]),
            errors={code: [one.errors.get(code, 0) for one in steps] for code in codes},
        )


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """All of a span. `tokens_per_s` is what one stream got: tokens of answers by the time that their requests took."""

    requests: int
    failures: int
    error_share: float | None
    errors: dict[str, int]
    cold_starts: int
    hit_rate: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    undelivered_tokens: int
    tokens_per_s: float | None
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    queue_ms: Percentiles
    cold_start_ms: Percentiles

    @classmethod
    def of(cls, usage: UsageSum) -> UsageTotals:
        return cls(
            requests=usage.requests,
            failures=usage.failures,
            error_share=round(usage.failures / usage.requests, 6) if usage.requests else None,
            errors=dict(sorted(usage.errors.items())),
            cold_starts=usage.cold_starts,
            hit_rate=_hit_rate(usage),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            undelivered_tokens=usage.undelivered_tokens,
            tokens_per_s=(
                round(usage.completion_tokens / usage.duration_ms * 1000, 3) if usage.duration_ms > 0 else None
            ),
            ttft_ms=Percentiles.of(usage.ttft),
            inter_token_ms=Percentiles.of(usage.inter_token),
            queue_ms=Percentiles.of(usage.queue),
            cold_start_ms=Percentiles.of(usage.cold_start),
        )


class RefusalLines(msgspec.Struct, frozen=True):
    """Requests that a limit refused, and those over a limit that is only watched; one value a point."""

    refused: list[int]
    watched: list[int]


class SeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """A time series: point `i` is of the `step_s` seconds from `times[i]` on.

    `previous` is of the span of the same length before. `refusals` are by dimension, of the tenant as a whole.
    """

    start: datetime
    end: datetime
    step_s: int
    times: list[datetime]
    lines: UsageLines
    total: UsageTotals
    previous: UsageLines | None
    previous_total: UsageTotals | None
    refusals: dict[str, RefusalLines]

    @classmethod
    def of(
        cls,
        axis: Axis,
        now_s: float,
        steps: Sequence[UsageSum],
        before: Sequence[UsageSum] | None,
        refusals: Mapping[str, Sequence[Refusals]],
    ) -> SeriesView:
        """Some tens of milliseconds of percentiles: not for the event loop."""
        return cls(
            start=axis.start,
            end=axis.end,
            step_s=axis.step_s,
            times=axis.times,
            lines=UsageLines.of(steps, axis, now_s),
            total=UsageTotals.of(total(steps)),
            previous=None if before is None else UsageLines.of(before, axis.before, axis.start_s),
            previous_total=None if before is None else UsageTotals.of(total(before)),
            refusals={
                dimension: RefusalLines([one.refused for one in counts], [one.watched for one in counts])
                for dimension, counts in refusals.items()
            },
        )

    def table(self) -> Table:
        lines = self.lines
        counts = ("requests", "failures", "cold_starts")
        rates = ("prompt_tokens_per_s", "completion_tokens_per_s", "cached_tokens_per_s", "hit_rate")
        latencies = ("ttft_ms", "inter_token_ms", "queue_ms", "cold_start_ms")
        columns = [getattr(lines, name) for name in (*counts, *rates)]
        columns += [getattr(getattr(lines, name), share) for name in latencies for share in ("p50", "p95", "p99")]
        header = [
            "time",
            *counts,
            *rates,
            *(f"{name}_{share}" for name in latencies for share in ("p50", "p95", "p99")),
        ]
        return Table("series", header, zip(self.times, *columns, strict=True))


class ComparisonView(msgspec.Struct, frozen=True, kw_only=True):
    """Two versions of an adapter over the same span, such as a canary and the version beside it."""

    start: datetime
    end: datetime
    version: int
    total: UsageTotals
    other: int
    other_total: UsageTotals


class TopRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a table. `adapter` is null for a tenant as a whole and empty for the base alone."""

    tenant: str
    adapter: str | None
    total: UsageTotals


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """Whole hours or days, `start` to `end`, the first in the order asked for."""

    start: datetime
    end: datetime
    data: list[TopRow]

    @classmethod
    def of(cls, start: datetime, end: datetime, tops: Sequence[Top]) -> TopView:
        rows = [TopRow(tenant=one.tenant, adapter=one.adapter, total=UsageTotals.of(one.usage)) for one in tops]
        return cls(start=start, end=end, data=rows)

    def table(self) -> Table:
        latencies = ("ttft_ms", "inter_token_ms")
        header = [
            "tenant",
            "adapter",
            *_TOP_COLUMNS,
            *(f"{n}_{share}" for n in latencies for share in ("p50", "p95", "p99")),
        ]

        def rows() -> Iterator[Sequence[Cell]]:
            for row in self.data:
                one = row.total
                numbers = [getattr(one, name) for name in _TOP_COLUMNS]
                numbers += [getattr(getattr(one, n), share) for n in latencies for share in ("p50", "p95", "p99")]
                yield (row.tenant, row.adapter, *numbers)

        return Table("top", header, rows())


class ActivityRow(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's requests in each step, for a spark line, and its totals."""

    tenant: str
    adapter: str
    requests: list[int]
    total: UsageTotals


class ActivityView(msgspec.Struct, frozen=True, kw_only=True):
    """In the order asked for; an adapter without requests has zeros."""

    start: datetime
    end: datetime
    step_s: int
    data: list[ActivityRow]

    @classmethod
    def of(cls, tenant: str, axis: Axis, activities: Mapping[str, Activity]) -> ActivityView:
        """Some milliseconds an adapter: not for the event loop."""
        rows = [
            ActivityRow(
                tenant=tenant,
                adapter=adapter,
                requests=one.requests,
                total=UsageTotals.of(one.total),
            )
            for adapter, one in activities.items()
        ]
        return cls(start=axis.start, end=axis.end, step_s=axis.step_s, data=rows)


def _hit_rate(usage: UsageSum) -> float | None:
    return round(1 - usage.cold_starts / usage.requests, 6) if usage.requests else None


_TOP_COLUMNS = (
    "requests",
    "failures",
    "cold_starts",
    "hit_rate",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "tokens_per_s",
)
