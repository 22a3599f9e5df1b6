"""What every page does: who may see it, of which tenant, and how it is rendered; and the pages of errors."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from aiohttp import web

from stencilpress.gateway.access import Permission, Role, check_permission
from stencilpress.gateway.api.admin.dispatch import NOT_FOUND, find_tenant
from stencilpress.gateway.catalog.records import Tenant
from stencilpress.gateway.errors import ApiError, NotFoundError
from stencilpress.gateway.middleware import REQUEST_ID
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import CONSOLE, PREFIX
from stencilpress.web.csrf import SAFE
from stencilpress.web.firing import FIRING
from stencilpress.web.flash import Kind, flash, take_flashes
from stencilpress.web.nav import menu
from stencilpress.web.visitor import csrf_token, find_visitor, may_of, principal_of, visitor_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SIGN_IN = f"{PREFIX}/sign-in"
MAX_NEXT_CHARS = 500
TITLES = {
    403: "Not allowed",
    404: "Not found",
    405: "Not possible here",
    409: "Conflict",
    413: "Too large",
    422: "Not accepted",
    429: "Too many requests",
    500: "Something went wrong",
    503: "Not available now",
}
_TENANT = web.RequestKey("page_tenant", Tenant)


def page(needs: Permission, *, deleted: bool = False) -> Callable[[Handler], Handler]:
    """For people who are signed in and may ``needs``. A path with ``{tenant}`` is for those who may know of it.

    ``deleted`` shows an operator tenants that are deleted, too.
    A page that has no tenant and needs :attr:`Permission.READ` alone is for everybody who is signed in.
    """

    def wrap(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def checked(request: web.Request) -> web.StreamResponse:
            visitor = visitor_of(request)
            if "tenant" in request.match_info:
                request[_TENANT] = await find_tenant(
                    request.app[SERVICES],
                    principal_of(request),
                    request.match_info["tenant"],
                    Permission.OPERATE if deleted else needs,
                )
            check_permission(visitor.role, needs)
            if request.method not in SAFE:
                request.app[SERVICES].change_limit.admit(visitor.tenant_id, visitor.role)
            return await handler(request)

        return checked

    return wrap


def tenant_of(request: web.Request) -> Tenant:
    """The tenant of a page's path, which the visitor may know of."""
    return request[_TENANT]


def render(
    request: web.Request,
    template: str,
    *,
    title: str,
    section: str = "",
    tenant: str | None = None,
    status: int = 200,
    **context: Any,
) -> web.Response:
    """A page. ``section`` is the menu's entry for it and ``tenant`` the name of the tenant that it is about."""
    console, visitor = request.app[CONSOLE], find_visitor(request)
    common = {
        "title": title,
        "section": section,
        "tenant": tenant,
        "visitor": visitor,
        "may": may_of(request),
        "csrf": csrf_token(request),
        "flashes": take_flashes(request),
        "nav": menu(visitor, section, tenant, console.paths, request.app[FIRING].counts()),
        "static_url": console.static.url,
    }
    text = console.templates.get_template(template).render({**context, **common})
    return web.Response(status=status, text=text, content_type="text/html", charset="utf-8")


def fragment(request: web.Request, template: str, **context: Any) -> web.Response:
    """A part of a page, for the script that puts it there."""
    text = request.app[CONSOLE].templates.get_template(template).render(context)
    return web.Response(text=text, content_type="text/html", charset="utf-8")


def redirect(request: web.Request, location: str, text: str = "", kind: Kind = "ok") -> web.Response:
    """Go to another page of ours after a form, which may show ``text``."""
    if text:
        flash(request, kind, text)
    return web.Response(status=303, headers={"Location": location})


def error_page(request: web.Request, error: ApiError) -> web.Response:
    """What is another's and what does not exist look the same."""
    text = NOT_FOUND if isinstance(error, NotFoundError) else error.message
    title = TITLES.get(error.status, "Not accepted" if error.status < 500 else TITLES[500])
    visitor = find_visitor(request)
    response = render(
        request,
        "error.html",
        title=title,
        status=error.status,
        text=text,
        tenant=None if visitor is None or visitor.role is Role.OPERATOR else visitor.tenant,
        request_id=request.get(REQUEST_ID, "") if error.status >= 500 else "",
    )
    response.headers.update({name: value for name, value in error.headers.items() if name == "Retry-After"})
    return response


def to_sign_in(request: web.Request) -> web.Response:
    """A page that needs a user leads to the sign-in and back."""
    back = request.path_qs if request.method == "GET" else ""
    query = f"?next={quote(back, safe='')}" if back not in ("", PREFIX, f"{PREFIX}/") else ""
    return web.Response(status=303, headers={"Location": SIGN_IN + query})


def safe_next(text: str) -> str:
    """Where to go after signing in: a page of the console, or its start. Nothing leads to another site."""
    inside = text.startswith(f"{PREFIX}/") and text.isascii() and text.isprintable() and "\\" not in text
    if not inside or "//" in text.partition("?")[0] or ".." in text or len(text) > MAX_NEXT_CHARS:
        return f"{PREFIX}/"
    return text
