"""What a version consists of, as its files say: the config, and which projections it adapts at which ranks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from stencilpress.engine.image import split_tensor_name
from stencilpress.gateway import strict_json
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.catalog.records import StoredFiles, Version
from stencilpress.gateway.lifecycle.originals import config_of, damage_told
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME, open_safetensors


class ProjectionRanks(msgspec.Struct, frozen=True):
    """One projection that a version adapts: in how many layers, and the distinct ranks, ascending."""

    name: str
    layers: int
    ranks: list[int]


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """`config` is `adapter_config.json` as it was uploaded; null for a version from before it was kept with each.

    Uploading the same files again keeps it.
    """

    config: dict[str, Any] | None
    modules: list[ProjectionRanks]


async def read_contents(version: Version, files: StoredFiles, folder: Path) -> Contents:
    """Of a version with its blob, whose files intake has accepted. Only headers are read. Raises ``OSError``."""
    return await asyncio.to_thread(_read, version, files, folder)


def _read(version: Version, files: StoredFiles, folder: Path) -> Contents:
    config = config_of(files, folder)
    with (folder / WEIGHTS_NAME).open("rb") as file, damage_told(folder / WEIGHTS_NAME):
        shapes = open_safetensors(file).shapes
        ranks: dict[str, list[int]] = defaultdict(list)
        for name, shape in shapes.items():
            parts = split_tensor_name(name)
            if parts is not None and parts.side == "A":
                ranks[parts.projection].append(shape[0])
        names = sorted(ranks, key=version.target_modules.index)  # their order in the file may be another uploader's
    modules = [ProjectionRanks(name, len(ranks[name]), sorted(set(ranks[name]))) for name in names]
    return Contents(config=None if config is None else strict_json.parse(config, CONFIG_NAME), modules=modules)
