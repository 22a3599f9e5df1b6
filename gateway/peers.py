"""The gateways of one server tell each other their numbers, so that whichever is asked can answer for all.

Each listens at a Unix socket whose name the supervisor gave to all. Who connects says in one byte what it wants, is
told the numbers of this moment in msgpack, and the connection ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from stencilpress.gateway.live_counts import LiveSlice
from stencilpress.gateway.metrics import Metrics, Snapshot

ASK_LIMIT_S = 0.5
"""A gateway that does not answer by then, because it is starting or stuck, counts as down."""
MAX_ANSWER_BYTES = 8 << 20
METRICS = b"m"
LIVE = b"l"
_UCRED = struct.Struct("3i")

T = TypeVar("T", Snapshot, LiveSlice)


async def serve_peers(listener: socket.socket, metrics: Metrics) -> asyncio.Server:
    """Answer the others from here on. ``listener`` is inherited from the supervisor."""
    answers: Mapping[bytes, Callable[[], Any]] = {METRICS: metrics.snapshot, LIVE: metrics.live.look}

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                question = await reader.read(1)
            if _is_ours(writer.get_extra_info("socket")) and question in answers:
                writer.write(msgspec.msgpack.encode(answers[question]()))
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()

    return await asyncio.start_unix_server(tell, sock=listener)


async def ask_metrics(names: Sequence[str], own: int) -> list[Snapshot]:
    """The metrics of those that answer; ``own`` is the number of the asking gateway, counted from 1."""
    return await _ask_all(names, own, METRICS, Snapshot)


async def ask_live(names: Sequence[str], own: int) -> list[LiveSlice]:
    """What happens right now on those that answer."""
    return await _ask_all(names, own, LIVE, LiveSlice)


async def _ask_all(names: Sequence[str], own: int, question: bytes, kind: type[T]) -> list[T]:
    others = [name for number, name in enumerate(names, 1) if number != own]
    answers = await asyncio.gather(*(_ask(name, question, kind) for name in others))
    return [answer for answer in answers if answer is not None]


async def _ask(name: str, question: bytes, kind: type[T]) -> T | None:
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            return msgspec.msgpack.decode(await _read(name, question), type=kind)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


async def _read(name: str, question: bytes) -> bytes:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    loop = asyncio.get_running_loop()
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, f"\0{name}")
        if not _is_ours(sock):
            raise ConnectionError("another user listens there")
        await loop.sock_sendall(sock, question)
        data = bytearray()
        while piece := await loop.sock_recv(sock, 1 << 16):
            data += piece
            if len(data) > MAX_ANSWER_BYTES:
                raise ValueError("an answer is too long")
    finally:
        sock.close()
    return bytes(data)


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other side is of our user: names in this space are open to everyone."""
    _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.geteuid())
