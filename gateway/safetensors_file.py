"""An uploaded safetensors file, read with our own eyes.

The safetensors library accepts duplicate keys, zero-sized dimensions and any name; nothing here does. The
format: u64 length of the header, a JSON object ``{name: {dtype, shape, data_offsets}}``, the tensors' bytes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from stencilpress.engine.image import AdapterError, Finding, Tensor
from stencilpress.gateway import strict_json
from stencilpress.gateway.strict_json import shown

WEIGHTS_NAME = "adapter_model.safetensors"
MAX_HEADER_BYTES = 4 << 20
MAX_TENSORS = 1 << 16
"""Of files that intake has accepted, whatever its own limit was then."""
MAX_DIMS = 8
MAX_DIM = 1 << 31
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]{0,255}")
_MAGICS = (
    (b"PK\x03\x04", "a zip archive (torch.save writes one, with pickle inside)"),
    (b"\x80", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"version https://git-lfs", "a Git LFS pointer in place of the file"),
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; ``start`` and ``end`` are byte offsets from the first tensor's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file whose header is sound. Tensors are read one by one; nothing is mapped or kept."""

    def __init__(self, file: BinaryIO, data_start: int, entries: list[TensorEntry]) -> None:
        self._file = file
        self.data_start = data_start
        """Where the first tensor begins, in bytes."""
        self._entries = {entry.name: entry for entry in entries}

    @property
    def entries(self) -> Collection[TensorEntry]:
        return self._entries.values()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def load(self, name: str) -> Tensor:
        """The tensor as float32, float16, or uint16 with the bits of bfloat16."""
        entry = self._entries[name]
        self._file.seek(self.data_start + entry.start)
        data = self._file.read(entry.end - entry.start)
        return np.frombuffer(data, DTYPES[entry.dtype]).reshape(entry.shape)


def open_safetensors(file: BinaryIO, max_tensors: int = MAX_TENSORS) -> SafetensorsFile:
    """Check the header of an opened file. Raises :class:`AdapterError` with all that is wrong in it."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(32)
    length = int.from_bytes(start[:8], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8) or start[8:9] != b"{":
        raise AdapterError([Finding(WEIGHTS_NAME, "not_safetensors", _what_it_is(start, length, size))])
    file.seek(8)
    header = strict_json.parse(file.read(length), WEIGHTS_NAME)
    data_start = 8 + length
    return SafetensorsFile(file, data_start, _entries(header, size - data_start, max_tensors))


def _what_it_is(start: bytes, length: int, size: int) -> str:
    for magic, name in _MAGICS:
        if start.startswith(magic):
            return f"is {name}; only safetensors files are taken"
    if size < 10:
        return f"has {size} bytes, too few for a safetensors file"
    return (
        f"is no safetensors file: header length {length}, allowed are 2 to {min(MAX_HEADER_BYTES, size - 8)} bytes "
        "of a JSON object"
    )


def _entries(header: dict[str, Any], data_bytes: int, max_tensors: int) -> list[TensorEntry]:
    metadata = header.pop("__metadata__", {})
    findings = []
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        findings.append(Finding("__metadata__", "bad_header", "is not a map of texts"))
    if len(header) > max_tensors:
        text = f"holds {len(header)} tensors; the limit is {max_tensors}"
        raise AdapterError([*findings, Finding(WEIGHTS_NAME, "too_many_tensors", text)])
    entries = []
    for name, facts in header.items():
        problem = _entry_problem(name, facts)
        if problem is None:
            entries.append(TensorEntry(name, facts["dtype"], tuple(facts["shape"]), *facts["data_offsets"]))
        else:
            findings.append(problem)
    if not findings:
        findings = _span_findings(entries, data_bytes)
    if findings:
        raise AdapterError(findings)
    return entries


def _entry_problem(name: str, facts: Any) -> Finding | None:
    """What is wrong with one tensor of the header by itself."""
    if not _NAME.fullmatch(name):
        return Finding(shown(name), "bad_name", "is not a tensor's name: 1 to 256 of A-Z a-z 0-9 _ and .")
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "data_offsets"}:
        return Finding(name, "bad_header", "must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return Finding(name, "unsupported_dtype", f"has dtype {shown(dtype)}; supported: {', '.join(DTYPES)}")
    if not _is_ints(shape) or not 1 <= len(shape) <= MAX_DIMS or not all(1 <= dim < MAX_DIM for dim in shape):
        return Finding(name, "bad_shape", f"has shape {shown(shape)}; every dimension must be 1 or more")
    if not _is_ints(offsets) or len(offsets) != 2:
        return Finding(name, "bad_offsets", f"has data_offsets {shown(offsets)}, expected [start, end]")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size:
        return Finding(name, "bad_offsets", f"takes {offsets[1] - offsets[0]} bytes, its shape needs {size}")
    return None


def _is_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _span_findings(entries: list[TensorEntry], data_bytes: int) -> list[Finding]:
    """The tensors must cover the data exactly: no gap, no overlap, nothing behind, nothing cut off."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.start):
        if entry.start != end:
            kind = "a gap" if entry.start > end else "an overlap"
            return [Finding(entry.name, "bad_offsets", f"starts at {entry.start}, expected {end}: {kind}")]
        end = entry.end
    if end != data_bytes:
        code = "truncated" if data_bytes < end else "trailing_bytes"
        return [Finding(WEIGHTS_NAME, code, f"has {data_bytes} bytes of tensors, its header says {end}")]
    return []
