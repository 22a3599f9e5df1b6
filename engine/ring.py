"""Byte rings in anonymous shared memory, and the channel that one process of a pair makes of two of them.

A ring has one writer and one reader. Its memory holds frames and nothing else: a header (kind, payload length,
generation; little-endian) and the payload, wrapping at the end. The two positions, bytes written and bytes consumed
since the start, travel as small packets over the Unix socket that connects the pair, so that a reader sees a frame
complete because the kernel ordered a send before a receive, not because Python ordered two stores.

The reader trusts nothing: sizes and seals are checked before the memory is mapped, every field and every position is
checked when read, and payloads are copied out before they are decoded. What does not fit raises
:class:`ProtocolError`, and whoever holds the channel drops that one connection.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

MIN_RING_BYTES = 4 * mmap.PAGESIZE
MAX_RING_BYTES = 64 << 20
REQUESTS = b"SPq1"
"""Frame kind of a request ring; a new frame layout takes a new number."""
REPLIES = b"SPr1"

_HEADER = struct.Struct("<4sIQ")
_POSITIONS = struct.Struct("<4sQQ")
_POSITIONS_TAG = b"SPp1"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PACKETS_PER_RECEIVE = 256

T = TypeVar("T")


class ProtocolError(Exception):
    """The peer sent what the protocol forbids; its connection cannot go on."""


class FrameTooLargeError(ValueError):
    """A message that could never be sent: its frame exceeds half the ring."""


def create_ring(name: str, size: int) -> int:
    """Make an anonymous, zeroed memory file of ``size`` bytes that can no longer change its size.

    Returns its descriptor. ``name`` shows in ``/proc/<pid>/maps`` only.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def map_ring(fd: int, size: int, *, writable: bool) -> mmap.mmap:
    """Map a ring's memory after checking that it is ``size`` bytes and stays so.

    A file that could shrink under the mapping would end the process with SIGBUS. Raises :class:`ProtocolError`.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        actual = os.fstat(fd).st_size
        if seals & _SEALS != _SEALS:
            raise ProtocolError("ring memory is not sealed against resizing")
        if actual != size or not MIN_RING_BYTES <= size <= MAX_RING_BYTES:
            raise ProtocolError(f"ring memory of {actual} bytes where {size} were announced")
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except (OSError, ValueError) as error:
        raise ProtocolError(f"ring memory cannot be mapped: {error}") from error


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Decode what a peer sent; any fault in it is a :class:`ProtocolError`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"undecodable message: {error}") from error


class RingWriter:
    """The writing end. ``written`` and ``consumed`` are absolute byte positions."""

    def __init__(self, memory: mmap.mmap, kind: bytes, generation: int) -> None:
        self._memory = memory
        self.size = len(memory)
        self._kind = kind
        self._generation = generation
        self._reserve = self.size // 8
        self.written = 0
        self.consumed = 0

    @property
    def free(self) -> int:
        """Bytes that may be written, the reserve for urgent frames included."""
        return self.size - (self.written - self.consumed)

    def write(self, payload: bytes, *, urgent: bool = False) -> bool:
        """Append one frame, or return False if there is no room now. Only urgent frames may use the last eighth.

        A frame is at most half the ring, so that any frame fits once the reader has caught up
        (see :attr:`RingReader.announce_after`). Raises :class:`FrameTooLargeError` beyond that.
        """
        self.check_size(payload)
        length = _HEADER.size + len(payload)
        if length + (0 if urgent else self._reserve) > self.free:
            return False
        frame = _HEADER.pack(self._kind, len(payload), self._generation) + payload
        start = self.written % self.size
        first = min(length, self.size - start)
        self._memory[start : start + first] = frame[:first]
        self._memory[: length - first] = frame[first:]
        self.written += length
        return True

    def check_size(self, payload: bytes) -> None:
        """Raise :class:`FrameTooLargeError` for a payload that no state of the ring would take."""
        length = _HEADER.size + len(payload)
        if length > self.size // 2:
            raise FrameTooLargeError(f"frame of {length} bytes in a ring of {self.size}: at most half fits")

    def acknowledge(self, consumed: int) -> None:
        """Take the reader's position. Raises :class:`ProtocolError` if it runs backwards or ahead of the writer."""
        if not self.consumed <= consumed <= self.written:
            raise ProtocolError(f"consumed position {consumed} is outside {self.consumed}..{self.written}")
        self.consumed = consumed

    def close(self) -> None:
        self._memory.close()


