"""One's own account: the password, and where one is signed in."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.access import Permission
from stencilpress.gateway.accounts.passwords import check_password
from stencilpress.gateway.accounts.sign_in import confirm_password
from stencilpress.gateway.catalog.sessions import end_other_sessions, end_session, list_sessions
from stencilpress.gateway.catalog.users import set_password
from stencilpress.gateway.errors import ApiError, InvalidRequestError
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import CONSOLE, PREFIX
from stencilpress.web.forms import errors_of, read_form
from stencilpress.web.page import page, redirect, render
from stencilpress.web.visitor import SignedOutError, actor_of, address_of, signed_in, visitor_of

PATH = f"{PREFIX}/account"
BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
"""Marks in a User-Agent; most browsers carry the marks of others too, so the first one found counts."""
SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("iPad", "iPad"),
    ("Windows", "Windows"),
    ("Mac OS X", "macOS"),
    ("CrOS", "ChromeOS"),
    ("Linux", "Linux"),
)


@page(Permission.READ)
async def show_account(request: web.Request) -> web.StreamResponse:
    return await _account(request)


@page(Permission.READ)
async def change_password(request: web.Request) -> web.StreamResponse:
    known = signed_in(request)
    if known is None:
        raise SignedOutError
    form, services, passwords = await read_form(request), request.app[SERVICES], request.app[CONSOLE].passwords
    try:
        if known.user.has_password:
            await confirm_password(services.db, passwords, known.user, form.get("current", ""), address_of(request))
        wanted = check_password(form.get("password", ""), known.user.email)
        if form.get("repeated", "") != form.get("password", ""):
            raise InvalidRequestError("repeated: differs from the new password", param="repeated")
    except InvalidRequestError as error:
        return await _account(request, error)
    kept = await passwords.hash(wanted)
    await set_password(
        services.db, known.user.public_id, kept, keep_session=known.session.public_id, actor=actor_of(request)
    )
    await services.changes.poll()
    return redirect(request, PATH, "The password has been changed, and your other sessions have ended.")


@page(Permission.READ)
async def end_sessions(request: web.Request) -> web.StreamResponse:
    """One session by the form's ``session``, or all others without it."""
    known = signed_in(request)
    if known is None:
        raise SignedOutError
    services, wanted = request.app[SERVICES], (await read_form(request)).get("session", "")
    if wanted:
        await end_session(services.db, known.user, wanted, actor=actor_of(request))
    else:
        await end_other_sessions(services.db, known.user, known.session.public_id, actor=actor_of(request))
    await services.changes.poll()
    return redirect(request, PATH, "The session has ended." if wanted else "All other sessions have ended.")


async def _account(request: web.Request, error: ApiError | None = None) -> web.Response:
    visitor, known = visitor_of(request), signed_in(request)
    sessions = await list_sessions(request.app[SERVICES].db, visitor.user_id)
    return render(
        request,
        "accounts/account.html",
        title="Account",
        section="account",
        status=200 if error is None else error.status,
        user=None if known is None else known.user,
        sessions=sessions,
        browsers={one.public_id: browser_name(one.user_agent) for one in sessions},
        errors=errors_of(error),
    )


def browser_name(user_agent: str) -> str:
    """What people call a browser, as far as it says so: "Firefox on Linux"."""
    browser = next((name for mark, name in BROWSERS if mark in user_agent), "Another browser")
    system = next((name for mark, name in SYSTEMS if mark in user_agent), "")
    return f"{browser} on {system}" if system else browser


ROUTES = (
    web.get(PATH, show_account),
    web.post(f"{PATH}/password", change_password),
    web.post(f"{PATH}/sessions/end", end_sessions),
)
