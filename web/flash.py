"""Lines that tell, on the next page, what has been done. They travel in a cookie, signed for this browser alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Literal

import msgspec
from aiohttp import web

from stencilpress.web.visitor import cookie_name, csrf_token, drop_cookie, set_cookie

Kind = Literal["ok", "info", "warn", "bad"]
MAX_CHARS = 300
_MAX_LINES = 5
_SHOWN_FOR_S = 60
_NEW = web.RequestKey("new_flashes", list)
_SHOWN = web.RequestKey("flashes_shown", bool)
_Lines = list[tuple[Kind, str]]


def flash(request: web.Request, kind: Kind, text: str) -> None:
    """Show a line on the next page. Never a secret."""
    request.setdefault(_NEW, []).append((kind, text[:MAX_CHARS]))


def take_flashes(request: web.Request) -> _Lines:
    """The lines to show now; they are not shown again."""
    request[_SHOWN] = True
    return [*_stored(request), *request.pop(_NEW, [])]


def store_flashes(request: web.Request, response: web.StreamResponse) -> None:
    """Keep what has not been shown for the next page, and forget what has."""
    waiting = request.get(_NEW, [])
    if waiting:
        lines = [*([] if request.get(_SHOWN) else _stored(request)), *waiting][-_MAX_LINES:]
        body = base64.urlsafe_b64encode(msgspec.json.encode(lines)).decode().rstrip("=")
        set_cookie(request, response, "flash", f"{body}.{_signature(request, body)}", _SHOWN_FOR_S)
    elif request.get(_SHOWN) and cookie_name(request, "flash") in request.cookies:
        drop_cookie(request, response, "flash")


def _stored(request: web.Request) -> _Lines:
    body, _, signature = request.cookies.get(cookie_name(request, "flash"), "").partition(".")
    if not body.isascii() or not signature.isascii() or not hmac.compare_digest(_signature(request, body), signature):
        return []
    try:  # whoever has the token can sign what we would not
        return msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), type=_Lines)
    except (ValueError, msgspec.MsgspecError):
        return []


def _signature(request: web.Request, body: str) -> str:
    return hmac.digest(csrf_token(request).encode(), b"flash" + body.encode(), hashlib.sha256).hex()
