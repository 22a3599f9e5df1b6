"""From the tensors of a PEFT adapter to the canonical stream, and to the digest that names it.

A pure function of the base's spec, the config and the tensors. It works one (layer, group) at a time, so
building takes the memory of one group, not of the adapter.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from stencilpress.engine.image_check import Checksum
from stencilpress.engine.image_format import (
    MAX_PROJECTIONS,
    STORED,
    Image,
    ImageHeader,
    Record,
    encode_header,
    lock_unfinished,
    payload_offset,
)
from stencilpress.engine.peft_config import AdapterError, Finding, PeftConfig
from stencilpress.engine.peft_format import Module, resolve
from stencilpress.engine.spec import Dtype, Group, ModelSpec, slice_elems

Tensor = npt.NDArray[Any]
"""float32, float16, or uint16 that holds the bits of bfloat16, which numpy does not have."""
Load = Callable[[str], Tensor]

_TYPE_NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16"}


def build_image(spec: ModelSpec, config: PeftConfig | dict[str, Any], tensors: Mapping[str, Tensor]) -> Image:
    """Convert an adapter that is in memory; ``tensors`` has PEFT's names.

    Raises :class:`AdapterError` with every reason against it.
    """
    parts: list[memoryview] = []
    header = _convert(spec, _resolved(spec, config, tensors), tensors.__getitem__, parts.append)
    return Image(header, np.frombuffer(b"".join(parts), np.uint8))


def write_image(path: Path, spec: ModelSpec, modules: Iterable[Module], load: Load) -> ImageHeader:
    """Convert an adapter into a new file, group by group, and fsync it. ``load`` gives a tensor by its name.

    Raises :class:`AdapterError` for values that cannot be served; the file is then worthless.
    """
    with path.open("xb") as file:
        lock_unfinished(file)
        file.seek(payload_offset(spec.num_layers * len(spec.groups)))
        header = _convert(spec, modules, load, file.write)
        file.seek(0)
        file.write(encode_header(header))
        file.flush()
        os.fsync(file.fileno())
    return header


def adapter_digest(spec: ModelSpec, config: PeftConfig | dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 hex over the base's id and each adapted projection's name, scale and two tensors as uploaded.

    The config enters by the scales that it results in, the tensors by projection: spelling, order, file
    layout and metadata do not matter. Every field is length-prefixed.
    """
    digest = _Digest(spec.base_id)
    for module in _resolved(spec, config, tensors):
        digest.add(module, tensors[module.a], tensors[module.b])
    return digest.hexdigest()


def _resolved(
    spec: ModelSpec, config: PeftConfig | dict[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Module, ...]:
    parsed = config if isinstance(config, PeftConfig) else msgspec.convert(config, PeftConfig)
    modules, findings = resolve(spec, parsed, {name: tensor.shape for name, tensor in tensors.items()})
    if findings:
        raise AdapterError(findings)
    return modules


def _convert(
    spec: ModelSpec, modules: Iterable[Module], load: Load, emit: Callable[[memoryview], object]
) -> ImageHeader:
    groups = spec.groups
    records = [Record()] * (spec.num_layers * len(groups))
    digest, checksum, findings = _Digest(spec.base_id), Checksum(), list[Finding]()
    for (layer, g), members in groupby(modules, key=lambda module: module.place[:2]):
        adapted = list(members)
        record = _record(groups[g], adapted)
        block = np.zeros((record.rank, record.slice_elems), STORED[spec.dtype])
        _fill(block, groups[g], adapted, load, digest, findings, spec.dtype)
        data = block.data.cast("B")
        checksum.update(data)
        emit(data)
        records[layer * len(groups) + g] = record
    if findings:
        raise AdapterError(findings)
    return ImageHeader(
        digest.hexdigest(),
        spec.fingerprint(),
        spec.dtype,
        spec.num_layers,
        len(groups),
        tuple(records),
        checksum.value(),
    )


def _record(group: Group, adapted: list[Module]) -> Record:
    present = tuple(module.place.projection for module in adapted)
    scales = [0.0] * MAX_PROJECTIONS
    for module in adapted:
        scales[module.place.projection] = float(np.float32(module.scale))
    return Record(
        rank=max(module.rank for module in adapted),
        mask=sum(1 << projection for projection in present),
        slice_elems=slice_elems(group, present),
        scales=tuple(scales),
    )


def _fill(
    block: Tensor,
    group: Group,
    adapted: list[Module],
    load: Load,
    digest: _Digest,
    findings: list[Finding],
    dtype: Dtype,
) -> None:
    """Write all slices of one (layer, group), ``(rank, slice_elems)``: the A columns, then the Bᵀ columns."""
    a_column = 0
    b_column = sum(group.projections[module.place.projection].in_features for module in adapted)
    for module in adapted:
        a, b = load(module.a), load(module.b)
        digest.add(module, a, b)
        block[: module.rank, a_column : a_column + a.shape[1]] = _served(module.a, a, dtype, findings)
        block[: module.rank, b_column : b_column + b.shape[0]] = _served(module.b, b, dtype, findings).T
        a_column += a.shape[1]
        b_column += b.shape[0]


def _served(name: str, tensor: Tensor, dtype: Dtype, findings: list[Finding]) -> Tensor:
    """The tensor in the served dtype, rounded to nearest even."""
    if not is_finite(tensor):
        findings.append(_not_finite(name))
        return np.zeros_like(tensor)
    served = to_dtype(tensor, dtype)
    if not is_finite(served):
        findings.append(_overflow(name, dtype))
    return served


def value_problem(name: str, tensor: Tensor, dtype: Dtype) -> Finding | None:
    """What speaks against serving a tensor's values in ``dtype``."""
    if not is_finite(tensor):
        return _not_finite(name)
    return None if is_finite(to_dtype(tensor, dtype)) else _overflow(name, dtype)


def _not_finite(name: str) -> Finding:
    return Finding(name, "not_finite", "holds NaN or infinity")


def _overflow(name: str, dtype: Dtype) -> Finding:
    return Finding(name, "overflow", f"holds values beyond the range of {dtype}, the served dtype")


def is_finite(tensor: Tensor) -> bool:
    """Neither NaN nor infinity anywhere; of bfloat16 the exponent bits tell."""
    if tensor.dtype == np.uint16:
        return not bool(np.any((tensor & 0x7F80) == 0x7F80))
    return bool(np.isfinite(tensor).all())


def to_dtype(tensor: Tensor, dtype: Dtype) -> Tensor:
    """Convert finite values, rounding to nearest even; what lies beyond the range becomes infinity."""
    if tensor.dtype == STORED[dtype]:
        return tensor
    wide = _to_float32(tensor)
    if dtype == "bfloat16":
        bits = wide.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return wide.astype(STORED[dtype])


def _to_float32(tensor: Tensor) -> npt.NDArray[np.float32]:
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32, copy=False)


class _Digest:
    def __init__(self, base_id: str) -> None:
        self._hash = hashlib.sha256()
        self._text("stencilpress adapter 1")
        self._text(base_id)

    def add(self, module: Module, a: Tensor, b: Tensor) -> None:
        self._text(module.name)
        self._field(struct.pack("<d", module.scale))
        for tensor in (a, b):
            self._text(_TYPE_NAMES[tensor.dtype.name])
            self._field(struct.pack("<2Q", *tensor.shape))
            self._field(np.ascontiguousarray(tensor).data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _text(self, text: str) -> None:
        self._field(text.encode())

    def _field(self, data: bytes | memoryview) -> None:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        self._hash.update(struct.pack("<Q", size))
        self._hash.update(data)
