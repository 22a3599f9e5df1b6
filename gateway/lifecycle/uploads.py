"""Uploads in parts: they survive a lost connection and the end of the gateway.

An upload is a folder below ``<data>/v1/uploads``: the files as far as they have come, and ``upload.json``, which says
how far. A part counts once its SHA-256 has been checked, it is on disk and ``upload.json`` says so; what a dead process
left behind that is cut off by the next part. Whoever writes holds a lock on the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec

from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.archive import ARCHIVE_NAME
from stencilpress.gateway.blobs import WRITE_BYTES, Staging, storage_errors
from stencilpress.gateway.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    RequestTooLargeError,
    TooManyUploadsError,
)
from stencilpress.gateway.intake_records import MatchedProjection
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

FILES = {"archive": ARCHIVE_NAME, CONFIG_NAME: CONFIG_NAME, WEIGHTS_NAME: WEIGHTS_NAME}
"""What a part may belong to, and the name that the file has in a staging folder."""
MAX_PART_BYTES = 256 << 20
MAX_OPEN_PER_TENANT = 8
LIFETIME_S = 24 * 3600.0
"""From the creation to the end of an upload that is not completed, and of the memory of one that is."""

_STATE = "upload.json"
_ID = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """How far an upload is. ``received_bytes`` is by file; ``result`` is the version that it became, or ""."""

    id: str
    tenant_id: int
    adapter: str
    max_bytes: int
    expires_at: float
    """Seconds since the epoch."""
    assert_base: bool = False
    promote: bool | None = None
    received_bytes: dict[str, int] = {}
    sealed: bool = False
    """It was completed once: nothing more is written to its files, which a version may share."""
    result: str = ""
    created: bool = False
    """Whether that version was new then, and the next two: what else its client was told, or was to be."""
    promoted: bool = False
    modules: tuple[MatchedProjection, ...] = ()

    @property
    def expires(self) -> datetime:
        """``expires_at`` as an instant."""
        return datetime.fromtimestamp(self.expires_at, UTC)


class UploadStore:
    """The uploads of a data folder. Any number of processes may use one."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = root / "uploads"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clock = clock

    async def create(
        self, tenant_id: int, adapter: str, max_bytes: int, *, assert_base: bool = False, promote: bool | None = None
    ) -> Upload:
        """Begin an upload. Raises :class:`TooManyUploadsError`, :class:`StorageFullError`."""
        upload = Upload(
            id=secrets.token_hex(16),
            tenant_id=tenant_id,
            adapter=adapter,
            max_bytes=max_bytes + MAX_CONFIG_BYTES,
            expires_at=self._clock() + LIFETIME_S,
            assert_base=assert_base,
            promote=promote,
        )
        with storage_errors():
            await asyncio.to_thread(self._create, upload)
        return upload

    async def get(self, tenant_id: int, upload_id: str) -> Upload:
        """Raises :class:`NotFoundError`, also for another tenant's and for one that has expired."""
        return await asyncio.to_thread(self._read, tenant_id, upload_id)

    async def put(
        self, tenant_id: int, upload_id: str, file: str, offset: int, sha256: str, chunks: AsyncIterable[bytes]
    ) -> Upload:
        """Add a part that begins at ``offset``, which is where the file ends now; ``sha256`` is the part's, in hex.

        Raises :class:`NotFoundError`, :class:`InvalidRequestError` (file, digest), :class:`ConflictError` for another
        offset (``wrong_offset``), a completed upload or one that is being written (``upload_busy``),
        :class:`RequestTooLargeError`, :class:`StorageFullError`. Then nothing of the part counts.
        """
        if file not in FILES:
            raise InvalidRequestError(f"file: {file[:64]!r} is none of {', '.join(FILES)}", param="file")
        _check_sha256("sha256", sha256)
        async with self._writing(tenant_id, upload_id) as (folder, upload):
            _check_open(upload)
            received = upload.received_bytes.get(file, 0)
            if offset != received:
                text = f"offset: {file} has {received} bytes, so the next part begins there"
                raise ConflictError(text, param="offset", code="wrong_offset")
            limit = _room(upload, file)
            size = await _write_part(folder / FILES[file], offset, limit, sha256, chunks)
            grown = msgspec.structs.replace(upload, received_bytes={**upload.received_bytes, file: offset + size})
            await asyncio.to_thread(_save, folder, grown)
            return grown

    @contextlib.asynccontextmanager
    async def completing(self, tenant_id: int, upload_id: str, sha256: Mapping[str, str]) -> AsyncIterator[Completion]:
        """The whole upload, once the SHA-256 of each file has been compared with what the client says.

        Raises :class:`NotFoundError`, :class:`InvalidRequestError` (a file is missing or another one), and
        :class:`ConflictError`.
        """
        async with self._writing(tenant_id, upload_id) as (folder, upload):
            if not upload.result:
                _check_files(upload, sha256)
                for file, expected in sha256.items():
                    found = await asyncio.to_thread(_digest_of, folder / FILES[file], upload.received_bytes[file])
                    if found != expected:
                        text = f"sha256: that of {file} is {found}"
                        raise InvalidRequestError(text, param="sha256", code="digest_mismatch")
            yield Completion(folder, upload)

    async def remove(self, tenant_id: int, upload_id: str) -> None:
        """Give an upload up. Raises :class:`NotFoundError`, :class:`ConflictError` while it is being written."""
        async with self._writing(tenant_id, upload_id) as (folder, _):
            await asyncio.to_thread(shutil.rmtree, folder)

    async def clean(self) -> int:
        """Remove what has expired; returns how many. Call it now and then."""
        return await asyncio.to_thread(self._clean)

    def _create(self, upload: Upload) -> None:
        mine = [other for other in self._all() if other.tenant_id == upload.tenant_id and not other.result]
        if len(mine) >= MAX_OPEN_PER_TENANT:
            raise TooManyUploadsError(
                f"This tenant has {len(mine)} unfinished uploads, the most it may have; complete or delete one."
            )
        folder = self._folder / upload.id
        folder.mkdir(mode=0o700)
        _save(folder, upload)

    def _all(self) -> list[Upload]:
        found = []
        for folder in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                upload = _load(folder)
                if upload.expires_at > self._clock():
                    found.append(upload)
        return found

    def _read(self, tenant_id: int, upload_id: str) -> Upload:
        if _ID.fullmatch(upload_id):
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                upload = _load(self._folder / upload_id)
                if upload.tenant_id == tenant_id and upload.expires_at > self._clock():
                    return upload
        raise NotFoundError("upload: does not exist", param="upload")

    @contextlib.asynccontextmanager
    async def _writing(self, tenant_id: int, upload_id: str) -> AsyncIterator[tuple[Path, Upload]]:
        """The folder and its state, for one writer at a time."""
        await self.get(tenant_id, upload_id)
        folder = self._folder / upload_id
        lock = _try_lock(folder)
        if lock is None:
            raise ConflictError("upload: another request is writing to it", param="upload", code="upload_busy")
        try:
            with storage_errors():
                yield folder, await self.get(tenant_id, upload_id)
        finally:
            os.close(lock)

    def _clean(self) -> int:
        removed = 0
        for folder in self._folder.iterdir():
            try:
                expired = _load(folder).expires_at <= self._clock()
            except (FileNotFoundError, msgspec.DecodeError):  # its creation never ended
                expired = folder.stat().st_mtime + LIFETIME_S <= self._clock()
            lock = _try_lock(folder) if expired else None
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                removed += 1
        return removed


