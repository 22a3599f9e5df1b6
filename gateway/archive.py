"""Taking the two files of an adapter out of a zip or tar archive that somebody sent. Runs in intake's worker.

Nothing is believed: names, kinds and sizes are checked, and bytes are counted as they come out. An archive holds the
two files at its root or in one folder; a README and ``.gitattributes``, which tools put beside them, are passed over.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from stencilpress.engine.image import AdapterError, Finding
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from stencilpress.gateway.strict_json import shown

ARCHIVE_NAME = "upload.archive"
"""The archive's name while it lies in a staging folder."""
ARCHIVE_LABEL = "archive"
"""What findings call it."""
MAX_ENTRIES = 16
MAX_RATIO = 200
"""Bytes out for one byte in; weights do not compress a hundredth as well."""
FREE_BYTES = 4 << 20
"""An archive may always expand to so much."""
READ_BYTES = 1 << 20

_PASSED_OVER = frozenset({"README.md", ".gitattributes"})
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_BROKEN = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    tarfile.TarError,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as the archive describes it. ``problem`` is what speaks against its kind."""

    name: str
    is_folder: bool
    problem: tuple[str, str] | None


def unpack(archive: Path, folder: Path, max_bytes: int) -> list[Finding]:
    """Write the adapter's files into ``folder`` and remove the archive; returns what is wrong with its entries.

    An entry that has a finding is passed over, so that the files beside it can be checked as well. ``max_bytes`` bounds
    all that comes out. Raises :class:`AdapterError` where reading on makes no sense.
    """
    findings, seen = list[Finding](), list[str]()
    try:
        with archive.open("rb") as file:
            kind = _kind(file)
            budget = _Budget(min(max_bytes, FREE_BYTES + MAX_RATIO * archive.stat().st_size), max_bytes)
            for entry, content in _zip_entries(file) if kind == "zip" else _tar_entries(file, kind, budget):
                _take(entry, content, folder, budget, seen, findings)
    except AdapterError as error:
        raise AdapterError([*findings, *error.findings]) from None
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # gzip's own, and an offset of the archive that no file can have
            raise
        raise _refusal("bad_archive", f"cannot be read: {shown(str(error))}") from None
    except _BROKEN as error:
        raise _refusal("bad_archive", f"cannot be read: {shown(str(error))}") from None
    archive.unlink()
    return findings


class _Budget:
    """Counts what comes out of an archive."""

    def __init__(self, left_bytes: int, max_bytes: int) -> None:
        self._left_bytes = left_bytes
        self._is_ratio = left_bytes < max_bytes
        self._max_bytes = max_bytes

    def spend(self, count: int) -> None:
        """Raises :class:`AdapterError` when too much has come out."""
        self._left_bytes -= count
        if self._left_bytes < 0:
            if self._is_ratio:
                raise _refusal("archive_bomb", f"expands to more than {MAX_RATIO} times its size")
            raise _refusal("too_large", f"expands to more than the limit of {self._max_bytes} bytes")


class _Counted:
    """A stream of which every byte that is read counts: also those between a tar's files."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, budget: _Budget) -> None:
        self._stream = stream
        self._budget = budget

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._budget.spend(len(data))
        return data


def _kind(file: BinaryIO) -> str:
    start = file.read(512)
    file.seek(0)
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if start.startswith(b"\x1f\x8b"):
        return "gzip"
    if start[257:262] == b"ustar":
        return "tar"
    raise _refusal("not_an_archive", "is neither a zip nor a tar, plain or gzipped")


def _zip_entries(file: BinaryIO) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            entry = Entry(info.orig_filename, info.is_dir(), _zip_problem(info))
            if entry.is_folder or entry.problem is not None:
                yield entry, None
                continue
            with archive.open(info) as content:
                yield entry, content


def _zip_problem(info: zipfile.ZipInfo) -> tuple[str, str] | None:
    mode = info.external_attr >> 16
    if stat.S_ISLNK(mode):
        return "link", "is a link"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "not_a_file", "is not a regular file"
    if info.flag_bits & 0x1:
        return "encrypted", "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "unsupported_compression", "is compressed by another method than deflate"
    return None


def _tar_entries(file: BinaryIO, kind: str, budget: _Budget) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    with contextlib.ExitStack() as stack:
        counted = _Counted(stack.enter_context(gzip.GzipFile(fileobj=file)) if kind == "gzip" else file, budget)
        archive = stack.enter_context(tarfile.open(fileobj=counted, mode="r|"))  # type: ignore[call-overload]
        for member in archive:
            entry = Entry(member.name, member.isdir(), _tar_problem(member))
            wanted = not entry.is_folder and entry.problem is None
            yield entry, archive.extractfile(member) if wanted else None


def _tar_problem(member: tarfile.TarInfo) -> tuple[str, str] | None:
    if member.issym() or member.islnk():
        return "link", "is a link"
    if not (member.isreg() or member.isdir()) or member.issparse():
        return "not_a_file", "is not a regular file"
    return None


def _take(
    entry: Entry,
    content: IO[bytes] | None,
    folder: Path,
    budget: _Budget,
    seen: list[str],
    findings: list[Finding],
) -> None:
    """Check one entry and, if it is one of the two, write it out."""
    if len(seen) >= MAX_ENTRIES:
        raise _refusal("too_many_entries", f"has more than {MAX_ENTRIES}")
    parts = entry.name.removeprefix("./").rstrip("/" if entry.is_folder else "").split("/")
    problem = entry.problem or _name_problem(entry, parts, seen)
    seen.append(parts[-1])
    if problem is not None:
        findings.append(Finding(shown(entry.name), *problem))
    elif content is not None and parts[-1] not in _PASSED_OVER:
        _write(folder / parts[-1], content, MAX_CONFIG_BYTES if parts[-1] == CONFIG_NAME else None, budget)


def _name_problem(entry: Entry, parts: list[str], seen: list[str]) -> tuple[str, str] | None:
    """Only the two names, at the root or in one folder, each once. No name is ever a path here: it is compared."""
    if entry.is_folder:
        sound = len(parts) == 1 and (parts[0] in ("", ".") or _FOLDER.fullmatch(parts[0]))
        return None if sound else ("bad_file_name", "is no folder that an adapter has")
    if len(parts) > 2 or (len(parts) == 2 and not _FOLDER.fullmatch(parts[0])):
        return "bad_file_name", "is not at the archive's root or in one folder of it"
    if parts[-1] not in (CONFIG_NAME, WEIGHTS_NAME, *_PASSED_OVER):
        return "unexpected_file", f"is no part of an adapter, which has {CONFIG_NAME} and {WEIGHTS_NAME}; leave it out"
    if parts[-1] in seen:
        return "duplicate_file", f"is the second {parts[-1]}"
    return None


def _write(path: Path, content: IO[bytes], limit: int | None, budget: _Budget) -> None:
    """Write out what is really there, whatever size the archive claims."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        size = 0
        while chunk := content.read(READ_BYTES):
            size += len(chunk)
            if isinstance(content, zipfile.ZipExtFile):
                budget.spend(len(chunk))  # a tar's are counted as they are read
            if limit is not None and size > limit:
                raise AdapterError([Finding(path.name, "too_large", f"has more than {limit} bytes, the limit")])
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _refusal(code: str, message: str) -> AdapterError:
    return AdapterError([Finding(ARCHIVE_LABEL, code, message)])
