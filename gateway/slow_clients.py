"""Clients that leave unread what is sent to them are cut off; those on slow lines are not."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable

from aiohttp import web

from stencilpress.gateway.metrics import Metrics

PART_BYTES = 64 << 10
"""Written at once; then streams have their turn: with 40 downloads of a mebibyte at once they waited for 30 ms."""
_ACKED = struct.Struct("=Q")
_ACKED_AT = 120
"""Of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""


class SlowClientError(ConnectionError):
    """The client did not read for too long and was cut off."""


async def write_in_time(request: web.Request, writing: Awaitable[None], limit_s: float, metrics: Metrics) -> None:
    """Wait for a write; a client that takes nothing for ``limit_s`` loses its connection, over which nothing more can
    be told.

    What counts is what the client's host has acknowledged. A write waits until a third of the kernel's buffer is free,
    which is a megabyte: on a slow line that takes longer than the limit. Raises :class:`SlowClientError`.
    """
    loop = asyncio.get_running_loop()
    taken = _taken_bytes(request)
    next_look: asyncio.TimerHandle

    def look() -> None:
        nonlocal taken, next_look
        before, taken = taken, _taken_bytes(request)
        if taken > before:
            next_look = loop.call_later(limit_s, look)
        else:
            limit.reschedule(loop.time())

    next_look = loop.call_later(limit_s, look)
    try:
        async with asyncio.timeout(None) as limit:
            await writing
    except TimeoutError:
        metrics.slow_clients_cut.inc()
        cut(request)
        raise SlowClientError("the client does not read") from None
    finally:
        next_look.cancel()


async def write_parts(
    request: web.Request, response: web.StreamResponse, data: bytes, limit_s: float, metrics: Metrics
) -> None:
    """The same for much data at once: in parts, between which others have their turn."""
    for start in range(0, len(data), PART_BYTES):
        await write_in_time(request, response.write(data[start : start + PART_BYTES]), limit_s, metrics)
        await asyncio.sleep(0)


def cut(request: web.Request) -> None:
    """Drop the connection, with what is buffered for it."""
    if request.transport is not None:
        request.transport.abort()


def _taken_bytes(request: web.Request) -> int:
    """What a connection's other side has acknowledged since it began; 0 for one that has ended."""
    connection = None if request.transport is None else request.transport.get_extra_info("socket")
    if connection is None:
        return 0
    try:
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + _ACKED.size)
    except OSError:  # it was closed a moment ago
        return 0
    return int(_ACKED.unpack_from(facts, _ACKED_AT)[0])
