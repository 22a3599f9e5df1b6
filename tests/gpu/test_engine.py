"""The GPU's runner on a real GPU: graphs, eager steps and steps launched ahead, against the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.kernels.triton_launch import INTERPRETED
from tests.unit.cuda_parity import check_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU"),
]


def test_rows_equal_the_cpu_runners(tmp_path: Path) -> None:
    check_rows(torch.device("cuda"), tmp_path)
