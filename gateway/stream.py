"""Server-sent events: chunks encoded around a text, and a response that waits for its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
from aiohttp import HttpVersion11, web

from stencilpress.gateway.answer import Delta, FinishReason, ShownToken
from stencilpress.gateway.errors import ApiError
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.slow_clients import write_in_time

if TYPE_CHECKING:
    from aiohttp.http import StreamWriter

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx must not collect tokens
}
UNTIMED_BYTES = 16 << 10
"""While so few bytes are buffered a write never waits, so it needs no timer: that is every write to a client that
keeps up."""
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_LINE_ENDS = {b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029", b"\xc2\x85": b"\\u0085"}
"""Characters that JSON lets through and some clients, which split text and not bytes, take for ends of lines."""


def encode_text(text: str) -> bytes:
    """A JSON string that stays on one line for every reader."""
    data = _encode(text)
    if not data.isascii():
        for character, escape in _LINE_ENDS.items():
            data = data.replace(character, escape)
    return data


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What is special to one endpoint's chunks, as JSON members of a choice."""

    object: str
    before_text: bytes
    after_text: bytes
    opening: bytes
    """Sent once at the head of each choice; empty for nothing."""
    closing: bytes
    """Stands in place of the text in the chunk with the finish reason."""
    logprobs: Callable[[Sequence[ShownToken]], Any]


class ChunkEncoder:
    """Chunks of one response. All but the text is encoded once, so a delta costs one JSON string."""

    def __init__(
        self, shape: ChunkShape, head: Mapping[str, Any], choices: int, *, include_usage: bool, logprobs: bool
    ) -> None:
        """``head`` has ``id``, ``created`` and ``model``."""
        self._shape = shape
        self._logprobs = logprobs
        self.include_usage = include_usage
        self._head = b"data: " + _encode({**head, "object": shape.object})[:-1] + b',"choices":['
        self._heads = [self._head + b'{"index":%d,' % index for index in range(choices)]
        self._before = [head + shape.before_text for head in self._heads]
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._after = shape.after_text + b',"logprobs":null,"finish_reason":null}' + self._tail
        self._open = [bool(shape.opening)] * choices

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events of one delta of one choice: its opening, its text, its finish, as they apply."""
        data = b""
        if self._open[index]:
            self._open[index] = False
            data = self._chunk(index, self._shape.opening, b"null", None)
        if self._logprobs and delta.tokens:
            logprobs = _encode(self._shape.logprobs(delta.tokens))
            text = self._shape.before_text + encode_text(delta.text) + self._shape.after_text
            data += self._chunk(index, text, logprobs, None)
        elif delta.text:
            data += self._before[index] + encode_text(delta.text) + self._after
        if delta.finish_reason is not None:
            data += self._chunk(index, self._shape.closing, b"null", delta.finish_reason)
        return data

    def end(self, usage: Mapping[str, Any] | None) -> bytes:
        """What follows the last choice: the usage where it was asked for, and the end mark."""
        if usage is None:
            return DONE
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n" + DONE

    def _chunk(self, index: int, members: bytes, logprobs: bytes, finish: FinishReason | None) -> bytes:
        reason = b',"finish_reason":' + _encode(finish) + b"}"
        return self._heads[index] + members + b',"logprobs":' + logprobs + reason + self._tail


class _Events(web.StreamResponse):
    """Its head goes out with the first event, in one write."""

    _send_headers_immediately = False


class EventStream:
    """A ``text/event-stream`` that begins with its first event: until then a failure still gets a status.

    Several tasks may send. Sending waits for a client that reads slowly, and cuts off one that has taken
    nothing for ``write_limit_s`` with ``SlowClientError``.
    """

    def __init__(self, request: web.Request, write_limit_s: float, metrics: Metrics) -> None:
        self._request = request
        self._write_limit_s = write_limit_s
        self._metrics = metrics
        self._response = _Events(headers=HEADERS)
        self._started = False
        self._transport: asyncio.Transport | None = None
        """Where chunks of the body can be written as they are; None before the first event, and for HTTP/1.0."""

    @property
    def started(self) -> bool:
        """Whether the status is out."""
        return self._started

    async def prepare(self) -> None:
        """Make the head ready while the engine works; it goes out with the first event."""
        if self._request.version >= HttpVersion11:
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)

    def take_back(self) -> None:
        """Make room for another response, whose head replaces the one that is not out yet."""
        cast("StreamWriter", self._request.writer).chunked = False

    def write_now(self, data: bytes) -> bool:
        """Write whole events at once if nothing is in the way; False if they need :meth:`send`.

        This is every event but the first to a client that keeps up, so it does not go through the five calls of the
        library's writer. Raises :class:`ConnectionError` when the client is gone.
        """
        transport = self._transport
        if transport is None or len(data) > UNTIMED_BYTES or transport.get_write_buffer_size():
            return False
        if transport.is_closing():
            raise ConnectionResetError("the client is gone")
        if data:  # a chunk of no bytes would end the body
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def send(self, data: bytes) -> None:
        """Write whole events, waiting for the client if need be. Raises :class:`ConnectionError` when it is gone."""
        if self.write_now(data):
            return
        self._started = True
        if self._is_free(data):
            await self._response.write(data)  # the first, with the headers
            if data and self._response.chunked:
                self._transport = self._request.transport
            return
        await self._in_time(self._response.write(data))

    async def finish(self, data: bytes = b"") -> web.StreamResponse:
        """End the response in the regular way, with these last events."""
        self._started = True
        if self._is_free(data):
            await self._response.write_eof(data)
            return self._response
        await self._in_time(self._response.write_eof(data))
        return self._response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Tell the client of a failure in mid-stream: an error event, no finish reason, no end mark."""
        return await self.finish(b"data: " + error.body() + b"\n\n")

    def _is_free(self, data: bytes) -> bool:
        """Whether a write of these bytes cannot wait."""
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() + len(data) <= UNTIMED_BYTES

    async def _in_time(self, writing: Awaitable[None]) -> None:
        await write_in_time(self._request, writing, self._write_limit_s, self._metrics)
