"""Headers of every answer below ``/console``: what its pages may load and who may show them."""

from __future__ import annotations

from aiohttp import web

from stencilpress.web.console import PREFIX
from stencilpress.web.place import is_tls

_DIRECTIVES = (
    "default-src 'self'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'self'",
    "object-src 'none'",
)
POLICY = "; ".join(_DIRECTIVES)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


def is_console(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


async def secure(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler, so that streams have them too. What says nothing of caching is kept nowhere."""
    if not is_console(request.path):
        return
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
    if is_tls(request):
        response.headers["Strict-Transport-Security"] = "max-age=31536000"
