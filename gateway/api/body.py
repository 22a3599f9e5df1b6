"""Reading a request's body within its bounds."""

from __future__ import annotations

import asyncio

from aiohttp import web

from stencilpress.gateway.errors import InvalidRequestError, RequestTooLargeError, UnsupportedMediaTypeError
from stencilpress.gateway.settings import GatewaySettings


async def read_body(request: web.Request, settings: GatewaySettings) -> bytes:
    """The whole body. Stops reading as soon as it is too large, whatever its headers promised.

    Raises :class:`RequestTooLargeError`, :class:`UnsupportedMediaTypeError` for a compressed body, and
    :class:`InvalidRequestError` for one that does not arrive in time.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaTypeError("Compressed request bodies are not accepted; send the JSON as it is.")
    if (request.content_length or 0) > settings.max_body_bytes:
        raise _too_large(settings)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_limit_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > settings.max_body_bytes:
                    raise _too_large(settings)
    except TimeoutError:
        raise InvalidRequestError("The body did not arrive in time.", code="body_timeout") from None
    return bytes(body)


def _too_large(settings: GatewaySettings) -> RequestTooLargeError:
    return RequestTooLargeError(f"The body is larger than the limit of {settings.max_body_bytes} bytes.")
