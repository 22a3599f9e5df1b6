"""Signing in with a password, and signing out."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Actor
from stencilpress.gateway.accounts.sign_in import SignInError, sign_in
from stencilpress.gateway.catalog.sessions import end_session
from stencilpress.gateway.catalog.users import User
from stencilpress.gateway.errors import ApiError, OverloadedError, RateLimitError
from stencilpress.gateway.middleware import REQUEST_ID
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import CONSOLE, PREFIX
from stencilpress.web.forms import read_form
from stencilpress.web.page import SIGN_IN, redirect, render, safe_next
from stencilpress.web.visitor import (
    actor_of,
    address_of,
    drop_cookie,
    find_visitor,
    printable,
    set_cookie,
    signed_in,
)


async def show_sign_in(request: web.Request) -> web.StreamResponse:
    back = safe_next(request.query.get("next", ""))
    if find_visitor(request) is not None:
        return redirect(request, back)
    return show_form(request, back)


async def submit_sign_in(request: web.Request) -> web.StreamResponse:
    form, services = await read_form(request), request.app[SERVICES]
    email, back = printable(form.get("email", "")), safe_next(form.get("next", ""))
    try:
        user = await sign_in(
            services.db, request.app[CONSOLE].passwords, email, form.get("password", ""), address_of(request)
        )
    except (SignInError, RateLimitError, OverloadedError) as error:
        return show_form(request, back, email, error)
    return await welcome(request, user, back)


async def welcome(request: web.Request, user: User, location: str) -> web.Response:
    """Sign a user in, with a new session; one that the browser had ends."""
    services = request.app[SERVICES]
    before = signed_in(request)
    if before is not None:
        await end_session(services.db, before.user, before.session.public_id, actor=actor_of(request))
    actor = Actor(
        f"user:{user.email}", user.role, user.tenant_id, source=address_of(request), request_id=request[REQUEST_ID]
    )
    agent = printable(request.headers.get("User-Agent", ""))
    token = await request.app[CONSOLE].sessions.start(user, address_of(request), agent, actor=actor)
    response = redirect(request, location)
    set_cookie(request, response, "session", token)
    return response


async def sign_out(request: web.Request) -> web.StreamResponse:
    known = signed_in(request)
    response = redirect(request, SIGN_IN)
    if known is not None:
        services = request.app[SERVICES]
        await end_session(services.db, known.user, known.session.public_id, actor=actor_of(request))
        await services.changes.poll()
    drop_cookie(request, response, "session")
    return response


def show_form(request: web.Request, back: str, email: str = "", error: ApiError | None = None) -> web.Response:
    """The sign-in page, after an attempt with what went wrong."""
    response = render(
        request,
        "accounts/sign_in.html",
        title="Sign in",
        next="" if back == f"{PREFIX}/" else back,
        email=email[:254],
        provider=request.app[CONSOLE].provider is not None,
        error="" if error is None else error.message,
        status=200 if error is None else error.status,
    )
    if error is not None and "Retry-After" in error.headers:
        response.headers["Retry-After"] = error.headers["Retry-After"]
    return response


ROUTES = (
    web.get(SIGN_IN, show_sign_in),
    web.post(SIGN_IN, submit_sign_in),
    web.post(f"{PREFIX}/sign-out", sign_out),
)
