"""Who still uses a blob: a shared lock on its folder, held by each gateway while it has requests on it.

A lock is visible to all processes of the host and goes with the one that held it, however that ended. Purging takes the
exclusive lock, so it comes after the last of them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stencilpress.gateway.blobs import BlobStore


class Leases:
    """The blobs that this process uses. One lock per blob, however many requests there are on it."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._held: dict[str, tuple[int, int | None]] = {}

    @contextmanager
    def hold(self, digest: str) -> Iterator[bool]:
        """Keep a blob while the block runs; "" is the base. False for one that is not here, or is being removed now: if
        it comes back, the next one to ask for it keeps it, for those before as well."""
        if not digest:
            yield True
            return
        count, lock = self._held.get(digest, (0, None))
        stays = True
        if lock is None:
            lock, stays = self._lock(digest)
        self._held[digest] = (count + 1, lock)
        try:
            yield stays
        finally:
            count, lock = self._held[digest]
            if count > 1:
                self._held[digest] = (count - 1, lock)
            else:
                del self._held[digest]
                if lock is not None:
                    os.close(lock)

    def _lock(self, digest: str) -> tuple[int | None, bool]:
        """A lock, if there can be one, and whether the blob is here to stay. A few microseconds on a local disk: no
        thread is worth that."""
        try:
            lock = os.open(self._blobs.folder(digest), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:  # of a link, or a folder that is another user's, nobody takes a lock
            return None, not isinstance(error, FileNotFoundError)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # it is being purged, which a request on it can only find out
            os.close(lock)
            return None, False
        with suppress(OSError):
            os.utime(lock)  # make_room goes by it
        return lock, True
