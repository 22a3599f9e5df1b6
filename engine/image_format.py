"""An adapter's image in a file, and reading it back.

File, little-endian: head, one record per (layer, group), zeros up to 4096, then the stream.

    head    magic 8s | version u32 | dtype u32 | digest 32s | spec fingerprint 16s | layers u32 | groups u32 |
            payload bytes u64 | payload checksum u64 (image_check.py) |
            crc32 of all before the stream, this field 0, u32
    record  rank u32 | bit mask of the adapted projections u32 | elements of a slice u32 | scale f32 × 3
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from stencilpress.engine.image_check import BLOCK_BYTES, block_digest, combined
from stencilpress.engine.spec import DTYPE_BYTES, Dtype

MAGIC = b"STENCIL\n"
VERSION = 2
"""Part of the file's name: an image of another version is not found, and built anew from the upload."""
PAYLOAD_ALIGN = 4096
MAX_PROJECTIONS = 3
"""Projections of a group that a record and a slice table have room for."""
MAX_RECORDS = 1 << 16
UNLOCKED_S = 1.0
"""Far more than passes from the making of a file to its lock."""
KINDS_REMEMBERED = 256
"""Adapters of one rank and one set of projections have the same records; what follows from those is worked out once."""

_HEAD = struct.Struct("<8sII32s16sIIQQI")
_RECORD = struct.Struct("<IIIfff")
_DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
STORED: dict[Dtype, np.dtype] = {  # bf16 has no numpy type: its bits are stored as uint16
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}

Bytes = npt.NDArray[np.uint8]


class Each(Protocol):
    """``map`` over block starts, in order."""

    def __call__(self, work: Callable[[int], bytes], starts: Iterable[int], /) -> Iterable[bytes]: ...


class ImageError(ValueError):
    """An image that is damaged, of another adapter or base, or too large for the pool's pages."""


@dataclass(frozen=True, slots=True)
class Record:
    """What an adapter does to one (layer, group). Rank 0: nothing, and all else is 0.

    Bit p of ``mask`` is set when projection p of the group is adapted; ``scales[p]`` is its scale, in fp32.
    """

    rank: int = 0
    mask: int = 0
    slice_elems: int = 0
    scales: tuple[float, ...] = (0.0,) * MAX_PROJECTIONS


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """All of an image but its stream. ``records[layer * groups + group]``."""

    digest: str
    fingerprint: str
    dtype: Dtype
    layers: int
    groups: int
    records: tuple[Record, ...]
    payload_checksum: int

    @property
    def max_rank(self) -> int:
        return max(record.rank for record in self.records)

    @property
    def payload_bytes(self) -> int:
        return sum(record.rank * record.slice_elems for record in self.records) * DTYPE_BYTES[self.dtype]

    @property
    def payload_offset(self) -> int:
        """Where the stream begins in the file."""
        return payload_offset(len(self.records))


@dataclass(frozen=True, slots=True)
class Image:
    """An image in memory. ``payload`` is the stream, uint8 ``(header.payload_bytes,)``."""

    header: ImageHeader
    payload: Bytes


def image_name(fingerprint: str) -> str:
    """The file's name in an adapter's folder."""
    return f"image-{fingerprint}.v{VERSION}.bin"


def remove_outdated(folder: Path, fingerprint: str) -> None:
    """Delete a base's images of other versions of the format, once there is one of this version."""
    for path in folder.glob(f"image-{fingerprint}*.bin"):
        if path.name != image_name(fingerprint):
            path.unlink(missing_ok=True)


def unfinished_name(path: Path) -> Path:
    """A new name beside an image's own, for whoever builds it: several engines may be at it."""
    return path.with_suffix(f".building-{secrets.token_hex(4)}")


def lock_unfinished(file: BinaryIO) -> None:
    """Show that somebody writes a file, for as long as that process lives and has it open."""
    with suppress(OSError):  # a file system without locks: then what is left stays
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_unfinished(folder: Path) -> None:
    """Delete what those have left who were killed while they built an image in an adapter's folder."""
    for path in folder.glob("image-*.building-*"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file.fileno()).st_mtime > UNLOCKED_S:
                path.unlink()