class RingReader:
    """The reading end. ``published`` and ``consumed`` are absolute byte positions."""

    def __init__(self, memory: mmap.mmap, kind: bytes, generation: int) -> None:
        self._memory = memory
        self._size = len(memory)
        self._kind = kind
        self._generation = generation
        self.published = 0
        self.consumed = 0

    @property
    def announce_after(self) -> int:
        """Bytes consumed after which the writer must be told: a quarter, so an idle ring looks 3/4 free to it."""
        return self._size // 4

    def publish(self, written: int) -> None:
        """Take the writer's position. Raises :class:`ProtocolError` if it runs backwards or laps the reader."""
        if not self.published <= written <= self.consumed + self._size:
            raise ProtocolError(f"written position {written} is outside {self.published}..{self.consumed + self._size}")
        self.published = written

    def read(self) -> bytes | None:
        """The next frame's payload, or None if all that was published is read. Raises :class:`ProtocolError`."""
        available = self.published - self.consumed
        if not available:
            return None
        if available < _HEADER.size:
            raise ProtocolError(f"published {available} bytes, less than a frame's header")
        kind, length, generation = _HEADER.unpack(self._copy(self.consumed, _HEADER.size))
        if kind != self._kind:
            raise ProtocolError(f"frame of kind {kind!r}, not {self._kind!r}")
        if generation != self._generation:
            raise ProtocolError(f"frame of generation {generation}, not {self._generation}")
        if length > available - _HEADER.size:
            raise ProtocolError(f"frame of {length} bytes where {available - _HEADER.size} are published")
        payload = self._copy(self.consumed + _HEADER.size, length)
        self.consumed += _HEADER.size + length
        return payload

    def _copy(self, position: int, length: int) -> bytes:
        start = position % self._size
        end = start + length
        if end <= self._size:
            return self._memory[start:end]
        return self._memory[start:] + self._memory[: end - self._size]

    def close(self) -> None:
        self._memory.close()


class Channel(Generic[T]):
    """One end of a connection: a ring to write, a ring to read messages of type ``T`` from, and the socket of both.

    The socket is non-blocking and SOCK_SEQPACKET. Its packets carry both absolute positions, so a full socket
    buffer delays a packet but loses nothing: the next one says all.
    """

    def __init__(
        self, sock: socket.socket, writer: RingWriter, reader: RingReader, decoder: msgspec.msgpack.Decoder[T]
    ) -> None:
        self.sock = sock
        self._writer = writer
        self._reader = reader
        self._decoder = decoder
        self._announced_written = 0
        self._announced_consumed = 0

    @property
    def roomy(self) -> bool:
        """Whether at least half of the ring we write is free."""
        return self._writer.free * 2 >= self._writer.size

    def check_size(self, payload: bytes) -> None:
        """See :meth:`RingWriter.check_size`."""
        self._writer.check_size(payload)

    def write(self, payload: bytes, *, urgent: bool = False) -> bool:
        """Append a frame without telling the peer yet; see :meth:`RingWriter.write` and :meth:`publish`."""
        return self._writer.write(payload, urgent=urgent)

    def publish(self) -> bool:
        """Tell the peer how far we wrote and read, if it needs to know. False: the socket is full, try again.

        A peer that is gone is no error here: the end shows in :meth:`receive`, behind what it wrote before.
        """
        written, consumed = self._writer.written, self._reader.consumed
        if written == self._announced_written and consumed - self._announced_consumed < self._reader.announce_after:
            return True
        try:
            self.sock.send(_POSITIONS.pack(_POSITIONS_TAG, written, consumed))
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        self._announced_written, self._announced_consumed = written, consumed
        return True

    def receive(self) -> bool:
        """Take in the positions that have arrived. False: the peer has closed, and what it published can be read.

        Raises :class:`ProtocolError` on anything but valid positions.
        """
        for _ in range(_PACKETS_PER_RECEIVE):
            try:
                packet = self.sock.recv(_POSITIONS.size + 1)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue  # the peer left packets of ours unread; its own packets still stand behind this error
            if not packet:
                return False
            if len(packet) != _POSITIONS.size or not packet.startswith(_POSITIONS_TAG):
                raise ProtocolError(f"packet of {len(packet)} bytes is no position packet")
            _, written, consumed = _POSITIONS.unpack(packet)
            self._reader.publish(written)
            self._writer.acknowledge(consumed)
        return True

    def messages(self, budget_bytes: int = MAX_RING_BYTES) -> Iterator[T]:
        """Decode published messages, stopping early once ``budget_bytes`` were read. Raises :class:`ProtocolError`."""
        stop = self._reader.consumed + budget_bytes
        while self._reader.consumed < stop and (payload := self._reader.read()) is not None:
            yield decode(self._decoder, payload)

    @property
    def unread(self) -> bool:
        """Whether published messages are left."""
        return self._reader.consumed < self._reader.published

    def close(self) -> None:
        """Close the socket and unmap both rings."""
        self.sock.close()
        self._writer.close()
        self._reader.close()
