"""Weights files: only sound safetensors are read, whatever a file calls itself, and nothing is ever run."""

from __future__ import annotations

import io
import json
import os
import pickle  # noqa: TID251 - hostile files are written here, and set off to prove that they are live
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from stencilpress.gateway.intake import Rejected, validate_upload
from stencilpress.gateway.safetensors_file import MAX_HEADER_BYTES, WEIGHTS_NAME
from tests.unit.adapters import FIRST_A, Desk, frame


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


class Bomb:
    """Unpickling it creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("protocol", range(2, 6))
async def test_a_pickle_is_refused_by_content_and_never_loaded(desk: Desk, tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    desk.weights(pickle.dumps({FIRST_A: Bomb(canary)}, protocol))
    verdict = await validate_upload(desk.folder, desk.model_dir)
    assert isinstance(verdict, Rejected)
    (finding,) = verdict.findings
    assert (finding.field, finding.code) == (WEIGHTS_NAME, "not_safetensors")
    assert "pickle" in finding.message
    assert not canary.exists()
    pickle.loads((desk.folder / WEIGHTS_NAME).read_bytes())  # noqa: S301 - our own bomb
    assert canary.exists(), "the bomb would have gone off"


async def test_what_torch_saves_is_refused(desk: Desk, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    torch.save({FIRST_A: Bomb(canary)}, desk.folder / WEIGHTS_NAME)
    verdict = await validate_upload(desk.folder, desk.model_dir)
    assert isinstance(verdict, Rejected)
    assert "zip archive" in verdict.findings[0].message
    assert not canary.exists()


def zip_bytes() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("../../adapter_model.safetensors", "x" * 100)
    return target.getvalue()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (zip_bytes(), "zip"),
        (b"GGUF" + bytes(100), "GGUF"),
        (b"\x93NUMPY" + bytes(100), "numpy"),
        (b"\x89HDF\r\n" + bytes(100), "HDF5"),
        (b"\x1f\x8b" + bytes(100), "gzip"),
        (b"version https://git-lfs.github.com/spec/v1\n" + bytes(100), "LFS"),
        (b"<html>not found</html>" * 9, "header length"),
        ((2**40).to_bytes(8, "little") + b"{}", str(2**40)),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", str(2**64 - 1)),
        ((1).to_bytes(8, "little") + b"{}", "header length 1,"),
        ((0).to_bytes(8, "little") + b"{}", "header length 0,"),
        ((3).to_bytes(8, "little") + b"{}", "header length 3,"),
        (frame(b"[]", bytes(8)), "header length 2"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{" + b" " * MAX_HEADER_BYTES, str(MAX_HEADER_BYTES)),
    ],
)
def test_other_formats_are_recognised(desk: Desk, content: bytes, word: str) -> None:
    desk.weights(content)
    finding = desk.only()
    assert (finding.field, finding.code) == (WEIGHTS_NAME, "not_safetensors")
    assert word in finding.message


def header_of(**entries: Any) -> bytes:
    return json.dumps(entries).encode()


def entry(dtype: Any = "F32", shape: Any = (1, 2), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "field", "code"),
    [
        (frame(b"{}"), "target_modules", "missing_module"),
        (frame(b"{nonsense}", bytes(8)), WEIGHTS_NAME, "bad_json"),
        (frame(b'{"a": {}, "a": {}}', bytes(8)), WEIGHTS_NAME, "duplicate_key"),
        (frame(b'{"a": {"dtype": "F32", "dtype": "F16"}}', bytes(8)), WEIGHTS_NAME, "duplicate_key"),
        (frame(b'{"a": {"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)), WEIGHTS_NAME, "bad_json"),
        (frame(b'{"\xff": 1}', bytes(8)), WEIGHTS_NAME, "bad_json"),
        (frame(header_of(a=entry(shape=(0, 2), offsets=(0, 0)))), "a", "bad_shape"),
        (frame(header_of(a=entry(shape=(1, -2))), bytes(8)), "a", "bad_shape"),
        (frame(header_of(a=entry(shape=(2**62, 2**62))), bytes(8)), "a", "bad_shape"),
        (frame(header_of(a=entry(shape=[])), bytes(8)), "a", "bad_shape"),
        (frame(header_of(a=entry(shape=[True, 2])), bytes(8)), "a", "bad_shape"),
        (frame(header_of(a=entry(shape=[1.0, 2.0])), bytes(8)), "a", "bad_shape"),
        (frame(header_of(a=entry(shape=[1] * 9)), bytes(8)), "a", "bad_shape"),
        (frame(header_of(a=entry(dtype="I8", offsets=(0, 2))), bytes(2)), "a", "unsupported_dtype"),
        (frame(header_of(a=entry(dtype="F64", offsets=(0, 16))), bytes(16)), "a", "unsupported_dtype"),
        (frame(header_of(a=entry(dtype="F8_E4M3", offsets=(0, 2))), bytes(2)), "a", "unsupported_dtype"),
        (frame(header_of(a=entry(dtype=["F32"])), bytes(8)), "a", "unsupported_dtype"),
        (frame(header_of(a=entry(offsets=(0, 4))), bytes(8)), "a", "bad_offsets"),
        (frame(header_of(a=entry(offsets=(8, 0))), bytes(8)), "a", "bad_offsets"),
        (frame(header_of(a=entry(offsets=(-8, 0))), bytes(8)), "a", "bad_offsets"),
        (frame(header_of(a=entry(offsets=(4, 12))), bytes(12)), "a", "bad_offsets"),
        (frame(header_of(a=entry(offsets=(0, 8, 8))), bytes(8)), "a", "bad_offsets"),
        (frame(header_of(a=entry(), b=entry(offsets=(4, 12))), bytes(12)), "b", "bad_offsets"),
        (frame(header_of(a=entry(), b=entry()), bytes(8)), "b", "bad_offsets"),
        (frame(header_of(a=entry(), b=entry(offsets=(9, 17))), bytes(17)), "b", "bad_offsets"),
        (frame(header_of(a=entry()), bytes(7)), WEIGHTS_NAME, "truncated"),
        (frame(header_of(a=entry()), bytes(9)), WEIGHTS_NAME, "trailing_bytes"),
        (frame(header_of(a={**entry(), "extra": 1}), bytes(8)), "a", "bad_header"),
        (frame(header_of(a={"dtype": "F32"}), bytes(8)), "a", "bad_header"),
        (frame(header_of(a=[1]), bytes(8)), "a", "bad_header"),
        (frame(header_of(__metadata__={"a": 1}, a=entry()), bytes(8)), "__metadata__", "bad_header"),
        (frame(header_of(**{"../../etc/x": entry()}), bytes(8)), "'../../etc/x'", "bad_name"),
        (frame(header_of(**{"a\x00b": entry()}), bytes(8)), "'a\\x00b'", "bad_name"),
        (frame(header_of(**{"<script>": entry()}), bytes(8)), "'<script>'", "bad_name"),
        (frame(header_of(**{"": entry()}), bytes(8)), "''", "bad_name"),
    ],
)
def test_a_header_is_refused_where_it_is_wrong(desk: Desk, content: bytes, field: str, code: str) -> None:
    desk.weights(content)
    finding = desk.findings()[-1]
    assert (finding.field, finding.code) == (field, code), desk.findings()


def test_a_file_cut_at_any_place_is_refused(desk: Desk) -> None:
    content = (desk.folder / WEIGHTS_NAME).read_bytes()
    for length in [*range(64), *range(64, len(content), 97), len(content) - 1]:
        desk.weights(content[:length])
        assert desk.findings()
