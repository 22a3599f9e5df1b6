"""Drawing from the whole vocabulary, in Triton's interpreter, against the sampler that sorts it."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.engine.messages import Sampling
from stencilpress.engine.plan import Draw
from stencilpress.engine.sampler import _altered, _pick
from stencilpress.kernels.draw.triton_wide import draw_wide

VOCAB = 397


def _drawn(logits: torch.Tensor, samplings: list[Sampling], settled: torch.Tensor) -> tuple[list[int], list[int]]:
    """What the kernel draws, and what the sorted vocabulary gives."""
    scores = logits.float()
    filters = _altered(scores, [Draw(sampling, [1], 1, n) for n, sampling in enumerate(samplings)])
    wanted, _ = _pick(scores, filters, scores.shape[1])
    tokens = torch.full_like(wanted, -7)
    keep, top_p, min_p, uniform = filters.columns()
    draw_wide(scores, scores.logsumexp(-1), settled, keep, top_p, min_p, uniform, tokens)
    return tokens.tolist(), wanted.tolist()


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_sorted_vocabulary(dtype: torch.dtype) -> None:
    """bfloat16 makes many equal scores; a row of zeros has nothing else."""
    rng = random.Random(3)
    choices = [
        Sampling(
            temperature=rng.choice((0.5, 1.0, 2.0)),
            top_k=rng.choice((0, 0, 1, 40, 300, VOCAB)),
            top_p=rng.choice((1.0, 0.9, 0.3, 0.9999)),
            min_p=rng.choice((0.0, 0.0, 0.05, 1.0)),
            seed=seed,
        )
        for seed in range(14)
    ]
    logits = torch.randn(14, VOCAB, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[3] = 0.0
    logits[4, 7:] = -torch.inf

    got, want = _drawn(logits, choices, torch.zeros(14, dtype=torch.bool))

    assert got == want


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_settled_rows_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    got, want = _drawn(logits, [Sampling(seed=1)] * 2, torch.tensor([True, False]))
    assert got == [-7, want[1]]


def test_dtypes_and_sizes_are_checked() -> None:
    one, numbers = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    settled, scores = torch.zeros(1, dtype=torch.bool), torch.zeros(1, VOCAB)
    with pytest.raises(ValueError, match="dtypes"):
        draw_wide(scores.double(), scores[:, 0], settled, one, numbers, numbers, numbers, one)
    with pytest.raises(ValueError, match="do not fit"):
        draw_wide(scores, scores[0], settled, one, numbers, numbers, numbers, one)
