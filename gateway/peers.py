"""The gateways of one server tell each other their metrics, so that whichever is scraped can answer for all.

Each listens at a Unix socket whose name the supervisor gave to all. Who connects is told the numbers of this moment, in
msgpack, and the connection ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Sequence

import msgspec

from stencilpress.gateway.metrics import Snapshot

ASK_LIMIT_S = 0.5
"""A gateway that does not answer by then, because it is starting or stuck, counts as down."""
MAX_SNAPSHOT_BYTES = 8 << 20
_UCRED = struct.Struct("3i")


async def serve_snapshots(listener: socket.socket, snapshot: Callable[[], Snapshot]) -> asyncio.Server:
    """Answer the others from here on. ``listener`` is inherited from the supervisor."""

    async def tell(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _is_ours(writer.get_extra_info("socket")):
            writer.write(msgspec.msgpack.encode(snapshot()))
        writer.close()

    return await asyncio.start_unix_server(tell, sock=listener)


async def ask_peers(names: Sequence[str], own: int) -> list[Snapshot]:
    """The snapshots of those that answer; ``own`` is the number of the asking gateway, counted from 1."""
    others = [name for number, name in enumerate(names, 1) if number != own]
    answers = await asyncio.gather(*(_ask(name) for name in others))
    return [answer for answer in answers if answer is not None]


async def _ask(name: str) -> Snapshot | None:
    try:
        async with asyncio.timeout(ASK_LIMIT_S):
            return await _read(name)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None


async def _read(name: str) -> Snapshot:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, f"\0{name}")
        if not _is_ours(sock):
            raise ConnectionError("another user listens there")
        data = bytearray()
        while piece := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            data += piece
            if len(data) > MAX_SNAPSHOT_BYTES:
                raise ValueError("a snapshot is too long")
    finally:
        sock.close()
    return msgspec.msgpack.decode(data, type=Snapshot)


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other side is of our user: names in this space are open to everyone."""
    _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.geteuid())
