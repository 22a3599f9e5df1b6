"""Adapter blobs on disk: one folder per digest, written in ``staging/`` and renamed when whole.

A kill at any moment leaves either no blob or a whole one. A staging folder is locked by the process that
writes it, so whoever starts next can tell what a dead process left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.archive import ARCHIVE_NAME
from stencilpress.gateway.intake_records import Accepted
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

WRITE_BYTES = 1 << 20
"""Uploads are gathered to this size before a thread writes them: tiny chunks must not cost a switch each."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_STORAGE_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_digest(text: str) -> bool:
    """Whether this could be the digest of an adapter."""
    return _DIGEST.fullmatch(text) is not None


class UploadError(ValueError):
    """An upload that breaks the rules of transfer; codes ``bad_file_name``, ``duplicate_file``, ``too_large``, and
    ``missing_file``, ``unreadable_file``, ``not_a_file`` from :func:`open_regular`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class StorageFullError(OSError):
    """The disk, or the quota on it, is full. Nothing of the upload stays."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file to upload, through links, of which Hugging Face's cache consists. Raises :class:`UploadError`.

    A pipe or a device is refused, not waited for: it need never end.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UploadError("missing_file", "not in the adapter's folder") from None
    except OSError as error:
        raise UploadError("unreadable_file", f"cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UploadError("not_a_file", "is not a regular file")
    return os.fdopen(fd, "rb")


class BlobStore:
    """The blobs below ``<data>/v1``. Any number of processes may use one store."""

    def __init__(self, root: Path) -> None:
        self.adapters = root / "adapters"
        self.staging = root / "staging"
        for folder in (self.adapters, self.staging):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def folder(self, digest: str) -> Path:
        """Where a blob lies or would lie. Raises ``ValueError`` for anything but a digest: no name is ever a path."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError("not a digest: expected 64 lower-case hexadecimal digits")
        return self.adapters / digest

    async def clean(self) -> int:
        """Remove what uploads of dead processes left. Call it at start-up; returns how many there were."""
        return await asyncio.to_thread(self._clean)

    def _clean(self) -> int:
        removed = 0
        for folder in self.staging.iterdir():
            lock = _try_lock(folder)
            if lock is not None:
                _remove_folder(folder)
                os.close(lock)
                removed += 1
        return removed

    @contextlib.asynccontextmanager
    async def stage(self, max_bytes: int) -> AsyncIterator[Staging]:
        """A folder for one upload of at most ``max_bytes``. What is not published by the end is removed."""
        with storage_errors():
            folder, lock = self._open_staging()
        staging = Staging(self, folder, lock, max_bytes)
        try:
            yield staging
        finally:
            await asyncio.to_thread(staging.discard)

    def _open_staging(self) -> tuple[Path, int]:
        while True:
            folder = self.staging / secrets.token_hex(8)
            folder.mkdir(mode=0o700)
            lock = _try_lock(folder)
            if lock is not None and folder.exists():
                return folder, lock
            if lock is not None:  # a cleaner came between mkdir and lock
                os.close(lock)

    def digests(self) -> frozenset[str]:
        """All that are here. Blocks."""
        return frozenset(entry.name for entry in self.adapters.iterdir() if _DIGEST.fullmatch(entry.name))

    def sizes(self) -> dict[str, tuple[int, float]]:
        """By digest the bytes of a blob's files and when it was used last, in seconds since the epoch. Blocks."""
        found = {}
        for digest in self.digests():
            folder = self.adapters / digest
            with contextlib.suppress(FileNotFoundError):
                size = sum(path.stat().st_size for path in folder.iterdir())
                found[digest] = (size, folder.stat().st_mtime)
        return found

    @contextlib.contextmanager
    def claim(self, digest: str) -> Iterator[bool]:
        """Whether nothing uses a blob, upload or request, and nothing will while the block runs; also if it is gone."""
        folder = self.folder(digest)
        lock = _try_lock(folder)
        try:
            yield lock is not None or not folder.exists()
        finally:
            if lock is not None:
                os.close(lock)

    async def remove(self, digest: str) -> None:
        """Delete a blob, if it exists. It disappears at once and whole; an engine that reads it keeps its open file."""
        await asyncio.to_thread(self._remove, self.folder(digest))

    def _remove(self, folder: Path) -> None:
        doomed = self.staging / secrets.token_hex(8)
        try:
            folder.rename(doomed)
        except FileNotFoundError:
            return
        _sync_folder(self.adapters)
        _remove_folder(doomed)


class Staging:
    """One upload in progress. Only the two files of an adapter, or an archive of them, may come in, each once."""

    def __init__(self, store: BlobStore, folder: Path, lock: int, max_bytes: int) -> None:
        self.folder = folder
        self._store = store
        self._locks = [lock]
        self._max_bytes = max_bytes
        self._received_bytes = 0
        self._moving = threading.Lock()

    async def receive(self, name: str, chunks: AsyncIterable[bytes]) -> int:
        """Write one file as it arrives and sync it to disk; returns its size in bytes.

        Raises :class:`UploadError` for another name, a second file of the name, or too many bytes, counted as
        they come; :class:`StorageFullError` when the disk is full.
        """
        if name not in (CONFIG_NAME, WEIGHTS_NAME, ARCHIVE_NAME):
            raise UploadError("bad_file_name", f"an adapter has the files {CONFIG_NAME} and {WEIGHTS_NAME}")
        limit = MAX_CONFIG_BYTES if name == CONFIG_NAME else self._max_bytes
        size, pending = 0, bytearray()
        with storage_errors():
            async with _new_file(self.folder / name) as file:
                async for chunk in chunks:
                    size += len(chunk)
                    self._received_bytes += len(chunk)
                    if size > limit or self._received_bytes > self._max_bytes:
                        raise UploadError(
                            "too_large", f"{name} is over the limit of {min(limit, self._max_bytes)} bytes"
                        )
                    pending += chunk
                    if len(pending) >= WRITE_BYTES:
                        await asyncio.to_thread(file.write, pending)
                        pending = bytearray()
                await asyncio.to_thread(file.write, pending)
        return size

    async def publish(self, accepted: Accepted) -> bool:
        """Make the folder the blob of its digest, durably; False if there was one, which is then used.

        The blob is locked until the staging ends, so nobody takes it for garbage before its row is written.

        Of an upload of known content only the image is kept: it may be for another base dtype, and it heals
        a damaged one.
        """
        with storage_errors():
            return await asyncio.to_thread(self._publish, self._store.folder(accepted.digest), accepted.image)

    def discard(self) -> None:
        """Remove the folder, unless it was published, and give up the locks. Blocks; waits for a publication that was
        cancelled."""
        with self._moving:
            _remove_folder(self.folder)
            while self._locks:
                os.close(self._locks.pop())

    def _publish(self, blob: Path, image: str) -> bool:
        with self._moving:
            _sync_folder(self.folder)
            while not _rename_new(self.folder, blob):
                lock = _share(blob)
                if lock is None:  # removed just now: rename again
                    continue
                self._locks.append(lock)
                (self.folder / image).replace(blob / image)
                _sync_folder(blob)
                return False
            fcntl.flock(self._locks[0], fcntl.LOCK_SH)  # the folder's own lock has moved with it
            _sync_folder(blob.parent)
            return True


@contextlib.asynccontextmanager
async def _new_file(path: Path) -> AsyncIterator[BinaryIO]:
    """A file that did not exist; on disk when the block ends without an exception.

    It is a buffered file for its lock: after a cancel, ``close`` waits for a thread that still writes.
    """
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    except FileExistsError:
        raise UploadError("duplicate_file", f"{path.name} was sent twice") from None
    try:
        yield file
        await asyncio.to_thread(_sync_file, file)
    finally:
        with contextlib.suppress(OSError):  # a full disk has been reported by the write
            await asyncio.to_thread(file.close)


def _rename_new(folder: Path, blob: Path) -> bool:
    """Rename a folder unless the other name is taken. A link there is an error, not followed."""
    try:
        folder.rename(blob)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Turn what a full disk raises into :class:`StorageFullError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _STORAGE_FULL:
            raise StorageFullError(error.errno, error.strerror) from error
        raise


def _try_lock(folder: Path) -> int | None:
    """Take the lock that tells that a folder is in use; None if it is, or if it is gone or no folder."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _share(blob: Path) -> int | None:
    """Take part in the use of a blob, after whoever publishes or removes it; None if it is gone. A link is an error."""
    try:
        lock = os.open(blob, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        same = os.fstat(lock).st_ino == blob.lstat().st_ino
    except FileNotFoundError:
        same = False
    if same:
        return lock
    os.close(lock)
    return None


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # published, or another cleaner was faster
        shutil.rmtree(folder)


def _sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
