"""The two files of a version as they were uploaded: tensors from the blob of its digest, all else from the catalog.

A blob is shared by every version with its digest, of whatever tenant. So what else an uploader wrote is kept with its
version, and the fields of the config that decide nothing and the weights' metadata are left out of the blob.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stencilpress.gateway import strict_json
from stencilpress.gateway.adapter_config import CONFIG_NAME, deciding_part
from stencilpress.gateway.catalog.records import InBlob, VersionFiles
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

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

    A file that changes is replaced, never written to: an unfinished upload may share it.
    """
    config = strict_json.parse((folder / CONFIG_NAME).read_bytes(), CONFIG_NAME)
    with _replacing(folder / CONFIG_NAME) as file:
        file.write(json.dumps({_LEFT: False, **deciding_part(config)}).encode())
    with (folder / WEIGHTS_NAME).open("rb") as uploaded:
        header = strict_json.parse(_header(uploaded), WEIGHTS_NAME)
        if header.pop(_METADATA, {}) in _USUAL:
            return
        with _replacing(folder / WEIGHTS_NAME) as file:
            left = json.dumps(header).encode()
            file.write(len(left).to_bytes(8, "little") + left)
            shutil.copyfileobj(uploaded, file, COPY_BYTES)


def config_of(files: VersionFiles | InBlob | None, blob: Path) -> bytes | None:
    """A version's ``adapter_config.json``, or None if it was not kept. Blocks. Raises ``OSError``."""
    if files != "in blob":
        return None if files is None else files.config
    config = (blob / CONFIG_NAME).read_bytes()
    replaced = strict_json.parse(config, CONFIG_NAME).get(_LEFT) is False  # it had gone to the cold tier meanwhile
    return None if replaced else config


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another one once it is on disk. The other one must not be open for writing."""
    fresh = path.with_suffix(".fresh")
    with fresh.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _header(file: BinaryIO) -> bytes:
    return file.read(int.from_bytes(file.read(8), "little"))
