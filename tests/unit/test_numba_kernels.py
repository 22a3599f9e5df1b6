"""The CPU's small kernels, bit for bit against PyTorch and transformers in the same dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from stencilpress.kernels.attention.numba_decode import rotate_and_write
from stencilpress.kernels.norm.numba_rms_norm import rms_norm
from stencilpress.kernels.numba_bits import elements, exp, jit, narrow, widen
from stencilpress.kernels.silu.numba_silu_mul import silu_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=DTYPES, ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(5)
    picked: torch.dtype = request.param
    return picked


@jit
def _convert(source, target):  # type: ignore[no-untyped-def]
    for i in range(source.shape[0]):
        target[i] = narrow(widen(source[i]), target)


@jit
def _exp(x, y):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        y[i] = exp(x[i])


def _same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_16_bit_float_is_widened_as_pytorch_does(half: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half)
    wide = torch.empty(2**16)
    _convert(elements(every), elements(wide))
    _same(wide, every.float())


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_float32_is_rounded_as_pytorch_does(half: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int64).to(torch.int32)
    ties = torch.arange(0, 2**31 - 1, 2**15, dtype=torch.int32)
    wide = torch.cat((bits, ties, -ties)).view(torch.float32)
    rounded = torch.empty(len(wide), dtype=half)
    _convert(elements(wide), elements(rounded))
    _same(rounded, wide.to(half))


def test_exp_is_accurate_to_a_few_ulp_and_keeps_nan() -> None:
    x = np.concatenate(
        (np.linspace(-87, 88, 200_001, dtype=np.float32), np.array([0, np.nan, -np.inf, -1000], dtype=np.float32))
    )
    y = np.empty_like(x)
    _exp(x, y)
    exact = np.exp(x[:200_002].astype(np.float64))
    assert np.max(np.abs(y[:200_002] / exact - 1)) < 3e-7
    assert np.isnan(y[-3])
    assert (y[-2:] < 2e-38).all()


def test_rms_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    x, norm = torch.randn(5, 576).to(dtype), LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(576).to(dtype)
    out = torch.empty_like(x)
    rms_norm(elements(x), elements(norm.weight.detach()), 1e-5, elements(out))
    expected = norm(x).detach()
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected)  # the order of a sum
    else:
        assert (out != expected).float().mean() < 2e-3, "but for a sum's order near a tie"


def test_the_gate_rounds_as_pytorch_does(dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(5, 2 * 100).to(dtype)
    gate_up[2, 7] = torch.nan
    out = torch.empty(5, 100, dtype=dtype)
    silu_mul(elements(gate_up), elements(out))
    expected = silu(gate_up[:, :100]) * gate_up[:, 100:]
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected, equal_nan=True)
    else:
        differ = (out != expected) & ~expected.isnan()
        assert differ.float().mean() < 1e-2, "but for an ulp of exp near a tie"
        assert torch.equal(out.isnan(), expected.isnan())


def test_rotation_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim, page_tokens = 4, 2, 16, 16
    qkv = torch.randn(3, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.outer(torch.arange(40.0), 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    positions, pool = np.array([0, 17, 39]), torch.full((4 * 2 * page_tokens * 32,), torch.nan, dtype=dtype)
    none = elements(torch.empty(0, dtype=dtype))
    before = qkv.clone().view(3, -1, head_dim)

    rotate_and_write(
        elements(qkv), heads, none, none, 1e-6, elements(cos), elements(sin),
        positions, elements(pool), np.array([0, 1, 40]), 0, page_tokens,
    )  # fmt: skip

    q, k = before[:, None, :heads].transpose(1, 2), before[:, None, heads : heads + kv_heads].transpose(1, 2)
    full = [torch.cat((factor[positions],) * 2, -1)[:, None] for factor in (cos, sin)]
    q, k = apply_rotary_pos_emb(q, k, *full)
    after = qkv.view(3, -1, head_dim)
    torch.testing.assert_close(after[:, :heads], q[:, :, 0], rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 0)
    torch.testing.assert_close(after[:, heads:-kv_heads], k[:, :, 0], rtol=1e-6, atol=1e-6)
    rows = pool.view(-1, kv_heads * head_dim)
    assert torch.equal(rows[[0, 1, 40]], after[:, heads:-kv_heads].flatten(1))
    assert torch.equal(rows[[16, 17, 56]], before[:, -kv_heads:].flatten(1))
