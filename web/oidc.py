"""Signing in through an identity provider: to it, and back from it.

What must be the same at both ends (state, nonce, PKCE's verifier) is derived from the cookie that binds a browser's
forms and from a random state in a cookie of its own, so no gateway keeps anything meanwhile.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
from urllib.parse import quote, unquote

from aiohttp import web

from stencilpress.gateway.accounts.oidc import IdentityError, Provider, account_of
from stencilpress.gateway.accounts.sign_in import admit_identity, forgive_identity
from stencilpress.gateway.accounts.tokens import is_token, new_token
from stencilpress.gateway.errors import RateLimitError, UnavailableError
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import CONSOLE
from stencilpress.web.page import SIGN_IN, safe_next
from stencilpress.web.place import public_url
from stencilpress.web.signin import show_form, welcome
from stencilpress.web.visitor import address_of, cookie_name, csrf_token, drop_cookie, set_cookie

START = f"{SIGN_IN}/oidc"
BACK = f"{START}/callback"
MINUTES = 10
"""How long a person may take at the provider."""

logger = logging.getLogger(__name__)


async def start(request: web.Request) -> web.StreamResponse:
    provider, state = _provider(request), new_token()
    back = safe_next(request.query.get("next", ""))
    try:
        url = await provider.sign_in_url(
            public_url(request) + BACK, state, _derived(request, state, "nonce"), _derived(request, state, "verifier")
        )
    except (UnavailableError, IdentityError) as error:
        return show_form(request, back, error=error)
    response = web.Response(status=303, headers={"Location": url})
    set_cookie(request, response, "oidc", f"{state}.{quote(back, safe='')}", MINUTES * 60)
    return response


async def come_back(request: web.Request) -> web.StreamResponse:
    provider = _provider(request)
    state, _, back = request.cookies.get(cookie_name(request, "oidc"), "").partition(".")
    try:
        given = request.query.get("state", "")
        if not is_token(state) or not given.isascii() or not hmac.compare_digest(state, given):
            raise IdentityError("The sign-in took too long or began elsewhere; try again.")
        if "code" not in request.query:
            raise IdentityError("The identity provider did not confirm the sign-in; try again.")
        await admit_identity(request.app[SERVICES].db, address_of(request))
        identity = await provider.identity(
            request.query["code"],
            public_url(request) + BACK,
            _derived(request, state, "nonce"),
            _derived(request, state, "verifier"),
        )
        account = await account_of(request.app[SERVICES].db, identity, provider.grants, source=address_of(request))
        await forgive_identity(request.app[SERVICES].db, address_of(request), account.user.email)
    except (UnavailableError, IdentityError, RateLimitError) as error:
        logger.warning("sign-in by the identity provider failed: %s (%r)", error, error.__cause__)
        response = show_form(request, safe_next(unquote(back)), error=error)
    else:
        response = await welcome(request, account.user, safe_next(unquote(back)))
    drop_cookie(request, response, "oidc")
    return response


def _provider(request: web.Request) -> Provider:
    """Raises ``HTTPNotFound`` where none is configured."""
    provider = request.app[CONSOLE].provider
    if provider is None:
        raise web.HTTPNotFound
    return provider


def _derived(request: web.Request, state: str, purpose: str) -> str:
    digest = hmac.digest(csrf_token(request).encode(), f"{purpose} {state}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


ROUTES = (web.get(START, start), web.get(BACK, come_back))
