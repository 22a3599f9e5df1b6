"""What a tenant used: by day, by adapter, and its last requests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin import usage
from stencilpress.gateway.api.admin.operation import Page
from stencilpress.gateway.api.admin.tables import csv_response
from stencilpress.gateway.api.admin.usage import DaysView, DayView, RequestView, UsageView
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX
from stencilpress.web.page import page, render, tenant_of
from stencilpress.web.panels import Chart, line

RANGES = {"7d": 7, "30d": 30, "90d": 90}
"""What may be shown: how many days, today included."""
DEFAULT = "30d"
LAST_REQUESTS = 20
_SUMS = ("requests", "failures", "prompt_tokens", "cached_tokens", "completion_tokens", "undelivered_tokens")


@page(Permission.READ)
async def show_usage(request: web.Request) -> web.StreamResponse:
    tenant, shown = tenant_of(request).name, _range(request)
    today = datetime.now(UTC).date()
    span = {"first": today - timedelta(days=RANGES[shown] - 1), "last": today}
    days: DaysView = await ask(request, usage.list_usage_days, tenant=tenant, query=span)
    if request.query.get("format") == "csv":
        return csv_response(days.table())
    start = datetime(today.year, today.month, today.day, tzinfo=UTC) - timedelta(days=RANGES[shown] - 1)
    query: dict[str, Any] = {"start": start, "end": datetime.now(UTC), "after": request.query.get("after", "")}
    adapters: Page[UsageView] = await ask(request, usage.list_usage, tenant=tenant, query=query)
    last: Page[RequestView] = await ask(
        request, usage.list_tenant_requests, tenant=tenant, query={"limit": LAST_REQUESTS}
    )
    more = None if adapters.next is None else "?" + urlencode({"range": shown, "after": adapters.next})
    return render(
        request,
        "tenants/usage.html",
        title="Usage",
        section="usage",
        tenant=tenant,
        ranges=RANGES,
        shown=shown,
        total={name: sum(getattr(one, name) for one in days.data) for name in _SUMS},
        days=days.data,
        chart=_chart(days.data),
        adapters=adapters.data,
        next=more,
        requests=last.data,
    )


def _range(request: web.Request) -> str:
    text = request.query.get("range", DEFAULT)
    if text not in RANGES:
        raise InvalidRequestError(f"range: is not one of {', '.join(RANGES)}", param="range")
    return text


def _chart(days: list[DayView]) -> Chart:
    series = [line("prompts", [one.prompt_tokens for one in days], 2)]
    series.append(line("answers", [one.completion_tokens for one in days], 1))
    x = [int(datetime(*one.day.timetuple()[:3], tzinfo=UTC).timestamp()) for one in days]
    return {"x": x, "series": series, "unit": "tok", "kind": "area"}


ROUTES = (web.get(f"{PREFIX}/t/{{tenant}}/usage", show_usage),)
