"""The two files of a version as they were uploaded: tensors from the blob of its digest, all else from the catalog.

A blob is shared by every version with its digest, of whatever tenant. So what else an uploader wrote is kept with its
version, and the fields of the config that decide nothing and the weights' metadata are left out of the blob.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import zlib
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from stencilpress.engine.image import split_tensor_name
from stencilpress.gateway import strict_json
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES, deciding_part
from stencilpress.gateway.catalog.records import StoredFiles, VersionFiles
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME, open_safetensors

COPY_BYTES = 1 << 20
_LEFT = "as_uploaded"
"""False in a blob's config that was left by :func:`leave_content`; to intake a field that is off."""
_METADATA = "__metadata__"
_USUAL: tuple[dict[str, str], ...] = ({}, {"format": "pt"})
"""What PEFT writes there, which says nothing of anybody."""


def read_files(folder: Path) -> VersionFiles:
    """What of the two files that intake has accepted is their uploader's alone. Blocks."""
    with (folder / WEIGHTS_NAME).open("rb") as file:
        header = _header(file)
    return VersionFiles((folder / CONFIG_NAME).read_bytes(), zlib.compress(header))


def leave_content(folder: Path) -> None:
    """Take out of the two files what :func:`read_files` has kept of them, before they become a blob. Blocks.

    A file that changes is replaced, never written to: an unfinished upload may share it. Raises
    :class:`InvalidRequestError` for a config that another way to write its numbers makes too large.
    """
    config = strict_json.parse((folder / CONFIG_NAME).read_bytes(), CONFIG_NAME)
    deciding = _written({_LEFT: False, **deciding_part(config)})
    if len(deciding) > MAX_CONFIG_BYTES:  # whoever has the same content could not read it back
        text = f"{CONFIG_NAME}: what decides the result takes more than {MAX_CONFIG_BYTES} bytes"
        raise InvalidRequestError(text, param=CONFIG_NAME, code="too_large")
    with _replacing(folder / CONFIG_NAME) as file:
        file.write(deciding)
    with (folder / WEIGHTS_NAME).open("rb") as uploaded:
        header = strict_json.parse(_header(uploaded), WEIGHTS_NAME)
        if header.pop(_METADATA, {}) in _USUAL:
            return
        with _replacing(folder / WEIGHTS_NAME) as file:
            left = _written(header)
            file.write(len(left).to_bytes(8, "little") + left)
            shutil.copyfileobj(uploaded, file, COPY_BYTES)


@contextlib.contextmanager
def damage_told(file: Path) -> Iterator[None]:
    """A blob's file that is not what intake left there is an ``OSError``, like one that cannot be read."""
    try:
        yield
    except (ValueError, KeyError, msgspec.MsgspecError) as error:
        raise _damaged(file) from error


def config_of(files: StoredFiles, blob: Path) -> bytes | None:
    """A version's ``adapter_config.json``, or None if it was not kept. Blocks. Raises ``OSError``."""
    if files != "in blob":
        return None if files is None else files.config
    config = (blob / CONFIG_NAME).read_bytes()
    with damage_told(blob / CONFIG_NAME):
        replaced = strict_json.parse(config, CONFIG_NAME).get(_LEFT) is False  # it had gone to the cold tier meanwhile
    return None if replaced else config


class Weights(NamedTuple):
    """A version's ``adapter_model.safetensors``: its own head, then parts of the blob's file by start and size."""

    head: bytes
    spans: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        return len(self.head) + sum(size for _, size in self.spans)


def weights_of(files: StoredFiles, blob: Path) -> Weights | None:
    """How a version's weights were uploaded, or None if that was not kept. Blocks. Raises ``OSError``."""
    if config_of(files, blob) is None:
        return None
    with (blob / WEIGHTS_NAME).open("rb") as file:
        if not isinstance(files, VersionFiles):
            return Weights(b"", ((0, os.fstat(file.fileno()).st_size),))
        with damage_told(blob / WEIGHTS_NAME):
            stored = open_safetensors(file)
    places = {
        split_tensor_name(one.name): (stored.data_start + one.start, one.end - one.start) for one in stored.entries
    }
    header = zlib.decompress(files.weights_header)
    own = {name: facts for name, facts in strict_json.parse(header, WEIGHTS_NAME).items() if name != _METADATA}
    names = sorted(own, key=lambda name: own[name]["data_offsets"][0])
    with damage_told(blob / WEIGHTS_NAME):
        spans = _joined(places[split_tensor_name(name)] for name in names)
    return Weights(len(header).to_bytes(8, "little") + header, spans)


def read_weights(weights: Weights, blob: Path) -> Generator[bytes]:
    """The bytes that were uploaded, some at a time. Blocks. Raises ``OSError``."""
    if weights.head:
        yield weights.head
    with (blob / WEIGHTS_NAME).open("rb") as file:
        for start, size in weights.spans:
            file.seek(start)
            for done in range(0, size, COPY_BYTES):
                wanted = min(COPY_BYTES, size - done)
                part = file.read(wanted)
                if len(part) < wanted:
                    raise _damaged(blob / WEIGHTS_NAME)
                yield part


class UploadedFile(NamedTuple):
    """A file as it was uploaded. ``chunks`` block, raise ``OSError``, and must be closed if they are not all taken."""

    size_bytes: int
    chunks: Generator[bytes]


def open_file(name: str, files: StoredFiles, blob: Path) -> UploadedFile | None:
    """One of a version's two files, or None if they were not kept. Blocks. Raises ``OSError``."""
    if name == CONFIG_NAME:
        config = config_of(files, blob)
        return None if config is None else UploadedFile(len(config), (part for part in [config]))
    weights = weights_of(files, blob)
    return None if weights is None else UploadedFile(weights.size_bytes, read_weights(weights, blob))


def _joined(places: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Places that follow each other as one."""
    spans = list[tuple[int, int]]()
    for start, size in places:
        if spans and sum(spans[-1]) == start:
            spans[-1] = (spans[-1][0], spans[-1][1] + size)
        else:
            spans.append((start, size))
    return tuple(spans)


def _written(value: dict[str, Any]) -> bytes:
    """JSON no longer than what it was read from, but for numbers; half a surrogate pair stays an escape."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one once it is on disk. The other one must not be open for writing."""
    fresh = path.with_suffix(".fresh")
    with fresh.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _damaged(file: Path) -> OSError:
    return OSError(errno.EIO, "is damaged", str(file))


def _header(file: BinaryIO) -> bytes:
    return file.read(int.from_bytes(file.read(8), "little"))
