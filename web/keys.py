"""A tenant's API keys: make, rotate, revoke. A secret is in the answer to the form that made it, and nowhere else."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from stencilpress.gateway.access import SCOPE_ROUTES, Permission
from stencilpress.gateway.api.admin import keys
from stencilpress.gateway.api.admin.operation import Page
from stencilpress.gateway.api.admin.views import IssuedKeyView, KeyView, NewKey, Rotation
from stencilpress.gateway.errors import ApiError
from stencilpress.web.ask import ask
from stencilpress.web.console import PREFIX, of_tenant
from stencilpress.web.forms import FormError, Shown, errors_of, read_form, shown_again, to_struct
from stencilpress.web.page import page, redirect, render, tenant_of
from stencilpress.web.visitor import may_of

LIST = f"{PREFIX}/t/{{tenant}}/keys"
OVERLAPS = (
    (0, "None: the old secret ends now"),
    (3600, "An hour"),
    (86_400, "A day"),
    (7 * 86_400, "A week"),
    (30 * 86_400, "30 days"),
)


@page(Permission.READ)
async def list_keys(request: web.Request) -> web.StreamResponse:
    return await _list(request)


@page(Permission.WRITE)
async def create_key(request: web.Request) -> web.StreamResponse:
    form = await read_form(request)
    try:
        body = to_struct(form, NewKey, expires_at=_instant(form.get("expires_at", "")))
        issued: IssuedKeyView = await ask(request, keys.create_key, tenant=tenant_of(request).name, body=body)
    except ApiError as error:
        return await _list(request, error=error, form=Shown(shown_again(form), routes=form.getall("routes", [])))
    return await _list(request, issued=issued)


@page(Permission.WRITE)
async def rotate_key(request: web.Request) -> web.StreamResponse:
    body, key = to_struct(await read_form(request), Rotation), request.match_info["key"]
    issued: IssuedKeyView = await ask(request, keys.rotate_key, tenant=tenant_of(request).name, key=key, body=body)
    return await _list(request, issued=issued, rotated=True)


@page(Permission.WRITE)
async def revoke_key(request: web.Request) -> web.StreamResponse:
    name = tenant_of(request).name
    gone: KeyView = await ask(request, keys.revoke_key, tenant=name, key=request.match_info["key"])
    return redirect(request, of_tenant(LIST, name), f"{gone.label or gone.id} has been revoked.")


async def _list(
    request: web.Request,
    *,
    issued: IssuedKeyView | None = None,
    rotated: bool = False,
    error: ApiError | None = None,
    form: Shown | None = None,
) -> web.Response:
    tenant = tenant_of(request)
    query: dict[str, Any] = {"after": request.query["after"]} if request.query.get("after") else {}
    found: Page[KeyView] = await ask(request, keys.list_keys, tenant=tenant.name, query=query)
    return render(
        request,
        "tenants/keys.html",
        title="Keys",
        section="keys",
        tenant=tenant.name,
        status=200 if error is None else error.status,
        keys=found.data,
        next=None if found.next is None else "?" + urlencode({"after": found.next}),
        issued=issued,
        rotated=rotated,
        now=datetime.now(UTC),
        roles=[role.value for role in may_of(request).grant],
        routes=SCOPE_ROUTES,
        overlaps=OVERLAPS,
        form=form or Shown(routes=[]),
        errors=errors_of(error),
    )


def _instant(text: str) -> datetime | None:
    """A time of a form, which is in UTC. Raises :class:`FormError`."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC) if text else None
    except ValueError:
        raise FormError({"expires_at": "is not a date and time"}) from None


ROUTES = (
    web.get(LIST, list_keys),
    web.post(LIST, create_key),
    web.post(f"{LIST}/{{key}}/rotate", rotate_key),
    web.post(f"{LIST}/{{key}}/revoke", revoke_key),
)
