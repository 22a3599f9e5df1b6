"""Who is looking at the console: a signed-in user by the session's cookie, or a visitor with a cookie of no right.

The second one binds the forms that are used before signing in (``csrf.py``). Neither is ever taken over: signing in
makes a new session with a new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from stencilpress.gateway.access import PERMISSIONS, Actor, Permission, Role
from stencilpress.gateway.accounts.tokens import is_token, new_token
from stencilpress.gateway.catalog.sessions import SignedIn
from stencilpress.gateway.errors import AuthenticationError
from stencilpress.gateway.keys import Principal
from stencilpress.gateway.middleware import CALLER, REQUEST_ID
from stencilpress.gateway.observation import CURRENT
from stencilpress.gateway.services import SERVICES
from stencilpress.web.console import CONSOLE, PREFIX
from stencilpress.web.csrf import csrf_of
from stencilpress.web.place import is_tls

_SIGNED_IN = web.RequestKey("signed_in", SignedIn)
_BINDING = web.RequestKey("binding", str)
_FRESH = web.RequestKey("fresh_visit", bool)


@dataclass(frozen=True, slots=True)
class Visitor:
    """A signed-in user, as templates see them."""

    user_id: str
    name: str
    """The e-mail address."""
    role: Role
    tenant: str
    """Of the user; an operator sees all."""
    tenant_id: int
    session_id: str
    csrf: str


@dataclass(frozen=True, slots=True)
class May:
    """What the visitor may do, for pages to leave out what would be refused."""

    write: bool = False
    operate: bool = False
    call: bool = False
    grant: Sequence[Role] = ()
    """Roles that the visitor may give to others, the least first."""


class SignedOutError(AuthenticationError):
    """Nobody is signed in, or no longer."""

    code = "signed_out"
    headers = {}  # noqa: RUF012 - no key is asked for

    def __init__(self) -> None:
        super().__init__("You are not signed in.")


async def recognise(request: web.Request) -> None:
    """Find out who is there, once per request. Raises :class:`UnavailableError`; nobody is signed in then."""
    session, visit = (request.cookies.get(cookie_name(request, name), "") for name in ("session", "visit"))
    request[_FRESH] = not is_token(visit)
    request[_BINDING] = new_token() if request[_FRESH] else visit
    known = await request.app[CONSOLE].sessions.find(session) if session else None
    if known is not None:
        request[_SIGNED_IN], request[_BINDING], request[_FRESH] = known, session, False
        _name_caller(request, principal_of(request))


def signed_in(request: web.Request) -> SignedIn | None:
    return request.get(_SIGNED_IN)


def find_visitor(request: web.Request) -> Visitor | None:
    """The user who is signed in, or None."""
    known = request.get(_SIGNED_IN)
    if known is None:
        return None
    user = known.user
    return Visitor(
        user_id=user.public_id,
        name=user.email,
        role=user.role,
        tenant=known.tenant.name,
        tenant_id=known.tenant.id,
        session_id=known.session.public_id,
        csrf=csrf_token(request),
    )


def visitor_of(request: web.Request) -> Visitor:
    """Raises :class:`SignedOutError`."""
    visitor = find_visitor(request)
    if visitor is None:
        raise SignedOutError
    return visitor


def csrf_token(request: web.Request) -> str:
    """What forms of this browser carry."""
    return csrf_of(request[_BINDING])


def may_of(request: web.Request) -> May:
    """Nothing for whoever is signed out."""
    visitor = find_visitor(request)
    if visitor is None:
        return May()
    held = PERMISSIONS[visitor.role]
    return May(
        write=Permission.WRITE in held,
        operate=Permission.OPERATE in held,
        call=Permission.CALL in held,
        grant=[role for role in reversed(Role) if PERMISSIONS[role] <= held],
    )


async def caller_again(request: web.Request) -> Principal:
    """The user as one who calls, on a connection that outlives its request: the session may have ended since.

    Raises :class:`SignedOutError`, :class:`UnavailableError`.
    """
    known = await request.app[CONSOLE].sessions.find(request[_BINDING])
    if known is None:
        raise SignedOutError
    request[_SIGNED_IN] = known
    principal = principal_of(request)
    _name_caller(request, principal)
    return principal


def principal_of(request: web.Request) -> Principal:
    """The user as one who calls: usage, quotas and limits hold as for a key of the tenant.

    Raises :class:`SignedOutError`.
    """
    known = request.get(_SIGNED_IN)
    if known is None:
        raise SignedOutError
    tenant, user = known.tenant, known.user
    return Principal(tenant.id, tenant.name, user.public_id, tenant.limits, tenant.prefix_salt, user.role)


def _name_caller(request: web.Request, principal: Principal) -> None:
    """For the log."""
    request[CALLER] = principal
    if observed := CURRENT.get(None):
        observed.tenant, observed.key_id = principal.tenant, principal.key_id


def actor_of(request: web.Request) -> Actor:
    """Whom the audit log names. Raises :class:`SignedOutError`."""
    visitor = visitor_of(request)
    return Actor(
        name=f"user:{visitor.name}",
        role=visitor.role,
        tenant_id=visitor.tenant_id,
        source=address_of(request),
        request_id=request[REQUEST_ID],
    )


def address_of(request: web.Request) -> str:
    """The visitor's address: what the outermost of the servers that we trust has seen."""
    proxies = request.app[SERVICES].settings.trusted_proxies
    seen = ",".join(request.headers.getall("X-Forwarded-For", [])).split(",")
    forwarded = seen[-proxies].strip() if 0 < proxies <= len(seen) else ""
    return printable(forwarded or request.remote or "")


def printable(text: str) -> str:
    """What a client claims in a header or a form, as it may be kept: other bytes and control characters are marked."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def cookie_name(request: web.Request, name: str) -> str:
    """With a prefix that browsers only take over TLS, where there is TLS."""
    return f"__Secure-stencilpress-{name}" if is_tls(request) else f"stencilpress-{name}"


def set_cookie(
    request: web.Request, response: web.StreamResponse, name: str, value: str, max_age_s: int | None = None
) -> None:
    response.set_cookie(
        cookie_name(request, name),
        value,
        path=PREFIX,
        max_age=max_age_s,
        httponly=True,
        samesite="Lax",
        secure=is_tls(request),
    )


def drop_cookie(request: web.Request, response: web.StreamResponse, name: str) -> None:
    response.del_cookie(cookie_name(request, name), path=PREFIX, httponly=True, samesite="Lax", secure=is_tls(request))


def keep_visit(request: web.Request, response: web.StreamResponse) -> None:
    """Give the cookie that binds forms to a browser that has none."""
    if request.get(_FRESH):
        set_cookie(request, response, "visit", request[_BINDING])
