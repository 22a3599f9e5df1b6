"""Numbers beside names: traffic and latencies out of roll-ups, and where engines have an adapter now."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from aiohttp import web

from stencilpress.gateway.api.admin.series import get_tenant_series
from stencilpress.gateway.api.admin.series_views import SeriesView, UsageTotals
from stencilpress.gateway.catalog.series import Activity, activity_of_versions, choose_axis
from stencilpress.gateway.engine_reader import Seen
from stencilpress.gateway.services import SERVICES
from stencilpress.web.ask import ask
from stencilpress.web.page import tenant_of
from stencilpress.web.panels import line
from stencilpress.web.span import RANGES

K = TypeVar("K")

SPANS = {label: RANGES[label] for label in ("1h", "6h", "24h", "7d")}
"""What may be chosen, by the text of the choice."""
_NEAREST = ("disk", "fetching", "host", "loading", "hbm")

STEPS = 25
"""Of a spark line: hours, and a part of one."""

Chart = tuple[str, str, str, dict[str, Any]]
"""Id, title, note and data, as static/chart.js takes them."""


@dataclass(frozen=True, slots=True)
class Used:
    """What a list shows of an adapter or version: requests in each step, and totals."""

    requests: Sequence[int]
    total: UsageTotals


@dataclass(frozen=True, slots=True)
class Place:
    """Where the engine that has it nearest has an adapter; ``error`` tells why one that has it nowhere could not load
    it."""

    tier: str
    pinned: bool
    error: str = ""

    @property
    def nearness(self) -> tuple[int, bool]:
        return _NEAREST.index(self.tier), bool(self.error)


async def places_of(request: web.Request, digests: Collection[str]) -> dict[str, Place]:
    """Of those digests that an engine has seen; the others are on disk."""
    wanted = set(digests)
    if not wanted:
        return {}
    found: dict[str, Place] = {}
    for one in await request.app[SERVICES].view.adapters():
        if one.adapter.digest in wanted:
            found[one.adapter.digest] = _nearer(found.get(one.adapter.digest), one)
    return found


def _nearer(before: Place | None, seen: Seen) -> Place:
    one = seen.adapter
    place = Place(one.tier, one.pinned, one.error if one.tier == "disk" else "")
    return place if before is None or place.nearness > before.nearness else before


async def series_of(
    request: web.Request, adapter: str, version: int | None = None, span: timedelta = SPANS["24h"], points: int = 96
) -> SeriesView:
    """An adapter or one of its versions over a span that ends now."""
    query: dict[str, Any] = {"adapter": adapter, "start": datetime.now(UTC) - span, "points": points}
    if version is not None:
        query["version"] = version
    view: SeriesView = await ask(request, get_tenant_series, tenant=tenant_of(request).name, query=query)
    return view


async def used_versions(request: web.Request, adapter: str, numbers: Sequence[int]) -> dict[int, Used]:
    """What the last day's requests went to, of some versions; one without requests is left out."""
    now = datetime.now(UTC)
    axis = choose_axis(now - SPANS["24h"], now, points=STEPS)
    activities = await activity_of_versions(request.app[SERVICES].db, tenant_of(request).id, adapter, numbers, axis)
    return await asyncio.to_thread(used_of, activities)


def used_of(activities: Mapping[K, Activity]) -> dict[K, Used]:
    """For a list, of those that had requests. Percentiles take a while: not for the event loop."""
    return {key: Used(one.requests, UsageTotals.of(one.total)) for key, one in activities.items() if one.total.requests}


def chart(
    id_: str, title: str, view: SeriesView, lines: Iterable[tuple[str, Sequence[float | None], int]], **options: Any
) -> Chart:
    """``lines`` are of label, values and colour."""
    series = [line(*one) for one in lines]
    x = [int(moment.timestamp()) for moment in view.times]
    note = options.pop("note", "")
    return id_, title, note, {"x": x, "series": series, **options}


def version_charts(view: SeriesView) -> list[Chart]:
    """Traffic and latency of one version."""
    lines = view.lines
    return [
        chart("c-requests", "Requests", view, [("Requests", lines.requests, 1)], kind="bars"),
        chart(
            "c-first",
            "First token",
            view,
            [("p50", lines.ttft_ms.p50, 1), ("p95", lines.ttft_ms.p95, 3), ("p99", lines.ttft_ms.p99, 4)],
            unit="ms",
        ),
    ]
