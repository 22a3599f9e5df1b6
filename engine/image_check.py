"""The checksum of an image's stream: fast enough to be part of every load, and of parts that can be checked at once.

It is XXH3-64 over the XXH3-64 of each block of :data:`BLOCK_BYTES`. It guards against damaged disks and torn files;
that an image is the adapter that it claims to be was settled by SHA-256 when it was built.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

BLOCK_BYTES = 4 << 20


def block_digest(block: memoryview) -> bytes:
    """Of one block; other threads run meanwhile."""
    return xxhash.xxh3_64_digest(block)


def combined(digests: Iterable[bytes]) -> int:
    """The stream's checksum from its blocks' digests, in order."""
    return xxhash.xxh3_64_intdigest(b"".join(digests))


class Checksum:
    """The same of a stream that comes in parts of any size."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._block = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        while data:
            part = data[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def value(self) -> int:
        """Of all bytes so far; call it once, at the end."""
        if self._filled:
            self._end_block()
        return combined(self._digests)

    def _end_block(self) -> None:
        self._digests.append(self._block.digest())
        self._block = xxhash.xxh3_64()
        self._filled = 0
