"""Rotary embedding of queries and keys, and the write of keys and values into their KV pages.

Semantics: for row t at position n = positions[t], head h and i < D / 2 (rotate-half convention):

    q'[t, h, i]         = q[t, h, i] cos[n, i] - q[t, h, i + D/2] sin[n, i]
    q'[t, h, i + D / 2] = q[t, h, i + D/2] cos[n, i] + q[t, h, i] sin[n, i]

in place in q, and the same for k, which goes with v to the pool at ``slots[t]`` (page * page_tokens + offset),
in [layer, K|V, offset, kv_head]; they go nowhere where that is negative. With weights, q and k of each head pass an
RMS norm first (Qwen 3).

Legend: T rows, H query heads, G KV heads, D head_dim, F half of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.attention.triton_pages import KVLayout
from stencilpress.kernels.triton_launch import launch_options, power_of_two


@triton.jit
def _normed(low, high, weight_ptr, f, ok, eps, D: tl.constexpr):
    factor = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D + eps)[:, None]
    dtype = weight_ptr.dtype.element_ty
    low_weight = tl.load(weight_ptr + f, mask=ok, other=0.0).to(tl.float32)[None, :]
    high_weight = tl.load(weight_ptr + D // 2 + f, mask=ok, other=0.0).to(tl.float32)[None, :]
    low = ((low * factor).to(dtype).to(tl.float32) * low_weight).to(dtype)
    high = ((high * factor).to(dtype).to(tl.float32) * high_weight).to(dtype)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit(do_not_specialize=["layer"])
def rope_kernel(
    qkv_ptr,
    pool_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    layer,
    page_elems,
    qkv_stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HP: tl.constexpr,
    FP: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, 0) turns the queries of row t, program (t, 1) writes its keys and values."""
    if PDL:
        gdc_launch_dependents()
    t, part = tl.program_id(0), tl.program_id(1)
    head, f = tl.arange(0, HP), tl.arange(0, FP)
    half: tl.constexpr = D // 2
    ok = f < half
    position = tl.load(positions_ptr + t).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    cos_F = tl.load(cos_ptr + position * half + f, mask=ok, other=0.0)[None, :]
    sin_F = tl.load(sin_ptr + position * half + f, mask=ok, other=0.0)[None, :]
    if PDL:
        gdc_wait()
    count = tl.where(part == 0, H, G)
    row_ptr = qkv_ptr + t.to(tl.int64) * qkv_stride + part * (H * D)
    inside = (head < count)[:, None] & ok[None, :]
    place = head[:, None] * D + f[None, :]
    low = tl.load(row_ptr + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row_ptr + place + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        weight_ptr = q_weight_ptr if part == 0 else k_weight_ptr
        low, high = _normed(low, high, weight_ptr, f, ok, eps, D)
    dtype = qkv_ptr.dtype.element_ty
    new_low, new_high = (low * cos_F - high * sin_F).to(dtype), (high * cos_F + low * sin_F).to(dtype)
    if part == 0:
        tl.store(row_ptr + place, new_low, mask=inside)
        tl.store(row_ptr + place + half, new_high, mask=inside)
    else:
        inside = inside & (slot >= 0)
        page = (slot // PAGE).to(tl.int64)
        k_ptr = pool_ptr + page * page_elems + layer.to(tl.int64) * (2 * PAGE * G * D) + slot % PAGE * (G * D)
        tl.store(k_ptr + place, new_low, mask=inside)
        tl.store(k_ptr + place + half, new_high, mask=inside)
        v_low = tl.load(row_ptr + G * D + place, mask=inside, other=0.0)
        v_high = tl.load(row_ptr + G * D + place + half, mask=inside, other=0.0)
        tl.store(k_ptr + PAGE * G * D + place, v_low, mask=inside)
        tl.store(k_ptr + PAGE * G * D + place + half, v_high, mask=inside)


def rope_and_write_kv(
    qkv_TN: torch.Tensor,
    heads: int,
    pool: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cos_NF: torch.Tensor,
    sin_NF: torch.Tensor,
    layer: int,
    kv: KVLayout,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Turn q in place in ``qkv_TN`` (rows, (H + 2 G) D: q, k, v side by side) and write k and v to the pool.

    ``positions_T`` int32; ``slots_T`` int32, page * page_tokens + offset, or -1; ``cos_NF``, ``sin_NF`` fp32
    (positions, D / 2); ``norms``: weights of the query and key norms and their epsilon. Raises ValueError on a misfit.
    """
    rows, width = qkv_TN.shape
    dim = kv.head_dim
    if width != (heads + 2 * kv.kv_heads) * dim or qkv_TN.stride(1) != 1:
        raise ValueError(f"qkv {tuple(qkv_TN.shape)} does not hold {heads} + 2 * {kv.kv_heads} heads of {dim}")
    if qkv_TN.dtype != pool.dtype or not pool.is_contiguous():
        raise ValueError("the pool must be contiguous and share qkv's dtype")
    if cos_NF.shape[1] != dim // 2 or cos_NF.dtype != torch.float32 or not cos_NF.is_contiguous():
        raise ValueError("cos and sin are packed fp32 of half a head")
    q_weight, k_weight, eps = norms if norms is not None else (qkv_TN, qkv_TN, 0.0)
    rope_kernel[(rows, 2)](
        qkv_TN,
        pool,
        positions_T,
        slots_T,
        cos_NF,
        sin_NF,
        q_weight,
        k_weight,
        layer,
        kv.page_elems,
        qkv_TN.stride(0),
        eps,
        H=heads,
        G=kv.kv_heads,
        D=dim,
        HP=power_of_two(max(heads, kv.kv_heads)),
        FP=power_of_two(dim // 2),
        PAGE=kv.page_tokens,
        NORM=norms is not None,
        num_warps=4,
        **launch_options(qkv_TN.device),
    )
