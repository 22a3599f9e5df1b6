"""Lists of adapters, of one tenant or of all: found by name, in the order of a name, an age or a number."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, cast, get_args
from urllib.parse import urlencode

import msgspec
from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.operation import decode_cursor, encode_cursor
from stencilpress.gateway.catalog.adapter_lists import Listed, Position, list_all_adapters, list_named
from stencilpress.gateway.catalog.records import Canary
from stencilpress.gateway.catalog.series import activity_of_names, choose_axis
from stencilpress.gateway.catalog.serving import Serving, serving_versions
from stencilpress.gateway.catalog.tops import By, top_adapters, top_span
from stencilpress.gateway.services import SERVICES
from stencilpress.web.adapters import words
from stencilpress.web.adapters.figures import STEPS, Place, Used, places_of, used_of
from stencilpress.web.adapters.frame import LIST, SECTION, home_of
from stencilpress.web.adapters.uploads import upload_command
from stencilpress.web.console import PREFIX
from stencilpress.web.page import page, render, tenant_of

ALL = f"{PREFIX}/adapters"
PAGE = 50
MAX_DIGESTS = 50
SPAN = timedelta(days=1)
Order = Literal["name", "newest", "tokens", "failures", "hit_rate", "ttft_p99"]
ORDERS: dict[Order, str] = {
    "name": "by name",
    "newest": "newest first",
    "tokens": "busiest first",
    "failures": "most errors first",
    "hit_rate": "lowest hit rate first",
    "ttft_p99": "slowest first token first",
}
_BY_NUMBER: frozenset[str] = frozenset(get_args(By))


@dataclass(frozen=True, slots=True)
class Row:
    """One adapter of a list. ``number`` is what prod serves, else None and the newest version is shown."""

    tenant: str
    name: str
    href: str
    deleted_at: datetime | None
    versions: int
    number: int | None
    canary: Canary | None
    digest: str | None
    ranks: Sequence[int]
    modules: Sequence[str]
    size_bytes: int
    used: Used | None


@dataclass(frozen=True, slots=True)
class Wish:
    """What the query asks for."""

    name: str
    order: Order
    deleted: bool
    after: str

    @classmethod
    def of(cls, request: web.Request) -> Wish:
        order = request.query.get("sort", "name")
        return cls(
            name=request.query.get("q", "").strip()[:64],
            order=order if order in ORDERS else "name",
            deleted=request.query.get("deleted") == "1",
            after=request.query.get("after", ""),
        )

    def href(self, path: str, **changes: str) -> str:
        """The list with something changed, from its beginning."""
        wanted = {"q": self.name, "sort": self.order if self.order != "name" else "", "deleted": "1" * self.deleted}
        query = urlencode({key: value for key, value in {**wanted, **changes}.items() if value})
        return f"{path}?{query}" if query else path


@page(Permission.READ)
async def show_list(request: web.Request) -> web.StreamResponse:
    tenant = tenant_of(request)
    return await _page(request, tenant.name, tenant.id)


@page(Permission.OPERATE)
async def show_all(request: web.Request) -> web.StreamResponse:
    return await _page(request, None, None)


@page(Permission.READ)
async def tell_tiers(request: web.Request) -> web.StreamResponse:
    """JSON for tiers.js: where the versions with ``?digests=`` are now; those on disk are left out."""
    return await _tiers(request, tenant_of(request).id)


@page(Permission.OPERATE)
async def tell_all_tiers(request: web.Request) -> web.StreamResponse:
    return await _tiers(request, None)


async def _tiers(request: web.Request, tenant_id: int | None) -> web.StreamResponse:
    digests = request.query.get("digests", "").split(",")[:MAX_DIGESTS]
    owners = await request.app[SERVICES].view.owners(digests)
    mine = [
        digest
        for digest, found in owners.items()
        if any(tenant_id in (None, owner.tenant_id) or tenant_id in owner.guests for owner in found)
    ]
    return web.Response(body=msgspec.json.encode(await places_of(request, mine)), content_type="application/json")


async def _page(request: web.Request, tenant: str | None, tenant_id: int | None) -> web.StreamResponse:
    wish = Wish.of(request)
    path = ALL if tenant is None else f"{home_of(tenant)}/adapters"
    found, after = await _found(request, wish, tenant_id)
    rows = await _rows(request, found)
    return render(
        request,
        "adapters/list.html",
        title="Adapters",
        section=SECTION,
        tenant=tenant,
        rows=rows,
        seen=await places_of(request, [row.digest for row in rows if row.digest]) if rows else dict[str, Place](),
        wish=wish,
        orders=ORDERS,
        path=path,
        home="" if tenant is None else home_of(tenant),
        next=wish.href(path, after=after) if after else None,
        toggle=wish.href(path, deleted="" if wish.deleted else "1"),
        by_number=wish.order in _BY_NUMBER,
        command="" if tenant is None else upload_command(request, tenant, "NAME"),
        w=words,
    )


async def _found(request: web.Request, wish: Wish, tenant_id: int | None) -> tuple[Sequence[Listed], str]:
    """One page of adapters, and where the next one begins, "" at the end."""
    db = request.app[SERVICES].db
    if wish.order in _BY_NUMBER:
        now = datetime.now(UTC)
        tops = await top_adapters(db, top_span(now - SPAN, now), cast("By", wish.order), PAGE, tenant_id)
        names = [(top.tenant, top.adapter) for top in tops if top.adapter and top.adapter.startswith(wish.name)]
        return await list_named(db, names), ""
    listed = await list_all_adapters(
        db,
        name=wish.name,
        sort="newest" if wish.order == "newest" else "name" if tenant_id is not None else "tenant",
        deleted=wish.deleted,
        after=decode_cursor(wish.after, cast("type[Position]", tuple[str, str, int])),
        limit=PAGE + 1,
        tenant_id=tenant_id,
    )
    more = len(listed) > PAGE
    return listed[:PAGE], encode_cursor(listed[PAGE - 1].position) if more else ""


async def _rows(request: web.Request, found: Sequence[Listed]) -> list[Row]:
    db = request.app[SERVICES].db
    serving = await serving_versions(db, [one.id for one in found])
    now = datetime.now(UTC)
    axis = choose_axis(now - SPAN, now, points=STEPS)
    activities = await activity_of_names(db, [(one.tenant_id, one.name) for one in found], axis)
    used = await asyncio.to_thread(used_of, activities)
    return [_row(one, serving.get(one.id), used.get((one.tenant_id, one.name))) for one in found]


def _row(one: Listed, serving: Serving | None, used: Used | None) -> Row:
    shown = one if serving is None else serving
    return Row(
        tenant=one.tenant,
        name=one.name,
        href=f"{home_of(one.tenant)}/adapters/{one.name}",
        deleted_at=one.deleted_at,
        versions=one.versions,
        number=None if serving is None else serving.number,
        canary=None if serving is None else serving.canary,
        digest=shown.digest,
        ranks=shown.ranks,
        modules=shown.target_modules,
        size_bytes=shown.size_bytes,
        used=used,
    )


ROUTES = (
    web.get(ALL, show_all),
    web.get(LIST, show_list),
    web.get(f"{PREFIX}/tiers", tell_all_tiers),
    web.get(f"{PREFIX}/t/{{tenant}}/tiers", tell_tiers),
)
