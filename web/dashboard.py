"""The dashboards: of all tenants, and of one. Everything is out of roll-ups; a script follows with the same figures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from stencilpress.gateway.access import Permission, Role
from stencilpress.gateway.api.admin import engines, series
from stencilpress.gateway.api.admin.series_views import SeriesView, TopRow, TopView, UsageTotals
from stencilpress.gateway.names import ANY_BASE
from stencilpress.web.ask import ask
from stencilpress.web.console import CONSOLE, PREFIX, of_tenant
from stencilpress.web.formats import milliseconds, number, percent
from stencilpress.web.live import ALL as LIVE_ALL
from stencilpress.web.live import TENANT as LIVE_TENANT
from stencilpress.web.page import fragment, page, redirect, render, tenant_of
from stencilpress.web.panels import ENGINE_CHARTS, Chart, changes, charts_of, engine_charts_of
from stencilpress.web.span import RANGES, Span, shown_span
from stencilpress.web.visitor import visitor_of

ALL = f"{PREFIX}/"
TENANT = f"{PREFIX}/t/{{tenant}}/"
ORDERS = {
    "tokens": "Tokens",
    "ttft_p99": "First token p99",
    "cold_starts": "Cold starts",
    "hit_rate": "Hit rate",
}
DEFAULT_ORDER = "tokens"
POINTS = 120
COARSE_POINTS = 31
"""Of a longer span: a month has a point a day. Of engines from some hours on, since their samples are large."""
LEAST_REFRESH_S, MOST_REFRESH_S = 15.0, 300.0
"""How often an open page asks again; roll-ups are some seconds behind."""
LEAST_FRESH_S = 2.0
"""Visitors who come within so long of each other see the same."""
TOP_ROWS = 20


@dataclass(frozen=True, slots=True)
class Question:
    """What the page is asked to show."""

    span: Span
    adapter: str
    compare: bool
    by: str

    @classmethod
    def of(cls, request: web.Request) -> Question:
        query = request.query
        by = query.get("by", DEFAULT_ORDER)
        return cls(
            span=shown_span(request),
            adapter=query.get("adapter", ""),
            compare=query.get("compare") == "1",
            by=by if by in ORDERS else DEFAULT_ORDER,
        )

    def link(self, **changed: str) -> str:
        """The query of this page with some parts changed."""
        parts = self._parts
        if "range" in changed:
            parts |= {"start": "", "end": ""}
        parts |= changed
        return urlencode({name: value for name, value in parts.items() if value})

    @property
    def permalink(self) -> str:
        """The query that shows this very time again."""
        return self.link(range="", start=self.span.start.isoformat(), end=self.span.end.isoformat())

    @property
    def _parts(self) -> dict[str, str]:
        fixed = not self.span.label
        return {
            "range": self.span.label,
            "start": self.span.start.isoformat() if fixed else "",
            "end": self.span.end.isoformat() if fixed else "",
            "adapter": self.adapter,
            "compare": "1" if self.compare else "",
            "by": "" if self.by == DEFAULT_ORDER else self.by,
        }


@page(Permission.READ)
async def show_all(request: web.Request) -> web.StreamResponse:
    """Of all tenants, for operators; others begin at their own."""
    visitor = visitor_of(request)
    if visitor.role is not Role.OPERATOR:
        return redirect(request, of_tenant(TENANT, visitor.tenant))
    return await _answer(request, Question.of(request), None)


@page(Permission.READ)
async def show_tenant(request: web.Request) -> web.StreamResponse:
    return await _answer(request, Question.of(request), tenant_of(request).name)


@dataclass(frozen=True, slots=True)
class Board:
    """What a dashboard shows. ``charts`` are by the ids of their figures.

    ``top`` is None where it comes after the page: over a long time of all tenants it takes longer than all the rest.
    """

    view: SeriesView
    charts: dict[str, Chart]
    top: list[TopRow] | None

    @property
    def refresh_s(self) -> float:
        """How often a page that follows asks again: a few times a point, since nothing else changes."""
        return min(max(self.view.step_s / 4, LEAST_REFRESH_S), MOST_REFRESH_S)


async def _answer(request: web.Request, question: Question, tenant: str | None) -> web.Response:
    """The page, or for its script what changes on it. The charts of engines are asked for when the page stands."""
    answers, span, part = request.app[CONSOLE].answers, question.span, request.query.get("format")
    fresh_s = min(max((span.end - span.start).total_seconds() / POINTS / 20, LEAST_FRESH_S), LEAST_REFRESH_S)
    if part == "engines" and tenant is None:
        charts = await answers.get((ENGINE_CHARTS, question.link()), fresh_s, lambda: _engine_charts(request, span))
        return await _told({"charts": charts, "facts": {}})
    if part == "top" and tenant is None:
        top = await answers.get(("top", question.link()), fresh_s, lambda: _top(request, question, None))
        return fragment(request, "dashboard_top.html", top=top, tenant=None, link=question.link)
    board = await answers.get((tenant, question.link()), fresh_s, lambda: _board(request, question, tenant))
    if part == "json":
        return await _told({"charts": board.charts, "facts": _facts(board.view.total)})
    view = board.view
    return render(
        request,
        "dashboard.html",
        title="Dashboard",
        section="dashboard",
        tenant=tenant,
        span=question.span,
        ranges=RANGES,
        words=_duration(round((question.span.end - question.span.start).total_seconds())),
        step=_duration(view.step_s),
        link=question.link,
        permalink=question.permalink,
        compare=question.compare,
        adapter=question.adapter,
        adapters=_choices(board.top or [], question.adapter) if tenant else [],
        charts=board.charts,
        total=view.total,
        changes=changes(view.total, view.previous_total),
        top=board.top,
        by=question.by,
        orders=ORDERS.items(),
        refresh_s=board.refresh_s,
        live_url=of_tenant(LIVE_TENANT, tenant) if tenant else LIVE_ALL,
        engine_charts=ENGINE_CHARTS if tenant is None else (),
    )


async def _told(answer: dict[str, Any]) -> web.Response:
    """JSON for the script; it may be large."""
    return web.Response(body=await asyncio.to_thread(msgspec.json.encode, answer), content_type="application/json")


async def _board(request: web.Request, question: Question, tenant: str | None) -> Board:
    """What needs the catalog is asked for at once."""
    if tenant is None and question.span.end - question.span.start > RANGES["24h"]:
        view = await _series(request, question, tenant)
        return Board(view, charts_of(view), None)
    view, top = await asyncio.gather(_series(request, question, tenant), _top(request, question, tenant))
    return Board(view, charts_of(view), top)


async def _series(request: web.Request, question: Question, tenant: str | None) -> SeriesView:
    span = question.span
    points = POINTS if span.end - span.start <= RANGES["24h"] else COARSE_POINTS
    query = {"start": span.start, "end": span.end, "points": points, "previous": question.compare}
    if tenant is not None and question.adapter:
        query["adapter"] = question.adapter
    operation = series.get_series if tenant is None else series.get_tenant_series
    view: SeriesView = await ask(request, operation, tenant=tenant, query=query)
    return view


async def _engine_charts(request: web.Request, span: Span) -> dict[str, Chart]:
    points = POINTS if span.end - span.start <= RANGES["6h"] else COARSE_POINTS
    query = {"start": span.start, "end": span.end, "points": points}
    return engine_charts_of(await ask(request, engines.get_engine_series, engine="all", query=query))


async def _top(request: web.Request, question: Question, tenant: str | None) -> list[TopRow]:
    span = question.span
    query = {"by": question.by, "limit": TOP_ROWS, "start": span.start, "end": span.end}
    operation = series.get_tenant_top if tenant else series.get_top
    found: TopView = await ask(request, operation, tenant=tenant, query=query)
    return found.data


def _choices(top: list[TopRow], chosen: str) -> list[tuple[str, str]]:
    """Adapters to look at alone: the busiest, and the one that is shown."""
    names = [row.adapter or ANY_BASE for row in top]
    names += [chosen] if chosen and chosen not in names else []
    return [(name, "The base alone" if name == ANY_BASE else name) for name in sorted(names)]


def _facts(total: UsageTotals) -> dict[str, str]:
    """The figures at the head of the page, by the ids of their places."""
    return {
        "requests": number(total.requests),
        "completion_tokens": number(total.completion_tokens),
        "ttft_p99": milliseconds(total.ttft_ms.p99),
        "inter_token_p99": milliseconds(total.inter_token_ms.p99),
        "cold_starts": number(total.cold_starts),
        "hit_rate": percent(total.hit_rate),
        "failures": number(total.failures),
    }


def _duration(seconds: int) -> str:
    for size, word in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds % size == 0:
            return word if seconds == size else f"{seconds // size} {word}s"
    return f"{seconds} seconds"


ROUTES = (
    web.get(ALL, show_all),
    web.get(TENANT, show_tenant),
)
