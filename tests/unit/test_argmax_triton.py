"""The most likely token, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.kernels.argmax.triton_argmax import best_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_the_first_of_the_best(dtype: torch.dtype) -> None:
    x = torch.randn(6, 9000, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1, [8999, 5000, 77]] = 9.0
    x[2, 4500] = math.nan
    x[3, 3] = math.inf
    x[4] = -math.inf
    x[5, 100:] = -math.inf
    out, last = torch.full((6,), 7, dtype=torch.int32), torch.full((9,), 7, dtype=torch.int32)

    best_tokens(x, torch.tensor([4, 0, 1, 8, 3, 2], dtype=torch.int32), out, last)

    assert out.tolist() == [int(x[0].argmax()), 77, -1, -1, -1, int(x[5].argmax())]
    assert last.tolist() == [77, -1, out[5], -1, out[0], 7, 7, 7, -1]


def test_no_rows_are_no_work() -> None:
    none = torch.empty(0, dtype=torch.int32)
    best_tokens(torch.empty(0, 50), none, none, none)


def test_sizes_are_checked() -> None:
    three = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        best_tokens(torch.zeros(2, 50), three, three, three)
