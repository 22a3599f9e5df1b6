"""Changes come from our own pages: one check for every unsafe request below ``/console``.

The token is derived from a secret cookie that another site can neither read nor choose; a form sends it in the field
``csrf``, a script in the header ``x-csrf-token``. What a browser says of the origin must agree with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from aiohttp import web

from stencilpress.gateway.errors import PermissionDeniedError
from stencilpress.web.place import is_own_origin

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
FIELD = "csrf"
HEADER = "x-csrf-token"


class ForgedRequestError(PermissionDeniedError):
    """The request does not come from a page of ours, or from one that is too old."""

    code = "csrf"

    def __init__(self) -> None:
        super().__init__("The page was too old, or the request did not come from it. Reload it and try again.")


def csrf_of(secret: str) -> str:
    """The token of a session or visit."""
    digest = hmac.digest(secret.encode(), b"stencilpress csrf", hashlib.sha256)
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def check_token(expected: str, given: str) -> None:
    """Raises :class:`ForgedRequestError`."""
    if not hmac.compare_digest(expected.encode(), given.encode("utf-8", "surrogatepass")):
        raise ForgedRequestError


def check_origin(request: web.Request, *, required: bool = False) -> None:
    """What the browser says of the page that asks, if it says something. Raises :class:`ForgedRequestError`."""
    origin = request.headers.get("Origin")
    if origin is None:
        if required or request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise ForgedRequestError
        return
    if not is_own_origin(request, origin):
        raise ForgedRequestError
