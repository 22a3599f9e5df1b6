"""What differs between two versions of an adapter: config, modules, ranks, and by how much the weights have moved."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stencilpress.gateway.intake_records import Dtype
from stencilpress.gateway.worker_process import WorkerError, run_worker

LIMIT_S = 60.0
MEMORY_BYTES = 2 << 30
CPU_S = 50
UNREADABLE = 3
"""Exit status of the worker: the files of a version are missing or damaged."""
_WORKER = "stencilpress.gateway.lifecycle.diff_worker"


class DiffRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Compare the adapters in two folders. The configs are those that were uploaded; null where one was not kept."""

    left: str
    right: str
    left_config: bytes | None
    right_config: bytes | None
    model_dir: str
    dtype: Dtype


class ConfigChange(msgspec.Struct, frozen=True):
    """A field of `adapter_config.json` that differs; null where it is missing."""

    field: str
    left: Any
    right: Any


class LayerRanks(msgspec.Struct, frozen=True):
    """The ranks of one layer by projection."""

    layer: int
    left: dict[str, int]
    right: dict[str, int]


class TensorChange(msgspec.Struct, frozen=True):
    """Frobenius norms of one tensor. `change` is that of the difference, null where shapes differ or one is missing.

    `relative` is `change` divided by the left norm.
    """

    name: str
    left: float | None
    right: float | None
    change: float | None
    relative: float | None


class DeltaChange(msgspec.Struct, frozen=True):
    """The same of one projection's whole delta, `scale * B @ A`, which is what the model sees.

    Two pairs of A and B that look different may give the same delta.
    """

    module: str
    left: float | None
    right: float | None
    change: float | None
    relative: float | None


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """`added` and `removed` are projections that only the right, or the left, version adapts.

    `config` is null where one of the configs was not kept, as in a version's contents.
    """

    config: list[ConfigChange] | None
    added: list[str]
    removed: list[str]
    layers: list[LayerRanks]
    tensors: list[TensorChange]
    deltas: list[DeltaChange]


class Side(NamedTuple):
    """One of two versions: its blob, and its config as it was uploaded."""

    blob: Path
    config: bytes | None


async def diff_versions(left: Side, right: Side, model_dir: Path, dtype: Dtype) -> Diff:
    """Compare two versions in a process of its own.

    Raises :class:`WorkerError`, ``TimeoutError``, ``OSError`` for files that are missing or damaged.
    """
    request = DiffRequest(
        left=os.fspath(left.blob),
        right=os.fspath(right.blob),
        left_config=left.config,
        right_config=right.config,
        model_dir=os.fspath(model_dir),
        dtype=dtype,
    )
    status, output = await run_worker(_WORKER, msgspec.json.encode(request), LIMIT_S)
    if status == UNREADABLE:
        raise OSError(errno.EIO, "the files of a version are missing or damaged")
    if status:
        raise WorkerError(f"the comparison ended with status {status}")
    return msgspec.json.decode(output, type=Diff)
