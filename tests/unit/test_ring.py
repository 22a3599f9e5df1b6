"""Rings: nothing lost, nothing reordered, and nothing that the other side writes is trusted."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stencilpress.engine.ring import (
    MAX_RING_BYTES,
    MIN_RING_BYTES,
    REPLIES,
    REQUESTS,
    FrameTooLargeError,
    ProtocolError,
    RingReader,
    RingWriter,
    create_ring,
    map_ring,
)
from tests.shared_memory import shared_memory_names

SIZE = MIN_RING_BYTES
HEADER_BYTES = 16
LARGEST = SIZE // 2 - HEADER_BYTES
GENERATION = 7


class Pair:
    """Both ends of one ring, and its raw memory as a third mapping."""

    def __init__(self) -> None:
        fd = create_ring("test", SIZE)
        self.writer = RingWriter(map_ring(fd, SIZE, writable=True), REPLIES, GENERATION)
        self.reader = RingReader(map_ring(fd, SIZE, writable=False), REPLIES, GENERATION)
        self.memory = map_ring(fd, SIZE, writable=True)
        os.close(fd)

    def publish(self) -> None:
        self.reader.publish(self.writer.written)

    def acknowledge(self) -> None:
        self.writer.acknowledge(self.reader.consumed)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        self.memory.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


ACTIONS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 200) | st.integers(0, LARGEST), st.booleans()),
    st.tuples(st.just("publish"), st.just(0), st.just(False)),
    st.tuples(st.just("read"), st.integers(1, 10), st.just(False)),
    st.tuples(st.just("acknowledge"), st.just(0), st.just(False)),
)


@given(st.lists(ACTIONS, max_size=120))
def test_any_interleaving_delivers_all_frames_in_order(actions: list[tuple[str, int, bool]]) -> None:
    pair = Pair()
    sent: deque[bytes] = deque()
    try:
        for number, (action, amount, urgent) in enumerate(actions):
            if action == "write":
                payload = bytes([number % 256]) * amount
                if pair.writer.write(payload, urgent=urgent):
                    sent.append(payload)
            elif action == "publish":
                pair.publish()
            elif action == "acknowledge":
                pair.acknowledge()
            else:
                for _ in range(amount):
                    if (got := pair.reader.read()) is not None:
                        assert got == sent.popleft()
        pair.publish()
        while (got := pair.reader.read()) is not None:
            assert got == sent.popleft()
        assert not sent
    finally:
        pair.close()


@given(st.lists(st.integers(0, LARGEST), min_size=1, max_size=40))
def test_a_reader_that_announces_a_quarter_late_never_blocks_the_largest_frame(sizes: list[int]) -> None:
    pair = Pair()
    try:
        announced = 0
        for size in sizes:
            assert pair.writer.write(b"x" * size)
            pair.publish()
            assert pair.reader.read() == b"x" * size
            if pair.reader.consumed - announced >= pair.reader.announce_after:
                announced = pair.reader.consumed
                pair.acknowledge()
    finally:
        pair.close()


@pytest.mark.parametrize("start", range(SIZE - HEADER_BYTES - 4, SIZE + 1))
def test_a_frame_may_wrap_at_any_byte_of_header_or_payload(pair: Pair, start: int) -> None:
    pair.writer.written = pair.writer.consumed = pair.reader.published = pair.reader.consumed = start
    assert pair.writer.write(b"payload")
    pair.publish()
    assert pair.reader.read() == b"payload"
    assert pair.reader.read() is None


def test_a_frame_of_more_than_half_the_ring_is_refused_at_the_sender(pair: Pair) -> None:
    assert pair.writer.write(b"x" * LARGEST)
    with pytest.raises(FrameTooLargeError, match=f"frame of {SIZE // 2 + 1} bytes in a ring of {SIZE}"):
        pair.writer.write(b"x" * (LARGEST + 1))


def test_only_urgent_frames_use_the_reserve(pair: Pair) -> None:
    while pair.writer.write(b"x" * 100):
        pass
    reserve, frame = SIZE // 8, 100 + HEADER_BYTES
    assert reserve <= pair.writer.free < reserve + frame
    for _ in range(reserve // frame):
        assert pair.writer.write(b"x" * 100, urgent=True)
        assert not pair.writer.write(b"")
    while pair.writer.write(b"x" * 100, urgent=True):
        pass
    assert pair.writer.free < frame


def corrupted(offset: int, data: bytes) -> Callable[[Pair], None]:
    def corrupt(pair: Pair) -> None:
        pair.memory[offset : offset + len(data)] = data

    return corrupt


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupted(0, b"\0"),
        corrupted(0, REQUESTS),
        corrupted(4, struct.pack("<I", 6)),
        corrupted(4, struct.pack("<I", 0xFFFFFFFF)),
        corrupted(8, struct.pack("<Q", GENERATION - 1)),
        corrupted(8, struct.pack("<Q", GENERATION + 1)),
        lambda pair: pair.reader.publish(HEADER_BYTES - 1),
        lambda pair: pair.reader.publish(HEADER_BYTES + 4),
        lambda pair: pair.reader.publish(SIZE + 1),
        lambda pair: pair.writer.acknowledge(pair.writer.written + 1),
    ],
    ids=["magic", "kind", "length", "huge", "older", "newer", "half-header", "half-payload", "lapping", "ahead"],
)
def test_every_field_and_position_is_checked(pair: Pair, corrupt: Callable[[Pair], None]) -> None:
    pair.writer.write(b"12345")
    with pytest.raises(ProtocolError):  # noqa: PT012 - some lies show at once, some on reading
        corrupt(pair)
        if not pair.reader.published:
            pair.publish()
        pair.reader.read()


def test_positions_never_run_backwards(pair: Pair) -> None:
    pair.writer.write(b"12345")
    pair.publish()
    pair.reader.read()
    pair.acknowledge()
    with pytest.raises(ProtocolError):
        pair.reader.publish(pair.writer.written - 1)
    with pytest.raises(ProtocolError):
        pair.writer.acknowledge(0)


@given(
    st.lists(st.integers(0, 40), max_size=8),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 2**64 - 1) | st.integers(0, 400),
)
def test_damaged_memory_and_positions_raise_nothing_but_protocol_errors(
    sizes: list[int], damage: list[tuple[int, int]], written: int
) -> None:
    pair = Pair()
    try:
        for size in sizes:
            pair.writer.write(b"x" * size)
        for offset, value in damage:
            pair.memory[offset] = value
        with suppress(ProtocolError):
            pair.reader.publish(written)
            while pair.reader.read() is not None:
                pass
        assert pair.reader.consumed <= pair.reader.published <= SIZE
    finally:
        pair.close()


def test_the_kernel_keeps_a_rings_size() -> None:
    fd = create_ring("test", SIZE)
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def sealed(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def pipe_end() -> int:
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def read_only() -> int:
    fd = create_ring("test", SIZE)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return again


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    "make",
    [
        lambda: sealed(SIZE, 0),
        lambda: sealed(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SHRINK),
        lambda: sealed(SIZE, ALL_SEALS & ~fcntl.F_SEAL_GROW),
        lambda: sealed(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SEAL),
        lambda: sealed(SIZE, ALL_SEALS | fcntl.F_SEAL_WRITE),
        lambda: sealed(SIZE + mmap.PAGESIZE, ALL_SEALS),
        lambda: sealed(SIZE - mmap.PAGESIZE, ALL_SEALS),
        lambda: sealed(0, ALL_SEALS),
        plain_file,
        pipe_end,
        read_only,
    ],
    ids=[
        "unsealed",
        "may-shrink",
        "may-grow",
        "may-seal",
        "unwritable",
        "larger",
        "smaller",
        "empty",
        "plain-file",
        "pipe",
        "read-only",
    ],
)
def test_memory_that_could_fail_later_is_refused_before_it_is_mapped(make: Callable[[], int]) -> None:
    fd = make()
    try:
        with pytest.raises(ProtocolError):
            map_ring(fd, SIZE, writable=True)
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, SIZE - mmap.PAGESIZE, MAX_RING_BYTES + mmap.PAGESIZE])
def test_rings_of_absurd_size_are_refused(size: int) -> None:
    fd = sealed(size, ALL_SEALS)
    try:
        with pytest.raises(ProtocolError):
            map_ring(fd, size, writable=True)
    finally:
        os.close(fd)


def test_rings_leave_no_name_behind() -> None:
    before = shared_memory_names()
    fd = create_ring("test", SIZE)
    memory = map_ring(fd, SIZE, writable=True)
    assert shared_memory_names() == before
    memory.close()
    os.close(fd)
