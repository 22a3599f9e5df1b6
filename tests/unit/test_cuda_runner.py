"""The GPU's runner, its kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.unit.cuda_parity import check_rows
from tests.unit.tiny_models import CPU


@pytest.mark.timeout(240)  # the interpreter takes a second a step, on a busy machine many
# Triton 3.6's interpreter turns one-element arrays into loop bounds
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_rows_equal_the_cpu_runners(tmp_path: Path) -> None:
    check_rows(CPU, tmp_path)
