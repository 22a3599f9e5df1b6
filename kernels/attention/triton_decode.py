"""Attention of one new token a sequence over its KV pages.

Semantics: for sequence s with length n = lengths[s] (its new token included) and query head h, g = h // (H / G):

    out[s, h] = sum_{t < n} softmax_t(scale * q[s, h] . K[s, t, g]) V[s, t, g]

K and V of token t lie in the pool's page ``pages[s, t // page_tokens]`` at [layer, K|V, t % page_tokens, g]. The
tokens of a sequence are cut into ``splits`` runs that are computed side by side and joined by a second kernel, in
a fixed order. Sequences of length 0 give zeros.

Legend: S sequences, H query heads, G KV heads, M query heads of one KV head (padded to 16), D head_dim, N tokens
of a load, X splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.attention.triton_pages import KVLayout, check_pages
from stencilpress.kernels.triton_launch import INTERPRETED, divide_up, launch_options, multiprocessors, power_of_two

_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["layer"])
def split_kernel(
    q_ptr,
    pool_ptr,
    pages_ptr,
    lengths_ptr,
    out_ptr,
    sums_ptr,
    layer,
    page_elems,
    q_stride,
    pages_stride,
    scale,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    FOR_NEXT: tl.constexpr,
    F32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One run of one sequence for one KV head. Writes the run's normalised output and log2 of its sum. FOR_NEXT: the
    successor starts only after the wait, so that it may read queries and pages before it waits itself; it may write
    the rows of sequences of length 0, which are left alone."""
    if PDL and not FOR_NEXT:
        gdc_launch_dependents()
    split, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, d = tl.arange(0, M), tl.arange(0, DP)
    length = tl.load(lengths_ptr + s)
    run = tl.cdiv(tl.cdiv(length, SPLITS), N) * N
    start = split * run
    end = tl.minimum(start + run, length)
    head = g * HEADS + m
    head_ok = m < HEADS
    kv_ptr = pool_ptr + layer.to(tl.int64) * (2 * PAGE * G * D) + g * D
    if PDL:
        gdc_wait()
        if FOR_NEXT:
            gdc_launch_dependents()
    q_place = s.to(tl.int64) * q_stride + head[:, None] * D + d[None, :]
    q_MD = tl.load(q_ptr + q_place, mask=head_ok[:, None] & (d < D)[None, :], other=0.0)
    peak_M = tl.full((M,), float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros((M,), dtype=tl.float32)
    acc_MD = tl.zeros((M, DP), dtype=tl.float32)
    for first in range(start, end, N):
        t = first + tl.arange(0, N)
        ok = t < end
        page = tl.load(pages_ptr + s.to(tl.int64) * pages_stride + t // PAGE, mask=ok, other=0)
        place_N = page.to(tl.int64) * page_elems + (t % PAGE) * (G * D)
        inside = ok[:, None] & (d < D)[None, :]
        K_ND = tl.load(kv_ptr + place_N[:, None] + d[None, :], mask=inside, other=0.0)
        V_ND = tl.load(kv_ptr + PAGE * G * D + place_N[:, None] + d[None, :], mask=inside, other=0.0)
        if F32_DOT:
            q_MD, K_ND, V_ND = q_MD.to(tl.float32), K_ND.to(tl.float32), V_ND.to(tl.float32)
        score_MN = tl.dot(q_MD, tl.trans(K_ND), input_precision="ieee") * scale
        score_MN = tl.where(ok[None, :], score_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(score_MN, axis=1))
        p_MN = tl.exp2(score_MN - new_peak_M[:, None])
        fade_M = tl.exp2(peak_M - new_peak_M)
        sum_M = sum_M * fade_M + tl.sum(p_MN, axis=1)
        acc_MD = tl.dot(p_MN.to(V_ND.dtype), V_ND, acc_MD * fade_M[:, None], input_precision="ieee")
        peak_M = new_peak_M
    some = tl.maximum(sum_M, 1e-30)
    row = (s * (G * HEADS) + head).to(tl.int64) * SPLITS + split
    keep = head_ok[:, None] & (d < D)[None, :]
    if FOR_NEXT:
        keep = keep & (length > 0)
    out_MD = (acc_MD / some[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * D + d[None, :], out_MD, mask=keep)
    if SPLITS > 1:
        tl.store(sums_ptr + row, peak_M + tl.log2(some), mask=head_ok)


@triton.jit
def join_kernel(
    parts_ptr,
    sums_ptr,
    out_ptr,
    D: tl.constexpr,
    DP: tl.constexpr,
    X: tl.constexpr,
    XP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weighs the runs of one (sequence, head) by their sums."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x, d = tl.arange(0, XP), tl.arange(0, DP)
    sum_X = tl.load(sums_ptr + row * X + x, mask=x < X, other=float("-inf"))
    weight_X = tl.exp2(sum_X - tl.maximum(tl.max(sum_X, axis=0), -1e30))
    inside = (x < X)[:, None] & (d < D)[None, :]
    part_XD = tl.load(parts_ptr + (row * X + x)[:, None] * D + d[None, :], mask=inside, other=0.0)
    total = tl.maximum(tl.sum(weight_X, axis=0), 1e-30)
    out_D = tl.sum(part_XD * weight_X[:, None], axis=0) / total
    tl.store(out_ptr + row * D + d, out_D.to(out_ptr.dtype.element_ty), mask=d < D)


def choose_splits(sequences: int, kv_heads: int, max_length: int, device: torch.device) -> int:
    """Enough runs for three programs a multiprocessor, none shorter than 128 tokens."""
    wanted = divide_up(3 * multiprocessors(device), sequences * kv_heads)
    return max(1, min(wanted, divide_up(max_length, 128), 64))


def choose_load(programs: int, device: torch.device) -> tuple[int, int, int]:
    """Tokens of a load, warps and loads in flight. Many small programs a multiprocessor hide each other's latency;
    measured on an H200, 128 sequences of 288: 39 us against 46; 64 of 192: 18.7 against 16.2."""
    return (32, 1, 2) if programs >= 6 * multiprocessors(device) else (64, 4, 3)


def decode_attention(
    q_SHD: torch.Tensor,
    pool: torch.Tensor,
    pages_SP: torch.Tensor,
    lengths_S: torch.Tensor,
    layer: int,
    kv: KVLayout,
    splits: int,
    scale: float,
    out_SHD: torch.Tensor | None = None,
    *,
    for_next: bool = False,
) -> torch.Tensor:
    """Returns (S, H, D) in q's dtype, ``out_SHD`` (packed) if that is given. ``for_next``, of one split: the next
    kernel may read what this one reads before it waits, and rows of sequences of length 0 are left as they are.

    ``q_SHD`` may be a slice of a wider row (its last two strides are packed). ``pages_SP`` int32 page numbers and
    ``lengths_S`` int32 are read on the device; the launch depends on S and ``splits`` alone. Raises ValueError
    where shapes, strides or dtypes do not fit.
    """
    check_pages(q_SHD, pool, pages_SP, kv)
    if for_next and splits > 1:
        raise ValueError("the kernel that joins splits comes next")
    if out_SHD is not None and (out_SHD.shape != q_SHD.shape or not out_SHD.is_contiguous()):
        raise ValueError("the output must be packed and of q's shape")
    sequences, heads, dim = q_SHD.shape
    out = torch.empty((sequences, heads, dim), dtype=q_SHD.dtype, device=q_SHD.device) if out_SHD is None else out_SHD
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((sequences, heads, splits, dim), dtype=torch.float32, device=q_SHD.device)
        sums = torch.empty((sequences, heads, splits), dtype=torch.float32, device=q_SHD.device)
    per_kv_head, padded = heads // kv.kv_heads, power_of_two(dim)
    options = launch_options(q_SHD.device)
    load, warps, stages = choose_load(splits * kv.kv_heads * sequences, q_SHD.device)
    split_kernel[(splits, kv.kv_heads, sequences)](
        q_SHD,
        pool,
        pages_SP,
        lengths_S,
        parts,
        sums,
        layer,
        kv.page_elems,
        q_SHD.stride(0),
        pages_SP.stride(0),
        scale * _LOG2_E,
        G=kv.kv_heads,
        HEADS=per_kv_head,
        D=dim,
        DP=max(16, padded),
        PAGE=kv.page_tokens,
        M=max(16, power_of_two(per_kv_head)),
        N=load,
        SPLITS=splits,
        FOR_NEXT=for_next,
        F32_DOT=INTERPRETED,
        num_warps=warps,
        num_stages=stages,
        **options,
    )
    if splits > 1:
        runs = power_of_two(splits)
        join_kernel[(sequences * heads,)](parts, sums, out, D=dim, DP=padded, X=splits, XP=runs, num_warps=2, **options)
    return out
