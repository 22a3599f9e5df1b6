"""The linear layer for few rows against float64, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from stencilpress.kernels.linear.triton_linear import (
    MOST_ROWS,
    Cut,
    LinearScratch,
    choose_cut,
    fits,
    linear_few_rows,
    resident_cut,
)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.mark.parametrize("rows", [1, 3, 8, 20])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize(("bias", "head"), [(False, 0), (True, 32)])
def test_any_rows_and_splits(rows: int, splits: int, bias: bool, head: int) -> None:
    random = torch.Generator().manual_seed(rows * splits)
    wide = torch.full((rows, 200), float("nan"))
    wide[:, :160] = torch.randn(rows, 160, generator=random)
    weight, offset = torch.randn(96, 160, generator=random), torch.randn(96, generator=random)
    scratch = LinearScratch(torch.device("cpu"))
    x = wide[:, :160]
    got = linear_few_rows(x, weight, offset if bias else None, scratch, Cut(16, 32, splits, 2, head))
    want = x.double() @ weight.double().T + (offset.double() if bias else 0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    assert not scratch.arrived_N.any()


def test_half_precision_rounds_once() -> None:
    random = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, 64, generator=random).bfloat16() for n in (2, 32))
    got = linear_few_rows(x, weight, None, LinearScratch(torch.device("cpu")), Cut(16, 32, 2, 2, 0))
    want = x.double() @ weight.double().T
    assert torch.linalg.norm(got.double() - want) / torch.linalg.norm(want) < 5e-3  # the interpreter cuts off


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 64, 32), (33, 64, 32), (2, 60, 32), (2, 64, 40)])
def test_what_cannot_be_cut_is_refused(rows: int, inputs: int, outputs: int) -> None:
    with pytest.raises(ValueError, match="fit"):
        linear_few_rows(
            torch.zeros(rows, inputs),
            torch.zeros(outputs, inputs),
            None,
            LinearScratch(torch.device("cpu")),
            Cut(16, 32, 2, 2, 0),
        )


@given(st.integers(1, 64), st.integers(1, 160), st.integers(1, 2400), st.sampled_from([78, 108, 132]))
def test_every_cut_fits(rows: int, inputs: int, outputs: int, processors: int) -> None:
    cut = resident_cut(rows, 128 * inputs, 64 * outputs, processors)
    if cut is None:
        assert rows > MOST_ROWS or inputs < 4
    else:
        assert fits(rows, 128 * inputs, 64 * outputs, cut)
        assert cut.splits == 1 or outputs * cut.splits <= 3 * processors


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "splits", "stages"),
    [
        (1, 4096, 6144, 4, 3),
        (8, 4096, 4096, 4, 4),
        (8, 4096, 28672, 1, 4),
        (8, 14336, 4096, 4, 4),
        (16, 4096, 6144, 2, 4),
        (32, 4096, 4096, 2, 5),
        (32, 14336, 4096, 4, 4),
    ],
)
def test_an_8b_llamas_products_on_132_multiprocessors(
    rows: int, inputs: int, outputs: int, splits: int, stages: int
) -> None:
    cut = resident_cut(rows, inputs, outputs, 132)
    assert cut is not None
    assert (cut.splits, cut.stages) == (splits, stages)


def test_other_sizes_and_devices_are_left_to_cublas() -> None:
    assert resident_cut(8, 576, 1536, 132) is None
    assert resident_cut(8, 4096, 4100, 132) is None
    assert resident_cut(33, 4096, 4096, 132) is None
    assert choose_cut(torch.zeros(8, 128), torch.zeros(64, 128)) is None
