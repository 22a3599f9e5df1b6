"""Where the console is, as browsers know it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from stencilpress.gateway.services import SERVICES


def public_url(request: web.Request) -> str:
    """Scheme and host of our own pages, without a slash at the end."""
    configured = request.app[SERVICES].settings.console_url.rstrip("/")
    return configured or f"{request.scheme}://{request.host}"


def is_tls(request: web.Request) -> bool:
    """Whether browsers reach us over TLS, be it ours or that of a server in front."""
    return public_url(request).startswith("https://")


def is_own_origin(request: web.Request, origin: str) -> bool:
    """Whether a page of this origin is ours: of the host that the browser asked, or of the configured one."""
    page, configured = urlsplit(origin), urlsplit(request.app[SERVICES].settings.console_url)
    if page.scheme not in ("http", "https") or not page.netloc:
        return False
    if page.scheme == "http" and is_tls(request):
        return False  # anybody on the way may have made that page
    return page.netloc.lower() == request.host.lower() or _place(page) == _place(configured)


def _place(url: SplitResult) -> tuple[str, str]:
    return url.scheme, url.netloc.lower()