class Completion:
    """A whole upload on its way to a version."""

    def __init__(self, folder: Path, upload: Upload) -> None:
        self.upload = upload
        self._folder = folder

    @property
    def archive(self) -> str:
        """The name of the archive in the staging folder, or ""."""
        return ARCHIVE_NAME if "archive" in self.upload.received_bytes else ""

    async def move_to(self, staging: Staging) -> None:
        """Let the files appear in a staging folder. They stay here too until :meth:`end`: a second try is possible."""
        await asyncio.to_thread(_save, self._folder, msgspec.structs.replace(self.upload, sealed=True))
        for file in self.upload.received_bytes:
            await asyncio.to_thread(os.link, self._folder / FILES[file], staging.folder / FILES[file])

    async def end(
        self, result: str, *, created: bool, promoted: bool, modules: tuple[MatchedProjection, ...] = ()
    ) -> None:
        """Keep nothing but what became of the upload, for a client that missed the answer."""
        facts = {"result": result, "created": created, "promoted": promoted, "modules": modules}
        await asyncio.to_thread(self._end, msgspec.structs.replace(self.upload, **facts))

    async def give_up(self) -> None:
        """Remove an upload that can never become a version."""
        await asyncio.to_thread(shutil.rmtree, self._folder)

    def _end(self, upload: Upload) -> None:
        _save(self._folder, upload)
        for name in FILES.values():
            (self._folder / name).unlink(missing_ok=True)


