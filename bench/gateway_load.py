"""The load of the gateway's bench, over raw connections: a client library would cost more than a gateway."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

USAGE = re.compile(rb'"completion_tokens":(\d+)')
FRAME = b"data: "
LAST_CHUNK = b"0\r\n\r\n"
PLAIN_ENDS = (b"}", b"}\n")
"""A plain answer is one JSON object and comes in one or two packets."""
CUT_OFF_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server."""

    host: str
    port: int
    key: str
    model: str

    def request(self, prompt: str, max_tokens: int, *, stream: bool) -> bytes:
        """A chat completion as the bytes of an HTTP request."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


@dataclass(slots=True)
class Seen:
    """What one connection saw of one answer. ``frames`` counts events, ``tokens`` is the usage that was told."""

    status: int = 0
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    frames: int = 0
    tokens: int = 0
    text: str = ""


class Connection(asyncio.Protocol):
    """A keep-alive connection; :meth:`ask` sends a request and waits for the end of its answer."""

    def __init__(self, *, keep_text: bool) -> None:
        self._keep_text = keep_text
        self._transport: asyncio.Transport | None = None
        self._seen = Seen()
        self._done: asyncio.Future[None] | None = None
        self._sent_at = self._last = 0.0
        self._tail = b""
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class

    async def ask(self, request: bytes) -> Seen:
        assert self._transport is not None
        self._seen = Seen()
        self._done = asyncio.get_running_loop().create_future()
        self._tail, self._parts, self._last = b"", [], 0.0
        self._sent_at = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(CUT_OFF_S):
            await self._done
        return self._seen

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        seen = self._seen
        if not seen.status:
            seen.status = int(data[9:12])
        joined = self._tail + data
        frames = joined.count(FRAME)
        if frames:
            if self._last:
                seen.gaps_s.append(now - self._last)
            else:
                seen.first_s = now - self._sent_at
            self._last = now
            seen.frames += frames
        if self._keep_text:
            self._parts.append(data)
        end = joined.endswith(LAST_CHUNK if seen.frames else PLAIN_ENDS)
        self._tail = joined[1 - len(FRAME) :]  # too short for a whole one
        if found := USAGE.search(data):
            seen.tokens = int(found[1])
        if end and self._done is not None and not self._done.done():
            if self._keep_text:
                seen.text = _text(b"".join(self._parts))
            if not self._last:
                seen.first_s = now - self._sent_at
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))


def _text(raw: bytes) -> str:
    """The text of a stream, of its chunks of HTTP and events."""
    body = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", b"\r\n" + raw.partition(b"\r\n\r\n")[2])
    events = re.findall(rb"data: (\{.*?\})\n\n", body)
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def connect(target: Target, count: int, keep_text_of: int = 0) -> list[Connection]:
    """Open so many connections; the first few keep the text that comes."""
    loop = asyncio.get_running_loop()
    opened = []
    for number in range(count):
        _, connection = await loop.create_connection(
            lambda number=number: Connection(keep_text=number < keep_text_of),  # type: ignore[misc]
            target.host,
            target.port,
        )
        opened.append(connection)
    return opened


async def closed_loop(
    connections: Sequence[Connection], request: bytes, rounds: int, stagger_s: float = 0.0, pause_s: float = 0.0
) -> tuple[list[Seen], float]:
    """Each connection asks ``rounds`` times, beginning evenly within ``stagger_s``. Returns also the time.

    Pauses before each time are random, ``pause_s`` on average: the end of an answer and the next request would
    otherwise fall together with a step of the engine.
    """

    async def one(number: int, connection: Connection) -> list[Seen]:
        await asyncio.sleep(stagger_s * number / len(connections))
        seen = []
        for _ in range(rounds):
            await asyncio.sleep(random.uniform(0, 2 * pause_s))
            seen.append(await connection.ask(request))
        return seen

    start = time.perf_counter()
    seen = await asyncio.gather(*(one(number, connection) for number, connection in enumerate(connections)))
    return [one for answers in seen for one in answers], time.perf_counter() - start


def drain(target: Target, request: bytes, streams: int, pause_s: float = 0.01) -> tuple[int, int, float]:
    """Open streams all at once and read them only now and then, which costs hardly any time here.

    Returns the frames, the tokens that usage told, and the time from the first byte to the last.
    """
    sockets = [socket.create_connection((target.host, target.port)) for _ in range(streams)]
    for one in sockets:
        one.sendall(request)
        one.setblocking(False)
    left = dict.fromkeys(sockets, b"")
    frames = tokens = 0
    start = last = 0.0
    while left:
        time.sleep(pause_s)
        for one, tail in list(left.items()):
            try:
                data = tail + one.recv(1 << 20)
            except BlockingIOError:
                continue
            last = time.perf_counter()
            start = start or last
            frames += data.count(FRAME)
            left[one] = data[1 - len(FRAME) :]
            if found := USAGE.search(data):
                tokens += int(found[1])
            if data.endswith(LAST_CHUNK):
                del left[one]
    for one in sockets:
        one.close()
    return frames, tokens, last - start


def main() -> int:
    """``python -m bench.gateway_load HOST PORT KEY MODEL PROMPT STREAMS TOKENS``: streams that only have to be there.

    Prints the frames and tokens that came.
    """
    host, port, key, model, prompt, streams, tokens = sys.argv[1:]
    target = Target(host, int(port), key, model)
    request = target.request(prompt, int(tokens), stream=True)
    frames, told, _ = drain(target, request, int(streams), pause_s=0.05)
    print(json.dumps([frames, told]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
