"""A canary: a second version of an alias for some of its users, beside the numbers of both; promoted, or taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.adapter_views import AdapterView, AliasView, CanaryGuardView, SmokeSuiteView
from stencilpress.gateway.api.admin.aliases import get_smoke_prompts, move_alias
from stencilpress.gateway.api.admin.canary import CanaryReport, get_canary
from stencilpress.gateway.api.admin.series import compare_versions
from stencilpress.gateway.api.admin.series_views import ComparisonView, SeriesView
from stencilpress.gateway.errors import ApiError, NotFoundError, SmokeFailedError
from stencilpress.web.adapters import guards
from stencilpress.web.adapters.aliases import ALIAS, alias_state
from stencilpress.web.adapters.comparison import FEW_REQUESTS, compare
from stencilpress.web.adapters.figures import SPANS, Chart, chart, series_of
from stencilpress.web.adapters.frame import adapter_path, find_adapter, live, show, shown_beside_form
from stencilpress.web.ask import ask
from stencilpress.web.forms import errors_of, read_form
from stencilpress.web.page import page, redirect, render, tenant_of

CANARY = f"{ALIAS}/canary"
STEPS = (1, 5, 10, 25, 50)
"""Percentages that are one click."""
DEFAULT_PERCENT = 5
DEFAULT_SPAN = "1h"
POINTS = 60


@dataclass(frozen=True, slots=True)
class Typed:
    """What a form asked for, and what came of it."""

    version: str = ""
    percent: str = ""
    reason: str = ""
    guard: guards.Fields | None = None
    errors: Mapping[str, str] = field(default_factory=dict)
    moved: bool = False
    failed: SmokeFailedError | None = None


@page(Permission.READ)
async def show_canary(request: web.Request) -> web.StreamResponse:
    """``?version=`` proposes a canary, ``?range=`` is the time of the comparison."""
    return await _page(request, Typed(version=request.query.get("version", "")))


@page(Permission.READ)
async def show_figures(request: web.Request) -> web.StreamResponse:
    """The comparison alone, for the page to renew itself."""
    adapter, alias = await _alias(request)
    figures = await _figures(request, adapter, alias)
    return render(
        request,
        "adapters/canary_figures.html",
        title="",
        tenant=tenant_of(request).name,
        figures=figures,
        guards=guards,
    )


@page(Permission.WRITE)
async def set_canary(request: web.Request) -> web.StreamResponse:
    form = await read_form(request)
    version, percent, reason = (form.get(one, "").strip() for one in ("version", "percent", "reason"))
    guard = guards.typed_fields(form)
    canary = {"version": version, "percent": percent, "guard": guards.guard_of(guard)}
    try:
        await _move(request, form.get("stable", ""), form.get("etag", ""), reason, canary)
    except ApiError as error:
        problem = shown_beside_form(error)
        return await _page(request, _typed(problem, version, percent, reason, guard), status=problem.status)
    alias = request.match_info["alias"]
    return redirect(request, _here(request), f"{percent} % of the users of {alias} get @{version} now.")


@page(Permission.WRITE)
async def promote_canary(request: web.Request) -> web.StreamResponse:
    """The field ``version`` takes the whole of the alias."""
    form, alias = await read_form(request), request.match_info["alias"]
    done = f"{request.match_info['adapter']}@{alias} is version {form.get('version', '')} for everybody now."
    return await _end(request, form.get("version", ""), "canary promoted", done)


@page(Permission.WRITE)
async def abort_canary(request: web.Request) -> web.StreamResponse:
    """The field ``version`` is the alias's own, which everybody gets again."""
    form, alias = await read_form(request), request.match_info["alias"]
    return await _end(request, form.get("version", ""), "canary aborted", f"All users of {alias} get its own version.")


async def _end(request: web.Request, version: str, why: str, done: str) -> web.StreamResponse:
    form = await read_form(request)
    try:
        await _move(request, version, form.get("etag", ""), form.get("reason", "").strip() or why, None)
    except ApiError as error:
        problem = shown_beside_form(error)
        return await _page(request, _typed(problem), status=problem.status)
    return redirect(request, f"{adapter_path(request)}/aliases", done)


def _typed(
    problem: ApiError, version: str = "", percent: str = "", reason: str = "", guard: guards.Fields | None = None
) -> Typed:
    failed = problem if isinstance(problem, SmokeFailedError) else None
    moved = problem.code == "alias_moved"
    return Typed(version, percent, reason, guard, {} if moved or failed else errors_of(problem), moved, failed)


async def _move(
    request: web.Request, version: str, etag: str, reason: str, canary: Mapping[str, Any] | None
) -> AliasView:
    parts, tenant = request.match_info, tenant_of(request).name
    body = {"version": version, "canary": canary, "expected_etag": etag, "reason": reason}
    view: AliasView = await ask(
        request, move_alias, tenant=tenant, body=body, adapter=parts["adapter"], alias=parts["alias"]
    )
    return view


