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
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME, open_safetensors

MAX_TENSORS = 1 << 16


class ProjectionRanks(msgspec.Struct, frozen=True):
    """One projection that a version adapts: in how many layers, and the distinct ranks, ascending."""

    name: str
    layers: int
    ranks: list[int]


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """`config` is `adapter_config.json` as it was uploaded."""

    config: dict[str, Any]
    modules: list[ProjectionRanks]


async def read_contents(folder: Path) -> Contents:
    """Of a blob, whose files intake has accepted. Only headers are read. Raises ``OSError``."""
    return await asyncio.to_thread(_read, folder)


def _read(folder: Path) -> Contents:
    config = strict_json.parse((folder / CONFIG_NAME).read_bytes(), CONFIG_NAME)
    with (folder / WEIGHTS_NAME).open("rb") as file:
        shapes = open_safetensors(file, MAX_TENSORS).shapes
    ranks: dict[str, list[int]] = defaultdict(list)
    for name, shape in shapes.items():
        parts = split_tensor_name(name)
        if parts is not None and parts.side == "A":
            ranks[parts.projection].append(shape[0])
    modules = [ProjectionRanks(name, len(found), sorted(set(found))) for name, found in ranks.items()]
    return Contents(config=config, modules=modules)
