"""Reading a request's body within its bounds."""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from aiohttp import web

from stencilpress.gateway.errors import InvalidRequestError, RequestTooLargeError, UnsupportedMediaTypeError
from stencilpress.gateway.settings import GatewaySettings


async def read_body(request: web.Request, settings: GatewaySettings) -> bytes:
    """The whole body. Stops reading as soon as it is too large, whatever its headers promised.

    Raises :class:`RequestTooLargeError`, :class:`UnsupportedMediaTypeError` for a compressed body, and
    :class:`InvalidRequestError` for one that does not arrive in time.
    """
    _check_identity(request)
    if (request.content_length or 0) > settings.max_body_bytes:
        raise _too_large(settings)
    content = request.content
    if content.is_eof() and content.exception() is None:  # it came along with the head, as nearly all do
        whole: bytes = content.read_nowait()
        if len(whole) > settings.max_body_bytes:
            raise _too_large(settings)
        return whole
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_limit_s):
            async for chunk in content.iter_any():
                body += chunk
                if len(body) > settings.max_body_bytes:
                    raise _too_large(settings)
    except TimeoutError:
        raise _too_slow() from None
    return bytes(body)


async def spool_body(request: web.Request, file: BinaryIO, max_bytes: int, limit_s: float) -> None:
    """Write a large body to a file, whole, before anything acts on it. Raises as :func:`read_body` does."""
    _check_identity(request)
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > max_bytes:
                    raise RequestTooLargeError(f"The body is larger than the limit of {max_bytes} bytes.")
                await asyncio.to_thread(file.write, chunk)
    except TimeoutError:
        raise _too_slow() from None


def _check_identity(request: web.Request) -> None:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaTypeError("Compressed request bodies are not accepted; send the JSON as it is.")


def _too_slow() -> InvalidRequestError:
    return InvalidRequestError("The body did not arrive in time.", code="body_timeout")


def _too_large(settings: GatewaySettings) -> RequestTooLargeError:
    return RequestTooLargeError(f"The body is larger than the limit of {settings.max_body_bytes} bytes.")
