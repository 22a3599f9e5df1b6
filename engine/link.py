"""The engine's end of the boundary: all gateways of this engine behind one selector.

A gateway connects to the Unix socket, sends :class:`Hello` with the descriptors of the two rings it made, and gets
:class:`Welcome`. From then on messages come and go through the rings. No asyncio and no torch: the worker calls
:meth:`Link.poll` between steps. Whatever a gateway sends, the worst outcome is that its own connection is dropped.
"""

from __future__ import annotations

import array
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from stencilpress.engine.messages import PROTOCOL_VERSION, FromEngine, Hello, Step, Submit, ToEngine, Welcome
from stencilpress.engine.ring import (
    REPLIES,
    REQUESTS,
    Channel,
    FrameTooLargeError,
    ProtocolError,
    RingReader,
    RingWriter,
    decode,
    map_ring,
)

HANDSHAKE_LIMIT_S = 5.0
MAX_CONNECTIONS = 64
_HELLO_BYTES = 4096
_UCRED = struct.Struct("3i")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """A gateway's message. ``connection`` numbers gateways from 1 and is never used again."""

    connection: int
    message: ToEngine


@dataclass(frozen=True, slots=True)
class Closed:
    """A gateway is gone, or was dropped for ``reason``. Nothing of this connection follows."""

    connection: int
    reason: str


@dataclass(slots=True)
class _Connection:
    number: int
    channel: Channel[ToEngine]
    full: bool = False
    waits_to_publish: bool = False