async def _write_part(path: Path, offset: int, limit: int, sha256: str, chunks: AsyncIterable[bytes]) -> int:
    """Write one part and sync it; returns its size. A part that is not whole is cut off again."""
    file = await asyncio.to_thread(_open_at, path, offset)
    try:
        digest, size, pending = hashlib.sha256(), 0, bytearray()
        async for chunk in chunks:
            size += len(chunk)
            if size > limit:
                raise RequestTooLargeError(f"The part is over the limit: {limit} bytes may still come here.")
            pending += chunk
            if len(pending) >= WRITE_BYTES:
                await asyncio.to_thread(_append, file, digest.update, bytes(pending))
                pending.clear()
        await asyncio.to_thread(_append, file, digest.update, bytes(pending))
        if digest.hexdigest() != sha256:
            raise InvalidRequestError(
                f"sha256: that of the part that arrived is {digest.hexdigest()}; send it again",
                param="sha256",
                code="digest_mismatch",
            )
        await asyncio.to_thread(_sync, file)
        return size
    finally:
        await asyncio.to_thread(file.close)


def _append(file: BinaryIO, update: Callable[[bytes], None], data: bytes) -> None:
    update(data)
    file.write(data)


def _open_at(path: Path, offset: int) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")
    file.truncate(offset)
    file.seek(offset)
    return file


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _room(upload: Upload, file: str) -> int:
    """Bytes that may still come to one of its files in one part."""
    left = upload.max_bytes - sum(upload.received_bytes.values())
    if file == CONFIG_NAME:
        left = min(left, MAX_CONFIG_BYTES - upload.received_bytes.get(file, 0))
    return max(0, min(left, MAX_PART_BYTES))


def _check_open(upload: Upload) -> None:
    if upload.result:
        raise ConflictError(f"upload: it became {upload.result} already", param="upload", code="upload_completed")
    if upload.sealed:
        raise ConflictError("upload: it is being completed", param="upload", code="upload_completed")


def _check_files(upload: Upload, sha256: Mapping[str, str]) -> None:
    """An archive, or both files; and the client speaks of just those."""
    have = set(upload.received_bytes)
    if have not in ({"archive"}, {CONFIG_NAME, WEIGHTS_NAME}):
        text = (
            f"has {', '.join(sorted(have)) or 'nothing'}; it needs {CONFIG_NAME} and {WEIGHTS_NAME}, or archive alone"
        )
        raise InvalidRequestError(f"upload: {text}", param="upload", code="incomplete_upload")
    if set(sha256) != have:
        raise InvalidRequestError(f"sha256: expected one for each of {', '.join(sorted(have))}", param="sha256")
    for file, digest in sha256.items():
        _check_sha256(f"sha256.{file}", digest)


def _check_sha256(field: str, text: str) -> None:
    if not _SHA256.fullmatch(text):
        raise InvalidRequestError(f"{field}: expected 64 lower-case hexadecimal digits", param=field)


def _digest_of(path: Path, size: int) -> str:
    """Of the part that counts; what a dead process left behind it is cut off."""
    digest = hashlib.sha256()
    with path.open("r+b") as file:
        file.truncate(size)
        while chunk := file.read(WRITE_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _load(folder: Path) -> Upload:
    return msgspec.json.decode((folder / _STATE).read_bytes(), type=Upload)


def _save(folder: Path, upload: Upload) -> None:
    """Whole at any moment, and durable when it returns."""
    fresh = folder / f"{_STATE}.new"
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(upload))
        _sync(file)
    fresh.replace(folder / _STATE)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _try_lock(folder: Path) -> int | None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFoundError("upload: does not exist", param="upload") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
