"""The GPU's runner, its kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.engine.model import linear, triton_llama
from stencilpress.kernels.sgmv import cuda_sgmv
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_sgmv import sgmv
from stencilpress.kernels.sgmv.triton_work import SgmvWork
from tests.unit.cuda_parity import check_rows
from tests.unit.tiny_models import CPU

pytestmark = [
    pytest.mark.timeout(240),  # the interpreter takes a second a step, on a busy machine many
    # Triton 3.6's interpreter turns one-element arrays into loop bounds
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def test_rows_equal_the_cpu_runners(tmp_path: Path) -> None:
    check_rows(CPU, tmp_path)


def test_rows_equal_them_where_adapters_come_before_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Hopper GPU's engine decides and computes is stood in for: rows.cu by the Triton kernel."""
    served: set[tuple[int, int, GroupShape]] = set()

    def shares(
        y: torch.Tensor, x: torch.Tensor, pool: torch.Tensor, work: SgmvWork, entry: int, shape: GroupShape,
        listed: torch.Tensor,
    ) -> None:  # fmt: skip
        rows = sorted(work.blocks_B4[: int(work.counts_4[0]), 0].tolist())
        assert listed.nonzero().flatten().tolist() == rows
        sgmv(y.zero_(), x, pool, work, entry, shape)
        served.add((len(y), len(rows), shape))

    monkeypatch.setattr(linear, "_packs", lambda _: False)
    monkeypatch.setattr(triton_llama, "room_is_free", lambda _pool, _shapes, tile, *_: tile.rows == 1)
    monkeypatch.setattr(cuda_sgmv, "rows", shares)
    check_rows(CPU, tmp_path)
    assert len({shape for _, _, shape in served}) == 4
    assert any(rows > listed for rows, listed, _ in served)