def payload_offset(num_records: int) -> int:
    """The size of head and records, rounded up so that the stream can be read with direct I/O."""
    return -(-(_HEAD.size + num_records * _RECORD.size) // PAYLOAD_ALIGN) * PAYLOAD_ALIGN


def encode_header(header: ImageHeader) -> bytes:
    """The first ``header.payload_offset`` bytes of the file."""
    records = b"".join(_RECORD.pack(r.rank, r.mask, r.slice_elems, *r.scales) for r in header.records)
    rest = records.ljust(header.payload_offset - _HEAD.size, b"\0")
    return _pack_head(header, zlib.crc32(rest, zlib.crc32(_pack_head(header, 0)))) + rest


def _pack_head(header: ImageHeader, crc32: int) -> bytes:
    return _HEAD.pack(
        MAGIC,
        VERSION,
        _DTYPES.index(header.dtype),
        bytes.fromhex(header.digest),
        header.fingerprint.encode("ascii"),
        header.layers,
        header.groups,
        header.payload_bytes,
        header.payload_checksum,
        crc32,
    )


def new_buffer(size_bytes: int) -> Bytes:
    """Ordinary host memory for a stream."""
    return np.empty(size_bytes, np.uint8)


def read_image(
    path: Path,
    *,
    digest: str,
    fingerprint: str,
    allocate: Callable[[int], Bytes] = new_buffer,
    each: Each = map,
) -> Image:
    """Read and verify an image. ``allocate(bytes)`` gives the memory for the stream (pinned, for instance).

    ``each`` as in :meth:`ImageFile.read`. Raises as that and as :func:`open_image` does.
    """
    with open_image(path, digest=digest, fingerprint=fingerprint) as file:
        return file.read(allocate(file.header.payload_bytes), each=each)


@contextmanager
def open_image(path: Path, *, digest: str, fingerprint: str) -> Iterator[ImageFile]:
    """Open an image and verify its header.

    Raises :class:`ImageError` for damage and for another adapter's or base's image, ``OSError`` when the file cannot
    be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        header = _read_header(file, size)
        if header.digest != digest:
            raise ImageError(f"image is of adapter {header.digest[:12]}, expected {digest[:12]}")
        if header.fingerprint != fingerprint:
            raise ImageError(f"image is for base {header.fingerprint}, expected {fingerprint}")
        yield ImageFile(header, file.fileno())


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An open image whose header is sound. Read, not mapped: a file that shrinks under a mapping kills the process."""

    header: ImageHeader
    fd: int

    def read(self, payload: Bytes, *, each: Each = map, landed: Callable[[int], None] = lambda _: None) -> Image:
        """Read the stream into ``payload`` and verify it.

        ``each`` is ``map``, or an executor's: blocks of the stream are read and checked independently of each other.
        ``landed(start)`` is called when one is in place, on whatever thread read it; what it holds is verified at the
        end. Raises :class:`ImageError` for damage of any kind, ``OSError`` when the file cannot be read.
        """

        def read(start: int) -> bytes:
            digest = _read_block(self.fd, self.header.payload_offset, payload.data, start)
            landed(start)
            return digest

        if combined(each(read, range(0, len(payload), BLOCK_BYTES))) != self.header.payload_checksum:
            raise ImageError("checksum of the weights differs: the image is damaged on disk")
        return Image(self.header, payload)


def _read_header(file: BinaryIO, file_bytes: int) -> ImageHeader:
    head = _read_exactly(file, _HEAD.size)
    magic, version, dtype, digest, fingerprint, layers, groups, payload_bytes, checksum, crc32 = _HEAD.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise ImageError(f"not an adapter image of version {VERSION}")
    if not 0 < layers * groups <= MAX_RECORDS:
        raise ImageError(f"{layers} layers of {groups} groups are out of range")
    rest = _read_exactly(file, payload_offset(layers * groups) - _HEAD.size)
    if zlib.crc32(rest, zlib.crc32(head[:-4] + bytes(4))) != crc32:
        raise ImageError("checksum of the header differs: the image is damaged on disk")
    if dtype >= len(_DTYPES):
        raise ImageError(f"unknown dtype code {dtype}")
    header = ImageHeader(
        digest.hex(),
        fingerprint.decode("ascii", "replace"),
        _DTYPES[dtype],
        layers,
        groups,
        _decode_records(rest[: layers * groups * _RECORD.size]),
        checksum,
    )
    expected = header.payload_offset + header.payload_bytes
    if payload_bytes != header.payload_bytes or file_bytes != expected:
        raise ImageError(f"image has {file_bytes} bytes, expected {expected}")
    return header


@lru_cache(KINDS_REMEMBERED)
def _decode_records(data: bytes) -> tuple[Record, ...]:
    return tuple(_decode_record(*fields) for fields in _RECORD.iter_unpack(data))


def _decode_record(rank: int, mask: int, slice_elems: int, *scales: float) -> Record:
    used = rank > 0
    sound = used == (mask > 0) == (slice_elems > 0) and mask < 1 << MAX_PROJECTIONS and slice_elems % 8 == 0
    if not sound or not all(math.isfinite(scale) for scale in scales):
        raise ImageError(f"record with rank {rank}, mask {mask}, slice of {slice_elems} is not valid")
    return Record(rank, mask, slice_elems, scales)


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise ImageError("image ends within its header")
    return data


def _read_block(fd: int, offset: int, payload: memoryview, start: int) -> bytes:
    """Read one block of the stream into its place; returns its digest, taken while it is in the cache."""
    block = rest = payload[start : start + BLOCK_BYTES]
    while rest:
        count = os.preadv(fd, [rest], offset + start + len(block) - len(rest))
        if not count:
            raise ImageError("image ends within its weights")
        rest = rest[count:]
    return block_digest(block)
