"""A gateway without asyncio that a test drives by hand, packet by packet, and may make misbehave."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from stencilpress.engine.messages import PROTOCOL_VERSION, FromEngine, Hello, ToEngine, Welcome
from stencilpress.engine.ring import (
    MIN_RING_BYTES,
    REPLIES,
    REQUESTS,
    Channel,
    RingReader,
    RingWriter,
    create_ring,
    map_ring,
)


def connect(path: Path) -> socket.socket:
    """A blocking socket to an engine, with a time limit so that a test fails instead of hanging."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(45)
    sock.connect(str(path))
    return sock


class Peer:
    """One connection. After :meth:`hello` the engine must have polled before :meth:`welcomed`."""

    def __init__(self, path: Path, request_bytes: int = 1 << 20, reply_bytes: int = MIN_RING_BYTES) -> None:
        self.sock = connect(path)
        self.sizes = request_bytes, reply_bytes
        self.fds = [create_ring("test", size) for size in self.sizes]

    def hello(self) -> None:
        hello = Hello(PROTOCOL_VERSION, os.getpid(), *self.sizes)
        socket.send_fds(self.sock, [msgspec.msgpack.encode(hello)], self.fds)

    def welcomed(self) -> Welcome:
        """Read the engine's answer and open the channel."""
        welcome = msgspec.msgpack.decode(self.sock.recv(4096), type=Welcome)
        self.sock.setblocking(False)
        self.writer = RingWriter(map_ring(self.fds[0], self.sizes[0], writable=True), REQUESTS, welcome.generation)
        self.reader = RingReader(map_ring(self.fds[1], self.sizes[1], writable=False), REPLIES, welcome.generation)
        self.channel: Channel[FromEngine] = Channel(
            self.sock, self.writer, self.reader, msgspec.msgpack.Decoder(FromEngine)
        )
        return welcome

    def send(self, message: ToEngine) -> None:
        self.send_payload(msgspec.msgpack.encode(message))

    def send_payload(self, payload: bytes) -> None:
        assert self.channel.write(payload)
        assert self.channel.publish()

    def receive(self) -> list[FromEngine]:
        """All that has come; tells the engine how far it read where that is due."""
        self.channel.receive()
        messages = list(self.channel.messages())
        self.channel.publish()
        return messages

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
