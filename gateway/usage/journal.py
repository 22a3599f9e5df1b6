"""The spool: every admitted request has a slot in a file that outlives this process, until its row is in the catalog.

A segment is a file of fixed slots, mapped into memory. What is stored there is the kernel's at once: a ``kill -9``
loses nothing of it, and a token costs one store of a number, not a system call. (A power cut may lose the last
seconds.) The owner holds a lock on the file, which ends with the process: a file that can be locked has lost its
owner, and its slots are turned into rows by whoever finds it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stencilpress.gateway.usage.record import Status, UsageRow, at

SLOT_BYTES = 384
SLOTS = 1024
SEGMENT_BYTES = SLOT_BYTES * SLOTS
SUFFIX = ".usage1"
"""The number is the layout's."""

_FREE, _LIVE, _ENDED = 0, 1, 2
_STATE = struct.Struct("<II")  # state, bytes of the admission
_COUNTS = struct.Struct("<QQ")  # delivered, received
_END = struct.Struct("<qiiiiddddd24s")
_COUNTS_AT = 8
COUNTS_WORD = 1
"""Of a slot, the word that counts what was delivered; the next counts what was received."""
_END_AT = 24
_ADMISSION_AT = _END_AT + _END.size + 8 - (_END_AT + _END.size) % 8
SLOT_WORDS = SLOT_BYTES // 8

logger = logging.getLogger(__name__)


class SpoolFullError(Exception):
    """No slot is left, since the catalog has not taken any rows for long."""


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a request when it is admitted; texts are cut to what the catalog keeps."""

    key: bytes
    request_id: str
    tenant_id: int
    key_id: str
    adapter: str
    version: int
    admitted_us: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of a request when it has ended; the fields are those of :class:`UsageRow`."""

    finished_us: int
    status: Status
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float | None
    inter_token_ms: float | None
    queue_ms: float
    cold_start_ms: float
    duration_ms: float
    error_code: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Admission).decode


