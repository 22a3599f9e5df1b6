"""One comparison of two versions: ``python -m stencilpress.gateway.lifecycle.diff_worker``. No torch.

A layer's delta is never built: with ``<BA, DC> = sum((Bᵀ D) * (A Cᵀ))`` its norms take matrices of the ranks alone.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stencilpress.engine.image import Module, PeftConfig, Tensor, resolve
from stencilpress.engine.spec import ModelSpec, load_spec
from stencilpress.gateway import strict_json
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.lifecycle.diff import (
    CPU_S,
    MEMORY_BYTES,
    UNREADABLE,
    ConfigChange,
    DeltaChange,
    Diff,
    DiffRequest,
    LayerRanks,
    TensorChange,
)
from stencilpress.gateway.lifecycle.originals import damage_told
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME, SafetensorsFile, open_safetensors
from stencilpress.gateway.worker_process import confine, read_request

_UNIMPORTANT = frozenset({"peft_version", "inference_mode", "auto_mapping", "task_type", "revision"})
"""Fields that differ between two runs of the same training."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Side:
    """One version's blob, open."""

    modules: dict[str, Module]
    weights: SafetensorsFile

    def pair(self, name: str) -> tuple[Matrix, Matrix, float] | None:
        """A, B and the scale of a projection."""
        module = self.modules.get(name)
        if module is None:
            return None
        return _wide(self.weights.load(module.a)), _wide(self.weights.load(module.b)), module.scale


def main() -> None:
    request = msgspec.json.decode(read_request(), type=DiffRequest)
    confine(MEMORY_BYTES, CPU_S)
    try:
        found = compare(request)
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the gateway's log
        sys.exit(UNREADABLE)
    sys.stdout.buffer.write(msgspec.json.encode(found))


def compare(request: DiffRequest) -> Diff:
    """The difference of two folders of adapters that intake has accepted."""
    spec = load_spec(Path(request.model_dir), request.dtype)
    with _opened(Path(request.left), spec) as left, _opened(Path(request.right), spec) as right:
        names = list(dict.fromkeys([*left.modules, *right.modules]))
        tensors, deltas = list[TensorChange](), list[DeltaChange]()
        for name in names:
            one, other = left.pair(name), right.pair(name)
            tensors += [_tensor(f"{name}.lora_{'AB'[side]}", one, other, side) for side in (0, 1)]
            deltas.append(_delta(name, one, other))
        return Diff(
            config=_config(request.left_config, request.right_config),
            added=[name for name in names if name not in left.modules],
            removed=[name for name in names if name not in right.modules],
            layers=_layers(left, right),
            tensors=tensors,
            deltas=deltas,
        )


@contextlib.contextmanager
def _opened(folder: Path, spec: ModelSpec) -> Iterator[_Side]:
    with (folder / WEIGHTS_NAME).open("rb") as file:
        with damage_told(folder / CONFIG_NAME):
            config = msgspec.convert(strict_json.parse((folder / CONFIG_NAME).read_bytes(), CONFIG_NAME), PeftConfig)
        with damage_told(folder / WEIGHTS_NAME):
            weights = open_safetensors(file)
            modules, _ = resolve(spec, config, weights.shapes)
        yield _Side({module.name: module for module in modules}, weights)


def _config(left_file: bytes | None, right_file: bytes | None) -> list[ConfigChange] | None:
    if left_file is None or right_file is None:
        return None
    left, right = (strict_json.parse(file, CONFIG_NAME) for file in (left_file, right_file))
    fields = sorted({*left, *right} - _UNIMPORTANT)
    return [
        ConfigChange(field, left.get(field), right.get(field))
        for field in fields
        if _canonical(left.get(field)) != _canonical(right.get(field))
    ]


def _canonical(value: Any) -> Any:
    """PEFT keeps target modules as a set, so their order means nothing."""
    return sorted(value, key=repr) if isinstance(value, list) else value


def _layers(left: _Side, right: _Side) -> list[LayerRanks]:
    ranks: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    for index, side in enumerate((left, right)):
        for name, module in side.modules.items():
            ranks.setdefault(module.place.layer, ({}, {}))[index][name.rpartition(".")[2]] = module.rank
    return [LayerRanks(layer, *ranks[layer]) for layer in sorted(ranks)]


_Pair = tuple[Matrix, Matrix, float]


def _tensor(name: str, one: _Pair | None, other: _Pair | None, side: int) -> TensorChange:
    left = _matrix(one, side)
    right = _matrix(other, side)
    change = None
    if left is not None and right is not None and left.shape == right.shape:
        change = float(np.linalg.norm(right - left))
    return TensorChange(name, *_norms(left, right), *_relative(change, left))


def _matrix(pair: _Pair | None, side: int) -> Matrix | None:
    if pair is None:
        return None
    return pair[0] if side == 0 else pair[1]


def _norms(left: Matrix | None, right: Matrix | None) -> tuple[float | None, float | None]:
    return (
        None if left is None else float(np.linalg.norm(left)),
        None if right is None else float(np.linalg.norm(right)),
    )


def _relative(change: float | None, left: Matrix | None) -> tuple[float | None, float | None]:
    norm = 0.0 if left is None else float(np.linalg.norm(left))
    return change, change / norm if change is not None and norm else None


def _delta(name: str, one: _Pair | None, other: _Pair | None) -> DeltaChange:
    left = None if one is None else math.sqrt(max(_inner(one, one), 0.0))
    right = None if other is None else math.sqrt(max(_inner(other, other), 0.0))
    change = None
    if one is not None and other is not None:
        a, b, scale = other
        change = math.sqrt(max(_inner(one, one) - 2 * _inner(one, (a, b, scale)) + _inner(other, other), 0.0))
    return DeltaChange(name, left, right, change, change / left if change is not None and left else None)


def _inner(one: _Pair, other: _Pair) -> float:
    """The Frobenius inner product of two deltas of one shape."""
    (a, b, scale), (c, d, other_scale) = one, other
    return float(scale * other_scale * np.sum((b.T @ d) * (a @ c.T)))


def _wide(tensor: Tensor) -> Matrix:
    if tensor.dtype == np.uint16:  # the bits of bfloat16
        tensor = (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float64)


if __name__ == "__main__":
    main()
