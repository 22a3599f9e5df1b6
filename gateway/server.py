"""What stands below the application: requests that are no HTTP, TLS, and pages of other origins."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.errors import InternalError, InvalidRequestError
from stencilpress.gateway.settings import GatewaySettings

CERTIFICATE_INTERVAL_S = 60.0
"""How often the files of a certificate are looked at."""
PREFLIGHT_AGE_S = 600
_EXPOSED = ", ".join(
    (
        *("x-request-id", "retry-after", "retry-after-ms", "x-should-retry"),
        *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
    )
)

logger = logging.getLogger(__name__)


class Runner(web.AppRunner):
    """Runs an application whose clients get the API's errors for requests that no handler ever sees."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        super().__init__(app, **options)
        self._transports: dict[object, asyncio.Transport] = {}
        """Of connections that are open, or have been closed and not taken all yet."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        server.transports = self._transports  # type: ignore[attr-defined]
        return server

    def abort(self) -> None:
        """Drop what clients have not taken. The loop could not be closed before the last of them has read all."""
        for transport in list(self._transports.values()):
            transport.abort()


class _Server(web.Server):
    transports: dict[object, asyncio.Transport]

    def __call__(self) -> RequestHandler:
        protocol = _Protocol(self, loop=self._loop, **self._kwargs)
        protocol.transports = self.transports
        return protocol


class _Protocol(RequestHandler):
    __slots__ = ("transports",)

    transports: dict[object, asyncio.Transport]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transports[self] = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transports.pop(self, None)
        super().connection_lost(exc)

    def handle_error(self, request: Any, status: int = 500, exc: Any = None, message: Any = None) -> web.StreamResponse:
        """What aiohttp answers in plain text, by itself: mostly to what is malformed."""
        if status >= 500:
            super().handle_error(request, status, exc, message)  # logs; raises if an answer has begun
        else:  # anybody may send such things for ever, so there is no error and no traceback in the log
            logger.info("a request from %s is no HTTP: %s", request.remote, type(exc).__name__)
            if request.writer.output_size > 0:
                raise ConnectionError("an answer has begun already")
        malformed = InvalidRequestError("The request is not well-formed HTTP.", code="malformed_request")
        error = malformed if status < 500 else InternalError()
        headers = {"Server": "stencilpress", "X-Content-Type-Options": "nosniff"}
        response = web.Response(status=status, headers=headers, body=error.body(), content_type="application/json")
        response.force_close()
        return response


def tls_context(settings: GatewaySettings) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the operator's certificate; None without one. Raises :class:`SettingsError`."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise SettingsError("STENCILPRESS_TLS_CERTIFICATE and STENCILPRESS_TLS_KEY go together")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        text = f"{certificate} and {key} are no certificate chain and key in PEM: {error}"
        raise SettingsError(f"STENCILPRESS_TLS_CERTIFICATE: {text}") from None
    return context


async def keep_certificate(context: ssl.SSLContext, settings: GatewaySettings) -> None:
    """Take a renewed certificate for new connections, until cancelled."""
    known = _changed_at(settings)
    while True:
        await asyncio.sleep(CERTIFICATE_INTERVAL_S)
        now = _changed_at(settings)
        if now == known:
            continue
        try:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key)
        except (OSError, ssl.SSLError) as error:  # half renewed: looked at again
            logger.warning("the new certificate cannot be used: %s", error)
        else:
            logger.info("the certificate has been renewed")
            known = now


def _changed_at(settings: GatewaySettings) -> tuple[int, ...]:
    paths = (settings.tls_certificate, settings.tls_key)
    return tuple(os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in paths)  # noqa: PTH110, PTH116


class Cors:
    """Which pages of other origins may read answers. Keys come in a header, so cookies are never allowed."""

    def __init__(self, origins: str) -> None:
        """``origins`` are separated by commas; ``*`` is all, "" none. Raises :class:`SettingsError`."""
        self._origins = frozenset(origin.strip().rstrip("/") for origin in origins.split(",") if origin.strip())
        for origin in self._origins - {"*"}:
            if not origin.startswith(("http://", "https://")) or "/" in origin.partition("://")[2]:
                raise SettingsError(f"STENCILPRESS_CORS_ORIGINS: {origin!r} is no origin such as https://example.com")

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a browser that asks before it sends; whoever may not ask gets what any OPTIONS gets."""
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not self._allows(request):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, PUT, PATCH, DELETE",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "authorization"),
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    async def allow(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: the headers of an answer that the page may read."""
        if not self._origins:
            return
        if "*" not in self._origins:
            response.headers.add("Vary", "Origin")
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and not self._origins.isdisjoint((origin, "*"))