class Link:
    """All gateways of one engine.

    ``listener`` is a listening SOCK_SEQPACKET Unix socket, ``welcome`` what each gateway is told. Only
    :meth:`wake` may be called from other threads.
    """

    def __init__(self, listener: socket.socket, welcome: Welcome) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._welcome = welcome
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.RLock()  # a signal handler may wake while this thread closes
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._greeting: dict[socket.socket, float] = {}
        self._connections: dict[int, _Connection] = {}
        self._last_number = 0
        self._events: list[Received | Closed] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._watch(self._listener, self._accept)
        self._watch(self._wake_fd, self._clear_wake)

    def poll(self, timeout_s: float | None) -> list[Received | Closed]:
        """What has come since the last call, in order per gateway; waits up to ``timeout_s`` (None: for ever).

        Returns early, perhaps with nothing, on :meth:`wake` and when a gateway made room in its reply ring.
        """
        for key, mask in self._selector.select(0.0 if self._events else timeout_s):
            react: Callable[[int], None] = key.data
            react(mask)
        self._drop_slow_greeters()  # last: a hello may have waited through a long step
        events, self._events = self._events, []
        return events

    def send(self, connection: int, message: FromEngine) -> bool:
        """Send a message. False: no room, keep the message, plan nothing for this gateway until :meth:`writable`.

        A step that only ends requests may use the ring's reserve. A message to a gateway that is gone, or one
        that cannot be sent to it ever (which drops the gateway), counts as sent: :class:`Closed` tells the rest.
        """
        peer = self._connections.get(connection)
        if peer is None:
            return True
        urgent = isinstance(message, Step) and not message.tokens
        try:
            if not peer.channel.write(self._encoder.encode(message), urgent=urgent):
                peer.full = True
                return False
            self._publish(peer)
        except (FrameTooLargeError, OSError) as error:  # the latter: the kernel has no memory for the packet
            self.drop(connection, str(error))
        return True

    def writable(self, connection: int) -> bool:
        """Whether to send again: after a refusal, once half of the reply ring is free."""
        peer = self._connections.get(connection)
        return peer is not None and not peer.full

    def drop(self, connection: int, reason: str) -> None:
        """Close a gateway's connection; :class:`Closed` follows from the next :meth:`poll`."""
        peer = self._connections.get(connection)
        if peer is not None:
            logger.warning("gateway %d dropped: %s", connection, reason)
            self._drop(peer, reason)

    def wake(self) -> None:
        """Make :meth:`poll` return. Safe in any thread and in a signal handler; does nothing after :meth:`close`."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close every connection, then the listening socket. Calling it again does nothing."""
        with self._wake_lock:
            if self._wake_fd < 0:
                return
            self._selector.unregister(self._wake_fd)
            os.close(self._wake_fd)
            self._wake_fd = -1
        for sock in list(self._greeting):
            self._forget_greeter(sock)
            sock.close()
        for peer in list(self._connections.values()):
            self._drop(peer, "the engine is shutting down")
        self._selector.close()
        self._listener.close()

    def _watch(self, source: socket.socket | int, react: Callable[[int], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _clear_wake(self, _mask: int) -> None:
        os.eventfd_read(self._wake_fd)

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            logger.warning("a gateway could not connect: %s", error)
            return
        _pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != os.geteuid() or len(self._greeting) + len(self._connections) >= MAX_CONNECTIONS:
            logger.warning("refused a connection of user %d: not our user, or %d are open", uid, MAX_CONNECTIONS)
            sock.close()
            return
        sock.setblocking(False)
        self._greeting[sock] = time.monotonic() + HANDSHAKE_LIMIT_S
        self._watch(sock, partial(self._greet, sock))

    def _drop_slow_greeters(self) -> None:
        now = time.monotonic()
        for sock in [sock for sock, deadline in self._greeting.items() if deadline < now]:
            logger.warning("a connection said no hello within %.0f s", HANDSHAKE_LIMIT_S)
            self._forget_greeter(sock)
            sock.close()

    def _forget_greeter(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._greeting[sock]

    def _greet(self, sock: socket.socket, _mask: int) -> None:
        self._forget_greeter(sock)
        try:
            channel = self._open_channel(sock)
        except (ProtocolError, OSError) as error:
            logger.warning("a gateway's hello was refused: %s", error)
            sock.close()
            return
        with suppress(OSError):  # one that is gone already, or gives up its wait, ends like any other, in _serve
            sock.send(msgspec.msgpack.encode(self._welcome))
        self._last_number += 1
        peer = _Connection(self._last_number, channel)
        self._connections[peer.number] = peer
        self._watch(sock, partial(self._serve, peer))

    def _open_channel(self, sock: socket.socket) -> Channel[ToEngine]:
        data, fds = _receive_hello(sock)
        try:
            hello = decode(msgspec.msgpack.Decoder(Hello), data)
            if hello.version != PROTOCOL_VERSION:
                raise ProtocolError(f"it speaks version {hello.version}, this engine {PROTOCOL_VERSION}")
            if len(fds) != 2:
                raise ProtocolError(f"it sent {len(fds)} descriptors, not two")
            requests = map_ring(fds[0], hello.request_bytes, writable=False)
            try:
                replies = map_ring(fds[1], hello.reply_bytes, writable=True)
            except ProtocolError:
                requests.close()
                raise
        finally:
            for fd in fds:
                os.close(fd)
        generation = self._welcome.generation
        return Channel(
            sock, RingWriter(replies, REPLIES, generation), RingReader(requests, REQUESTS, generation), self._decoder
        )

    def _serve(self, peer: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                if not peer.channel.receive():
                    self._drop(peer, "the gateway closed the connection")
                    return
                for message in peer.channel.messages():
                    if isinstance(message, Submit) and len(message.prompt) % 4:
                        raise ProtocolError("a prompt is not whole token ids")
                    self._events.append(Received(peer.number, message))
                peer.full = peer.full and not peer.channel.roomy
            self._publish(peer)
        except (ProtocolError, OSError) as error:
            self.drop(peer.number, str(error))

    def _publish(self, peer: _Connection) -> None:
        """Announce our positions now, or watch for the moment when the socket takes packets again."""
        waits = not peer.channel.publish()
        if waits != peer.waits_to_publish:
            peer.waits_to_publish = waits
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
            self._selector.modify(peer.channel.sock, mask, partial(self._serve, peer))

    def _drop(self, peer: _Connection, reason: str) -> None:
        self._selector.unregister(peer.channel.sock)
        del self._connections[peer.number]
        peer.channel.close()
        self._events.append(Closed(peer.number, reason))


def _receive_hello(sock: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors (close-on-exec); the kernel closes descriptors beyond two."""
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(_HELLO_BYTES, socket.CMSG_LEN(2 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data:
        raise ProtocolError("it closed the connection instead")
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for fd in fds:
            os.close(fd)
        raise ProtocolError("its hello is too long or carries more than two descriptors")
    return data, fds.tolist()