def _here(request: web.Request) -> str:
    """Only after an operation has accepted the alias in the path."""
    return f"{adapter_path(request)}/aliases/{request.match_info['alias']}/canary"


async def _alias(request: web.Request) -> tuple[AdapterView, AliasView]:
    """Raises :class:`NotFoundError`."""
    adapter = await find_adapter(request)
    for one in adapter.aliases:
        if one.alias == request.match_info["alias"] and adapter.deleted_at is None:
            return adapter, one
    raise NotFoundError("alias: does not exist", param="alias")


@dataclass(frozen=True, slots=True)
class Figures:
    """Both versions over a span."""

    span: str
    stable: int
    canary: int
    rows: list[Any]
    few: bool
    """Too few requests of the canary to judge by."""
    report: CanaryReport
    charts: list[Chart]
    at: datetime


async def _figures(request: web.Request, adapter: AdapterView, alias: AliasView) -> Figures | None:
    """None without a canary."""
    if alias.canary is None:
        return None
    span = request.query.get("range", DEFAULT_SPAN)
    span = span if span in SPANS else DEFAULT_SPAN
    numbers, start = (alias.version, alias.canary.version), datetime.now(UTC) - SPANS[span]
    query = {"version": numbers[0], "other": numbers[1], "start": start}
    both: ComparisonView = await ask(
        request, compare_versions, tenant=tenant_of(request).name, adapter=adapter.name, query=query
    )
    series = await asyncio.gather(*(series_of(request, adapter.name, one, SPANS[span], POINTS) for one in numbers))
    few = both.other_total.requests < FEW_REQUESTS
    rows = compare(both.total, both.other_total)
    report: CanaryReport = await ask(
        request, get_canary, tenant=tenant_of(request).name, adapter=adapter.name, alias=alias.alias
    )
    return Figures(span, *numbers, rows, few, report, _charts(alias.alias, numbers, series), datetime.now(UTC))


def _charts(alias: str, numbers: tuple[int, int], series: list[SeriesView]) -> list[Chart]:
    labels = (f"@{numbers[0]} {alias}", f"@{numbers[1]} canary")
    colors = (8, 1)

    def both(id_: str, title: str, read: Any, **options: Any) -> Chart:
        lines = [(label, read(one.lines), color) for label, one, color in zip(labels, series, colors, strict=True)]
        return chart(id_, title, series[0], lines, **options)

    return [
        both("c-first", "First token, p99", lambda lines: lines.ttft_ms.p99, unit="ms"),
        both("c-errors", "Errors", _error_shares, unit="%"),
        both("c-tokens", "Answer tokens per second", lambda lines: lines.completion_tokens_per_s, unit="tok/s"),
    ]


def _error_shares(lines: Any) -> list[float | None]:
    return [
        round(100 * failures / requests, 2) if requests else None
        for failures, requests in zip(lines.failures, lines.requests, strict=True)
    ]


def _windows(guard: CanaryGuardView | None) -> list[int]:
    """Those offered, and the one that is set."""
    return sorted({*guards.WINDOWS_S, *([] if guard is None else [guard.window_s])})


async def _page(request: web.Request, typed: Typed, status: int = 200) -> web.StreamResponse:
    adapter, alias = await _alias(request)
    suite: SmokeSuiteView = await ask(request, get_smoke_prompts, tenant=tenant_of(request).name, adapter=adapter.name)
    others = [one.number for one in live(adapter) if one.number != alias.version]
    guard = alias.canary.guard if alias.canary is not None else guards.PROPOSED
    return show(
        request,
        "adapters/canary.html",
        adapter,
        "aliases",
        title=f"Canary of {adapter.name}@{alias.alias}",
        status=status,
        alias=alias,
        state=await alias_state(request, alias),
        suite=suite,
        others=others,
        typed=typed,
        version=typed.version or str(alias.canary.version if alias.canary else others[0] if others else ""),
        percent=typed.percent or str(alias.canary.percent if alias.canary else DEFAULT_PERCENT),
        steps=STEPS,
        guard=typed.guard or guards.fields_of(guard),
        guard_errors=guards.problems_of(typed.errors),
        windows=[(str(seconds), guards.window(seconds)) for seconds in _windows(guard)],
        guards=guards,
        spans=list(SPANS),
        figures=await _figures(request, adapter, alias),
        few_requests=FEW_REQUESTS,
    )


ROUTES = (
    web.get(CANARY, show_canary),
    web.get(f"{CANARY}/figures", show_figures),
    web.post(CANARY, set_canary),
    web.post(f"{CANARY}/promote", promote_canary),
    web.post(f"{CANARY}/abort", abort_canary),
)
