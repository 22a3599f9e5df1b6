"""Engines: their numbers, who holds which page, and which adapters are where."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from stencilpress.engine.messages import unpack_tokens
from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.engine_views import (
    EngineSeriesView,
    EnginesView,
    EngineView,
    PagesView,
    ResidenciesView,
    ResidencyView,
    Tier,
    named,
    owner_view,
    pages_version,
)
from stencilpress.gateway.api.admin.operation import Call, PageQuery, decode_cursor, encode_cursor, operation
from stencilpress.gateway.api.admin.series import DEFAULT_SPAN, End, Points, Start
from stencilpress.gateway.api.admin.tables import Format
from stencilpress.gateway.catalog.digests import Owner
from stencilpress.gateway.catalog.engine_samples import engine_series
from stencilpress.gateway.catalog.series import choose_axis, span
from stencilpress.gateway.engine_reader import Seen
from stencilpress.gateway.errors import EngineLostError, NotFoundError
from stencilpress.gateway.sampling import server_name
from stencilpress.gateway.usage.engine_sums import EngineSum

_NUMBER = re.compile(r"[1-9][0-9]{0,3}")


class PagesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    since: Annotated[str, Meta(max_length=32, description="`version` of the picture at hand.")] = ""


class EngineSeriesQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    start: Start = None
    end: End = None
    points: Points = 300


class ResidencyQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    adapter: Annotated[str, Meta(max_length=64, description="Only adapters whose names begin so.")] = ""
    tier: Annotated[Tier | None, Meta(description="Only those that are there.")] = None
    format: Annotated[Format, Meta(description="`csv` for a file; so does `Accept: text/csv`.")] = "json"


@operation("GET", "/engines", Permission.OPERATE)
async def list_engines(call: Call) -> EnginesView:
    """Every engine of this server: its numbers now, how long ago it answered, what it can take."""
    return EnginesView([EngineView.of(one) for one in await call.services.view.stats()])


@operation("GET", "/engines/{engine}/pages", Permission.OPERATE)
async def get_pages(call: Call, query: PagesQuery) -> PagesView:
    """Who holds which page of an engine's pool, at most two seconds old."""
    view, number = call.services.view, engine_of(call)
    pages = await view.pages(number)
    if pages is None:
        raise EngineLostError("The engine does not answer; try again shortly.")
    version = pages_version(pages)
    if query.since == version:
        return PagesView(engine=number, version=version, total=pages.total, owners=None, runs=None)
    seen = {one.adapter.digest: one.adapter for one in await view.adapters() if one.engine == number}
    names = await view.owners({one.name for one in pages.owners if one.kind == "adapter"})
    tenants = await view.tenants({int(one.name) for one in pages.owners if one.kind == "kv"})
    return PagesView(
        engine=number,
        version=version,
        total=pages.total,
        owners=[owner_view(one, tenants, names, seen) for one in pages.owners],
        runs=unpack_tokens(pages.runs),
    )


@operation("GET", "/engines/{engine}/series", Permission.OPERATE)
async def get_engine_series(call: Call, query: EngineSeriesQuery) -> EngineSeriesView:
    """What an engine did over time, or all engines of this server together (`all`).

    It is added up from samples of every few seconds.
    """
    db, number = call.services.db, None if call.path("engine") == "all" else engine_of(call)
    axis = choose_axis(*span(query.start, query.end, DEFAULT_SPAN), points=query.points)
    engines = await engine_series(db, axis, server_name(call.services.settings), number)
    found = list(engines.values()) or [[EngineSum()] * axis.count]
    return await asyncio.to_thread(EngineSeriesView.of, axis, found)


@operation("GET", "/residency", Permission.OPERATE, table=ResidenciesView.table)
async def list_residency(call: Call, query: ResidencyQuery) -> ResidenciesView:
    """Which adapters of all tenants are where, with their hits, misses and loads; the one used last first.

    What an engine has not seen since its start is on disk, and not listed.
    """
    view = call.services.view
    seen = await view.adapters()
    names = await view.owners({one.adapter.digest for one in seen})
    return _page(query, ((one, named(names[one.adapter.digest], one.adapter.tenant)) for one in seen))


@operation("GET", "/tenants/{tenant}/residency", Permission.READ, table=ResidenciesView.table)
async def list_tenant_residency(call: Call, query: ResidencyQuery) -> ResidenciesView:
    """Which adapters of a tenant, and those shared with it, are where; the one used last first.

    What an engine has not seen since its start is on disk, and not listed.
    """
    view, mine = call.services.view, call.tenant.id
    seen = await view.adapters()
    names = await view.owners({one.adapter.digest for one in seen})
    rows = []
    for one in seen:
        owner = named([owner for owner in names[one.adapter.digest] if mine in (owner.tenant_id, *owner.guests)], mine)
        if owner is not None:
            rows.append((one, owner._replace(tenant=call.tenant.name)))
    return _page(query, rows)


def _page(query: ResidencyQuery, rows: Iterable[tuple[Seen, Owner | None]]) -> ResidenciesView:
    after = max(decode_cursor(query.after, int) or 0, 0)
    found = [
        (one, owner)
        for one, owner in rows
        if (query.tier is None or one.adapter.tier == query.tier)
        and (owner.adapter if owner is not None else "").startswith(query.adapter)
    ]
    shown = [ResidencyView.of(one, owner) for one, owner in found[after : after + query.limit]]
    more = len(found) > after + query.limit
    return ResidenciesView(shown, encode_cursor(after + query.limit) if more else None)


def engine_of(call: Call) -> int:
    """The engine of the path. Raises :class:`NotFoundError`."""
    text = call.path("engine")
    if not _NUMBER.fullmatch(text) or int(text) > len(call.services.engine.open_requests):
        raise NotFoundError(f"engine: {text[:64]!r} does not exist", param="engine")
    return int(text)


OPERATIONS = (list_engines, get_pages, get_engine_series, list_residency, list_tenant_residency)
