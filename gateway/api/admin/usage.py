"""What a tenant used: sums by adapter, and single requests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.operation import Call, Page, PageQuery, decode_cursor, operation, paged
from stencilpress.gateway.api.admin.tables import Format, Table
from stencilpress.gateway.api.admin.views import Instant
from stencilpress.gateway.catalog.usage_reports import (
    DEFAULT_PERIODS,
    DayUsage,
    list_requests,
    time_span,
    usage_by_adapter,
    usage_by_day,
)
from stencilpress.gateway.catalog.usage_sums import Period, UsageSum
from stencilpress.gateway.usage.histogram import Counts, quantiles
from stencilpress.gateway.usage.record import UsageRow

MAX_ADAPTERS = 50
"""Of one page: each is added up from as many roll-ups as there are periods."""
SHARES = (0.5, 0.95, 0.99)


class UsageQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_ADAPTERS, description="Adapters of the page.")] = 20
    period: Annotated[Period, Meta(description="The roll-ups that are added up.")] = "day"
    start: Annotated[Instant | None, Meta(description=f"By default {DEFAULT_PERIODS} periods before the end.")] = None
    end: Annotated[Instant | None, Meta(description="By default now.")] = None


class Percentiles(msgspec.Struct, frozen=True):
    """In milliseconds, to 5 %; null if there was nothing to time."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, counts: Counts) -> Percentiles:
        return cls(*(None if value is None else round(value, 3) for value in quantiles(counts, SHARES)))


class UsageView(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one adapter, empty for the base alone. Tokens that were generated and not delivered are not billed."""

    adapter: str
    requests: int
    failures: int
    cold_starts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    undelivered_tokens: int
    ttft_ms: Percentiles
    inter_token_ms: Percentiles
    queue_ms: Percentiles

    @classmethod
    def of(cls, one: tuple[str, UsageSum]) -> UsageView:
        adapter, total = one
        return cls(
            adapter=adapter,
            requests=total.requests,
            failures=total.failures,
            cold_starts=total.cold_starts,
            prompt_tokens=total.prompt_tokens,
            cached_tokens=total.cached_tokens,
            completion_tokens=total.completion_tokens,
            undelivered_tokens=total.undelivered_tokens,
            ttft_ms=Percentiles.of(total.ttft),
            inter_token_ms=Percentiles.of(total.inter_token),
            queue_ms=Percentiles.of(total.queue),
        )


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request: by which key, of which version, what it took and how it ended."""

    request_id: str
    key_id: str
    adapter: str
    version: int
    admitted_at: datetime
    finished_at: datetime
    status: str
    error_code: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    undelivered_tokens: int
    ttft_ms: float | None
    inter_token_ms: float | None
    queue_ms: float
    cold_start_ms: float
    duration_ms: float

    @classmethod
    def of(cls, one: UsageRow) -> RequestView:
        return msgspec.convert(one, cls, from_attributes=True)


@operation("GET", "/tenants/{tenant}/usage", Permission.READ)
async def list_usage(call: Call, query: UsageQuery) -> Page[UsageView]:
    """Usage by adapter, with percentiles of its latencies.

    It is added up from roll-ups, which are some seconds behind; days are those of UTC.
    """
    start, end = time_span(query.period, query.start, query.end)
    found = await usage_by_adapter(
        call.services.db,
        call.tenant.id,
        query.period,
        start,
        end,
        after=decode_cursor(query.after, str),
        limit=query.limit + 1,
    )
    return paged(found, query.limit, lambda one: one[0], UsageView.of)


class DaysQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    first: Annotated[date | None, Meta(description="By default 29 days before the last.")] = None
    last: Annotated[date | None, Meta(description="By default today.")] = None
    format: Annotated[Format, Meta(description="`csv` for a file; so does `Accept: text/csv`.")] = "json"


class DayView(msgspec.Struct, frozen=True, kw_only=True):
    """All of a tenant's requests of one day, which is one of UTC. Undelivered tokens are not billed."""

    day: date
    requests: int
    failures: int
    cold_starts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    undelivered_tokens: int


class DaysView(msgspec.Struct, frozen=True):
    """Every day of the span, the oldest first."""

    data: list[DayView]

    @classmethod
    def of(cls, days: Sequence[DayUsage]) -> DaysView:
        return cls([msgspec.convert(one, DayView, from_attributes=True) for one in days])

    def table(self) -> Table:
        names = DayView.__struct_fields__
        return Table("usage-by-day", names, ([getattr(one, name) for name in names] for one in self.data))


@operation("GET", "/tenants/{tenant}/usage/days", Permission.READ, table=DaysView.table)
async def list_usage_days(call: Call, query: DaysQuery) -> DaysView:
    """Usage by day, at most 400 days, out of roll-ups, which are some seconds behind."""
    last = query.last or datetime.now(UTC).date()
    first = query.first or last - timedelta(days=DEFAULT_PERIODS - 1)
    return DaysView.of(await usage_by_day(call.services.db, call.tenant.id, first, last))


@operation("GET", "/tenants/{tenant}/requests", Permission.READ)
async def list_tenant_requests(call: Call, query: PageQuery) -> Page[RequestView]:
    """A tenant's admitted requests, newest first, as long as they are kept."""
    found = await list_requests(
        call.services.db,
        call.tenant.id,
        after=decode_cursor(query.after, tuple[datetime, bytes]),
        limit=query.limit + 1,
    )
    return paged(found, query.limit, lambda one: (one.admitted_at, one.key), RequestView.of)


OPERATIONS = (list_usage, list_usage_days, list_tenant_requests)
