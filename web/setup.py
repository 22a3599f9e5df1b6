"""Links that work once: the first user, an invitation, a new password. Looking at one does not use it up."""

from __future__ import annotations

from aiohttp import web

from stencilpress.gateway.accounts.links import SETUP_PATH, find_link, use_link
from stencilpress.gateway.catalog.sessions import Link
from stencilpress.gateway.errors import ApiError, ConflictError, InvalidRequestError
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import CONSOLE
from stencilpress.web.forms import errors_of, read_form
from stencilpress.web.page import SIGN_IN, redirect, render
from stencilpress.web.visitor import address_of

TITLES = {"setup": "Set up the console", "invitation": "Welcome", "reset": "Choose a new password"}


async def show_link(request: web.Request) -> web.StreamResponse:
    link = await find_link(request.app[SERVICES].db, request.match_info["token"])
    return _form(request, link)


async def submit_link(request: web.Request) -> web.StreamResponse:
    services, token, form = request.app[SERVICES], request.match_info["token"], await read_form(request)
    link = await find_link(services.db, token)
    email, password = form.get("email", ""), form.get("password", "")
    try:
        if form.get("repeated", "") != password:
            raise InvalidRequestError("repeated: differs from the password", param="repeated")
        await use_link(services.db, request.app[CONSOLE].passwords, token, password, email, source=address_of(request))
    except (InvalidRequestError, ConflictError) as error:
        return _form(request, link, email, error)
    await services.changes.poll()
    return redirect(request, SIGN_IN, "The password is set: sign in with it.")


def _form(request: web.Request, link: Link, email: str = "", error: ApiError | None = None) -> web.Response:
    return render(
        request,
        "accounts/link.html",
        title=TITLES[link.kind],
        status=200 if error is None else error.status,
        link=link,
        email=email[:254],
        errors=errors_of(error),
    )


ROUTES = (web.get(SETUP_PATH + "{token}", show_link), web.post(SETUP_PATH + "{token}", submit_link))
