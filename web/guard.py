"""Around every request below ``/console``: who is there, did the page send it, and what an error looks like."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from stencilpress.gateway.errors import ApiError
from stencilpress.gateway.middleware import to_api_error
from stencilpress.web.console import API_PREFIX
from stencilpress.web.csrf import FIELD, HEADER, SAFE, check_origin, check_token
from stencilpress.web.flash import store_flashes
from stencilpress.web.forms import URLENCODED, read_form
from stencilpress.web.headers import is_console
from stencilpress.web.page import error_page, to_sign_in
from stencilpress.web.static import ROOT as STATIC
from stencilpress.web.visitor import SignedOutError, csrf_token, keep_visit, recognise


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not is_console(request.path) or request.path.startswith(f"{STATIC}/"):
        return await handler(request)
    response = await _answered(request, handler)
    if not response.prepared:
        keep_visit(request, response)
        store_flashes(request, response)
    return response


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        await recognise(request)
        if request.method not in SAFE:
            check_origin(request)
            check_token(csrf_token(request), await _given_token(request))
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:
        if is_api(request):
            raise  # answered as the admin API answers
        return _error_response(request, to_api_error(error, request))


def is_api(request: web.Request) -> bool:
    """Whether a script asks, and not a browser for a page."""
    return request.path.startswith(f"{API_PREFIX}/") or request.headers.get("Upgrade", "").lower() == "websocket"


def _error_response(request: web.Request, error: ApiError) -> web.StreamResponse:
    if isinstance(error, SignedOutError):
        return to_sign_in(request)
    return error_page(request, error)


async def _given_token(request: web.Request) -> str:
    given = request.headers.get(HEADER)
    if given is not None or is_api(request) or request.content_type != URLENCODED:
        return given or ""
    return (await read_form(request)).get(FIELD, "")
