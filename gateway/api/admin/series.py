"""Usage over time, versions side by side, and who is on top; all out of roll-ups, some seconds behind."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.operation import Call, operation
from stencilpress.gateway.api.admin.series_views import (
    ActivityView,
    ComparisonView,
    SeriesView,
    TopView,
    UsageTotals,
)
from stencilpress.gateway.api.admin.tables import Format
from stencilpress.gateway.api.admin.views import Instant
from stencilpress.gateway.catalog.adapters import get_adapter
from stencilpress.gateway.catalog.records import find_version_of
from stencilpress.gateway.catalog.refusals import refusal_series
from stencilpress.gateway.catalog.series import (
    MAX_POINTS,
    Subject,
    activity_of_names,
    choose_axis,
    span,
    total,
    usage_series,
)
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.catalog.tops import By, top_adapters, top_span, top_tenants
from stencilpress.gateway.catalog.usage_sums import EVERYBODY
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.names import ANY_BASE

DEFAULT_SPAN = timedelta(days=1)
MAX_TOPS = 50
MAX_ACTIVE = 50
"""Adapters of one question: each is added up from as many roll-ups as there are steps."""
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Start = Annotated[Instant | None, Meta(description="By default a day before the end.")]
End = Annotated[Instant | None, Meta(description="By default now.")]
Points = Annotated[int, Meta(ge=1, le=MAX_POINTS, description="At most so many; a step is at least a minute.")]
Form = Annotated[Format, Meta(description="`csv` for a file; so does `Accept: text/csv`.")]
Name = Annotated[str, Meta(max_length=64)]
Adapter = Annotated[Name | None, Meta(description="Only this adapter; `base` for the base alone.")]


class SeriesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    adapter: Adapter = None
    version: Annotated[Number | None, Meta(description="Only this version of the adapter.")] = None
    start: Start = None
    end: End = None
    points: Points = 300
    previous: Annotated[bool, Meta(description="The span of the same length before, too.")] = False
    format: Form = "json"


class AllSeriesQuery(SeriesQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenant: Annotated[str, Meta(max_length=64, description="Only this tenant.")] = ""


class ComparisonQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    other: Annotated[int, Meta(ge=1, le=2**31 - 1, description="The version beside it.")]
    start: Start = None
    end: End = None


class TopQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    by: Annotated[By, Meta(description="The order; `hit_rate` has the lowest first. `ttft_p99`: of the busiest.")] = (
        "tokens"
    )
    start: Start = None
    end: End = None
    limit: Annotated[int, Meta(ge=1, le=MAX_TOPS)] = 20
    format: Form = "json"


class AllTopQuery(TopQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tenants: Annotated[bool, Meta(description="Tenants as a whole, instead of adapters.")] = False


class ActivityQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    adapters: Annotated[str, Meta(max_length=64 * MAX_ACTIVE, description="Names, separated by commas.")]
    start: Start = None
    end: End = None
    points: Annotated[int, Meta(ge=1, le=48)] = 24


@operation("GET", "/series", Permission.OPERATE, table=SeriesView.table)
async def get_series(call: Call, query: AllSeriesQuery) -> SeriesView:
    """Traffic, tokens, latencies, cold starts and refusals over time, of all tenants or one.

    The step follows from the span. Up to a day is shown from minutes while they are kept, else from hours or days.
    """
    tenant_id = (await get_tenant(call.services.db, query.tenant, deleted=True)).id if query.tenant else EVERYBODY
    if query.adapter is not None and not query.tenant:
        raise InvalidRequestError("adapter: needs the tenant that it belongs to", param="adapter")
    return await series_of(call.services.db, query, tenant_id)


@operation("GET", "/tenants/{tenant}/series", Permission.READ, table=SeriesView.table)
async def get_tenant_series(call: Call, query: SeriesQuery) -> SeriesView:
    """Traffic, tokens, latencies, cold starts and refusals of a tenant over time.

    The step follows from the span. Up to a day is shown from minutes while they are kept, else from hours or days.
    """
    return await series_of(call.services.db, query, call.tenant.id)


async def series_of(db: Database, query: SeriesQuery, tenant_id: int) -> SeriesView:
    """Of a tenant, or of everybody. Raises :class:`InvalidRequestError`."""
    if query.version is not None and query.adapter is None:
        raise InvalidRequestError("version: needs the adapter that it belongs to", param="version")
    axis = choose_axis(*_span(query), points=query.points, previous=query.previous)
    adapter = "" if query.adapter == ANY_BASE else query.adapter
    subject = Subject(tenant_id, adapter, query.version)
    steps = await usage_series(db, subject, axis)
    before = await usage_series(db, subject, axis.before) if query.previous else None
    refusals = await refusal_series(db, tenant_id, axis)
    return await asyncio.to_thread(SeriesView.of, axis, time.time(), steps, before, refusals)


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/comparison", Permission.READ)
async def compare_versions(call: Call, query: ComparisonQuery) -> ComparisonView:
    """How two versions did over the same span: first token, gaps, errors, speed."""
    name = call.path("adapter")
    adapter = await get_adapter(call.services.db, call.tenant.id, name)
    axis = choose_axis(*_span(query))
    sums = []
    for number in (query.version, query.other):
        find_version_of(adapter, number)
        steps = await usage_series(call.services.db, Subject(call.tenant.id, name, number), axis)
        sums.append(await asyncio.to_thread(total, steps))
    first, second = [UsageTotals.of(one) for one in sums]
    return ComparisonView(
        start=axis.start, end=axis.end, version=query.version, total=first, other=query.other, other_total=second
    )


@operation("GET", "/top", Permission.OPERATE, table=TopView.table)
async def get_top(call: Call, query: AllTopQuery) -> TopView:
    """The adapters of all tenants, or the tenants, that come first by a number.

    Hours are added up for a span of up to 25 hours, days for one of up to 31 days.
    """
    span = top_span(*_span(query))
    db = call.services.db
    if query.tenants:
        return TopView.of(span.start, span.end, await top_tenants(db, span, query.by, query.limit))
    return TopView.of(span.start, span.end, await top_adapters(db, span, query.by, query.limit))


@operation("GET", "/tenants/{tenant}/top", Permission.READ, table=TopView.table)
async def get_tenant_top(call: Call, query: TopQuery) -> TopView:
    """A tenant's adapters that come first by a number.

    Hours are added up for a span of up to 25 hours, days for one of up to 31 days.
    """
    span = top_span(*_span(query))
    found = await top_adapters(call.services.db, span, query.by, query.limit, call.tenant.id)
    return TopView.of(span.start, span.end, found)


@operation("GET", "/tenants/{tenant}/activity", Permission.READ)
async def get_activity(call: Call, query: ActivityQuery) -> ActivityView:
    """Requests over time and totals of some adapters, for a list of them; a step is at least an hour."""
    names = list(dict.fromkeys(filter(None, query.adapters.split(","))))
    if len(names) > MAX_ACTIVE:
        raise InvalidRequestError(f"adapters: {len(names)} are more than {MAX_ACTIVE}", param="adapters")
    axis = choose_axis(*_span(query), points=query.points, least_s=3600)  # minutes of fifty adapters are too many
    found = await activity_of_names(call.services.db, [(call.tenant.id, name) for name in names], axis)
    activities = {name: found[call.tenant.id, name] for name in names}
    return await asyncio.to_thread(ActivityView.of, call.tenant.name, axis, activities)


def _span(query: SeriesQuery | ComparisonQuery | TopQuery | ActivityQuery) -> tuple[datetime, datetime]:
    return span(query.start, query.end, DEFAULT_SPAN)


OPERATIONS = (get_series, get_tenant_series, compare_versions, get_top, get_tenant_top, get_activity)
