"""Around every handler: a request id, the one place where errors become responses, counting and the access log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from stencilpress.gateway.errors import (
    ApiError,
    AuthenticationError,
    InternalError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    RequestTooLargeError,
)
from stencilpress.gateway.keys import Principal, check_route
from stencilpress.gateway.observation import CURRENT, Observation
from stencilpress.gateway.services import SERVICES

REQUEST_ID = web.RequestKey("request_id", str)
ARRIVED_AT = web.RequestKey("arrived_at", float)
"""``time.perf_counter()`` when the head of the request was read."""
CALLER = web.RequestKey("caller", Principal)
RATE_HEADERS = web.RequestKey("rate_headers", Mapping[str, str])
"""``x-ratelimit-*`` of an admitted request; a refused one has them from its error."""

CLIENT_CLOSED = 499

logger = logging.getLogger(__name__)

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked every few seconds by machines: they would bury what people do."""


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, answer errors, count and log the outcome."""
    observed = Observation()
    request[REQUEST_ID], request[ARRIVED_AT] = observed.request_id, observed.arrived_at
    CURRENT.set(observed)  # a connection's next request is handled in the same context and sets its own
    route, tracing = _route(request), request.app[SERVICES].tracing
    span = tracing.begin(f"{request.method} {route}", request.headers, observed) if tracing else None
    code, status = CLIENT_CLOSED, "closed"  # what stays if the client leaves and the handler is cancelled
    try:
        response = await _answered(request, handler)
        code, status = response.status, f"{response.status // 100}xx"
        return response
    except ConnectionError:
        return web.Response(status=CLIENT_CLOSED)  # goes nowhere: the client is gone
    finally:
        if tracing and span:
            http = {"http.request.method": request.method, "http.route": route, "http.response.status_code": code}
            observed.failed = observed.failed or code >= 500
            tracing.end(span, observed, **http)
        request.app[SERVICES].metrics.requests.labels(route, status).inc()
        observed.log(request.method, route, status, logging.DEBUG if route in PROBES else logging.INFO)


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - the outermost frame of ours: whatever it is, the client gets an answer
        return error_response(to_api_error(error, request))


def to_api_error(error: Exception, request: web.Request) -> ApiError:
    """What a client is told of an exception. One that nobody foresaw goes to the log and not to the client."""
    told = _told(error, request)
    if told.status >= 500 and (observed := CURRENT.get(None)):
        observed.failed = True
    return told


def _told(error: Exception, request: web.Request) -> ApiError:
    match error:
        case InternalError(cause=cause) if cause:
            logger.error("the engine failed in %s: %s", request.get(REQUEST_ID), cause)
            return error
        case ApiError():
            return error
        case web.HTTPMethodNotAllowed(method=method):
            return MethodNotAllowedError(f"{method} is not allowed here.")
        case web.HTTPNotFound():
            return NotFoundError("There is nothing at this path.")
        case web.HTTPRequestEntityTooLarge():
            return RequestTooLargeError("The body is too large.")
        case web.HTTPClientError():
            return InvalidRequestError("The request is malformed.")
    logger.error("unexpected error in %s", request.get(REQUEST_ID), exc_info=error)
    return InternalError()


def error_response(error: ApiError) -> web.Response:
    return web.Response(status=error.status, headers=error.headers, body=error.body(), content_type="application/json")


async def name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: the request id on every response, streams included; no version of ours or the library's."""
    response.headers["x-request-id"] = request.get(REQUEST_ID, "")
    response.headers["Server"] = "stencilpress"
    response.headers.update(request.get(RATE_HEADERS, {}))
    if request.app[SERVICES].drain.draining:
        response.force_close()
        response.headers["Connection"] = "close"


async def authenticate(request: web.Request) -> Principal:
    """Who is asking, by ``Authorization: Bearer``.

    Raises :class:`AuthenticationError`, :class:`PermissionDeniedError` if the key may not use this route.
    """
    return await authenticate_token(request, bearer_token(request))


async def authenticate_token(request: web.Request, token: str) -> Principal:
    """Who a key belongs to; also names the caller for the log.

    Raises :class:`AuthenticationError`, :class:`PermissionDeniedError` if the key may not use this route.
    """
    caller = await request.app[SERVICES].keys.authenticate(token)
    request[CALLER] = caller
    if observed := CURRENT.get(None):
        observed.tenant, observed.key_id = caller.tenant, caller.key_id
    check_route(caller, _route(request))
    return caller


def bearer_token(request: web.Request) -> str:
    """The key of the header. Raises :class:`AuthenticationError` when there is none."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise AuthenticationError("You did not provide an API key: send 'Authorization: Bearer <key>'.")
    return token.strip()


def _route(request: web.Request) -> str:
    """The route's pattern, never the path: the number of label values is the number of routes."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