class Segment:
    """One file of slots. ``words`` is the whole of it in words of eight bytes, for the counters."""

    def __init__(self, path: Path, fd: int) -> None:
        """``fd`` is locked and as long as a segment."""
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, SEGMENT_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self.free = list(range(SLOTS - 1, -1, -1))

    @classmethod
    def create(cls, folder: Path) -> Segment:
        """Raises ``OSError``. All blocks are reserved now: a store into a map cannot be refused for want of space."""
        path = folder / f"{secrets.token_hex(8)}{SUFFIX}"
        new = path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, SEGMENT_BYTES)
            new.rename(path)  # from here on others may look at it
            return cls(path, fd)
        except BaseException:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise

    def admit(self, slot: int, admission: Admission) -> None:
        payload = _encode(admission)
        start = SLOT_BYTES * slot
        if len(payload) > SLOT_BYTES - _ADMISSION_AT:
            raise ValueError(f"an admission of {len(payload)} bytes does not fit a slot")
        self._map[start + _ADMISSION_AT : start + _ADMISSION_AT + len(payload)] = payload
        _COUNTS.pack_into(self._map, start + _COUNTS_AT, 0, 0)
        _STATE.pack_into(self._map, start, _LIVE, len(payload))  # last: a slot is live once all of it is there

    def end(self, slot: int, ending: Ending) -> None:
        start = SLOT_BYTES * slot
        _END.pack_into(
            self._map,
            start + _END_AT,
            ending.finished_us,
            ending.status,
            ending.prompt_tokens,
            ending.cached_tokens,
            0,
            -1.0 if ending.ttft_ms is None else ending.ttft_ms,
            -1.0 if ending.inter_token_ms is None else ending.inter_token_ms,
            ending.queue_ms,
            ending.cold_start_ms,
            ending.duration_ms,
            ending.error_code.encode()[:24],
        )
        struct.pack_into("<I", self._map, start, _ENDED)

    def release(self, slot: int) -> None:
        """The row is in the catalog."""
        struct.pack_into("<I", self._map, SLOT_BYTES * slot, _FREE)
        self.free.append(slot)

    def row(self, slot: int, gaps: bytes | None = None) -> UsageRow | None:
        """The row of a slot, with what was told last if it has not ended; None for a free one.

        Raises ``msgspec.MsgspecError`` for a slot that nobody of ours has written.
        """
        start = SLOT_BYTES * slot
        state, length = _STATE.unpack_from(self._map, start)
        if state == _FREE:
            return None
        admission = _decode(self._map[start + _ADMISSION_AT : start + _ADMISSION_AT + length])
        delivered, received = _COUNTS.unpack_from(self._map, start + _COUNTS_AT)
        if state == _LIVE:
            ending = Ending(admission.admitted_us, Status.LOST, admission.prompt_tokens, 0, None, None, 0.0, 0.0, 0.0)
        else:
            ending = self._ending(start)
        return UsageRow(
            key=admission.key,
            request_id=admission.request_id,
            tenant_id=admission.tenant_id,
            key_id=admission.key_id,
            adapter=admission.adapter,
            version=admission.version,
            admitted_at=at(admission.admitted_us),
            finished_at=at(ending.finished_us),
            status=ending.status.label,
            error_code=ending.error_code,
            prompt_tokens=ending.prompt_tokens,
            cached_tokens=ending.cached_tokens,
            completion_tokens=delivered,
            undelivered_tokens=max(received - delivered, 0),
            ttft_ms=ending.ttft_ms,
            inter_token_ms=ending.inter_token_ms,
            queue_ms=ending.queue_ms,
            cold_start_ms=ending.cold_start_ms,
            duration_ms=ending.duration_ms,
            gaps=gaps,
        )

    def rows(self) -> Iterator[UsageRow]:
        """Of all slots in use; one that cannot be read is logged and left out."""
        for slot in range(SLOTS):
            try:
                row = self.row(slot)
            except (msgspec.MsgspecError, ValueError) as error:
                logger.error("slot %d of %s cannot be read: %s", slot, self.path.name, error)
                continue
            if row is not None:
                yield row

    def close(self, *, remove: bool) -> None:
        """Let go of the file, and delete it if all rows are in the catalog."""
        if remove:
            self.path.unlink(missing_ok=True)
        self.words.release()
        self._map.close()
        os.close(self._fd)

    def _ending(self, start: int) -> Ending:
        finished, status, prompt, cached, _, ttft, gap, queue, cold, duration, code = _END.unpack_from(
            self._map, start + _END_AT
        )
        return Ending(
            finished,
            Status(status),
            prompt,
            cached,
            None if ttft < 0 else ttft,
            None if gap < 0 else gap,
            queue,
            cold,
            duration,
            code.rstrip(b"\0").decode(errors="replace"),
        )


class Journal:
    """The segments of this process, at most ``max_bytes`` of them."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises ``OSError`` if the folder cannot be used."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_segments = max(max_bytes // SEGMENT_BYTES, 1)
        self._segments = [Segment.create(folder)]

    def claim(self, admission: Admission) -> tuple[Segment, int]:
        """A slot that holds the admission. Raises :class:`SpoolFullError`, also when the disk is full."""
        segment = next((one for one in reversed(self._segments) if one.free), None) or self._grow()
        slot = segment.free.pop()
        segment.admit(slot, admission)
        return segment, slot

    def close(self) -> None:
        """Delete the segments whose rows are all in the catalog; the next start takes care of the others."""
        for segment in self._segments:
            segment.close(remove=len(segment.free) == SLOTS)
        self._segments = []

    def _grow(self) -> Segment:
        if len(self._segments) >= self._max_segments:
            raise SpoolFullError(f"{len(self._segments) * SLOTS} requests wait for the catalog")
        try:
            segment = Segment.create(self._folder)
        except OSError as error:
            raise SpoolFullError(f"the spool cannot grow: {error.strerror}") from error
        self._segments.append(segment)
        return segment


def orphans(folder: Path) -> Iterator[Segment]:
    """Segments whose owner is gone, locked for us. Close each; one that is not removed will be found again."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            whole = os.fstat(fd).st_size == SEGMENT_BYTES and path.exists()
        except BlockingIOError:
            whole = False
        if whole:
            yield Segment(path, fd)
        else:
            os.close(fd)
