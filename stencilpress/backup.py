"""Backups of the data folder: one tar file with the catalog as of one moment, the adapters, and a digest of each file.

Taken while a server runs. Adapters never change once they are there, and the catalog is copied before them, so every
version that the copy names has its files. The base model is not included: it is pulled again.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from stencilpress import __version__
from stencilpress.settings import DataFolder

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 30
CATALOG = "catalog.db"
_COPY_BYTES = 1 << 20
_KNOWN = re.compile(r"catalog\.db|demo_key|adapters/[0-9a-f]{64}/[A-Za-z0-9][A-Za-z0-9._-]*")


class BackupError(Exception):
    """Why a backup cannot be made or restored, in words for the operator."""


class FileDigest(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The last member of a backup: what the others must be."""

    format: int
    stencilpress: str
    created: datetime
    files: dict[str, FileDigest]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a backup holds. ``sha256`` is that of its manifest, and so of everything."""

    sha256: str
    adapters: int
    bytes: int
    has_catalog: bool


def back_up(data: DataFolder, catalog: Path | None, target: Path) -> Summary:
    """Write a backup to ``target``, whole or not at all, and read it again. ``catalog`` None leaves the catalog out.

    Raises :class:`BackupError`, also for a target that exists.
    """
    if target.exists():
        raise BackupError(f"{target} exists")
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)  # it holds the hashes of keys
            _write(file, data, catalog)
            file.flush()
            os.fsync(file.fileno())
        summary = check(partial)
        os.link(partial, target)  # unlike a rename it overwrites nothing
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"the backup cannot be written to {target}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return summary


def check(source: Path) -> Summary:
    """Read a whole backup and compare every file with its digest. Raises :class:`BackupError`."""
    return _read(source, None)


def restore(source: Path, data: DataFolder) -> Summary:
    """Unpack a backup into a data folder that is empty, whole or not at all. Raises :class:`BackupError`."""
    if any(data.path.iterdir()):
        raise BackupError(f"{data.path} is not empty: restore into a new data folder, then pull the base model")
    try:
        with tempfile.TemporaryDirectory(prefix=".restore-", dir=data.root) as folder:
            unpacked = Path(folder) / "v1"
            unpacked.mkdir(mode=0o700)
            summary = _read(source, unpacked)
            os.sync()
            unpacked.rename(data.path)  # replaces the empty folder in one step
    except OSError as error:
        raise BackupError(f"the backup cannot be restored to {data.root}: {error}") from error
    return summary


def _write(file: IO[bytes], data: DataFolder, catalog: Path | None) -> None:
    files: dict[str, FileDigest] = {}
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        if catalog is not None:
            with tempfile.TemporaryDirectory(dir=Path(file.name).parent, prefix=".catalog-") as folder:
                copy = Path(folder) / CATALOG
                _copy_catalog(catalog, copy)
                files[CATALOG] = _add(archive, copy, CATALOG)
        for path in _blob_files(data):
            name = str(path.relative_to(data.path))
            try:
                files[name] = _add(archive, path, name)
            except FileNotFoundError:  # collected as garbage since it was listed
                continue
        manifest = Manifest(FORMAT, __version__, datetime.now(UTC), files)
        encoded = msgspec.json.format(msgspec.json.encode(manifest))
        header = tarfile.TarInfo(MANIFEST)
        header.size = len(encoded)
        archive.addfile(header, io.BytesIO(encoded))


def _copy_catalog(source: Path, target: Path) -> None:
    """The catalog as of one moment, while others read and write it."""
    if not source.exists():
        raise BackupError(f"there is no catalog at {source}")
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it


def _blob_files(data: DataFolder) -> Iterator[Path]:
    if data.demo_key.exists():
        yield data.demo_key
    for path in sorted(data.adapters.glob("*/*")):
        if path.is_file() and _KNOWN.fullmatch(str(path.relative_to(data.path))):
            yield path


def _add(archive: tarfile.TarFile, path: Path, name: str) -> FileDigest:
    """Append a file as it is when it is opened."""
    with path.open("rb") as file:
        header = tarfile.TarInfo(name)
        header.size = os.fstat(file.fileno()).st_size
        header.mode = 0o600
        header.mtime = int(os.fstat(file.fileno()).st_mtime)
        hashed = _Hashed(file)
        archive.addfile(header, hashed)
    return FileDigest(header.size, hashed.hexdigest())


class _Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def _read(source: Path, target: Path | None) -> Summary:
    """Read all of a backup, and write its files below ``target`` where there is one."""
    found: dict[str, FileDigest] = {}
    manifest = b""
    try:
        with tarfile.open(source, mode="r:") as archive:
            for member in archive:
                name = member.name
                if not member.isreg() or manifest or not (name == MANIFEST or _KNOWN.fullmatch(name)) or name in found:
                    raise BackupError(f"{source} is no backup of Stencilpress: it holds {name!r}")
                content = archive.extractfile(member)
                assert content is not None  # noqa: S101 - it is a regular file
                if name == MANIFEST:
                    manifest = content.read(MAX_MANIFEST_BYTES)
                else:
                    found[name] = _unpack(content, None if target is None else target / name)
    except (tarfile.TarError, EOFError) as error:
        raise BackupError(f"{source} is no whole backup: {error}") from error
    except FileNotFoundError:
        raise BackupError(f"there is no file {source}") from None
    _compare(source, _decoded(source, manifest), found)
    return Summary(
        sha256=hashlib.sha256(manifest).hexdigest(),
        adapters=len({name.split("/")[1] for name in found if name.startswith("adapters/")}),
        bytes=sum(file.bytes for file in found.values()),
        has_catalog=CATALOG in found,
    )


def _unpack(content: IO[bytes], path: Path | None) -> FileDigest:
    hashed = _Hashed(content)
    size = 0
    if path is None:
        while piece := hashed.read(_COPY_BYTES):
            size += len(piece)
    else:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            shutil.copyfileobj(hashed, file, _COPY_BYTES)
            size = file.tell()
    return FileDigest(size, hashed.hexdigest())


def _decoded(source: Path, manifest: bytes) -> Manifest:
    if not manifest:
        raise BackupError(f"{source} is no whole backup: its end is missing")
    try:
        decoded = msgspec.json.decode(manifest, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BackupError(f"{source} is no backup of Stencilpress: {error}") from error
    if decoded.format != FORMAT:
        raise BackupError(f"{source} has format {decoded.format}; this version reads {FORMAT}")
    return decoded


def _compare(source: Path, manifest: Manifest, found: dict[str, FileDigest]) -> None:
    wrong = sorted(name for name in manifest.files.keys() | found.keys() if manifest.files.get(name) != found.get(name))
    if wrong:
        raise BackupError(f"{source} is damaged: {', '.join(wrong[:5])}{' and more' * (len(wrong) > 5)}")
