"""Causal attention of prompt chunks over KV pages; the chunk's own K and V are in the pages already.

Semantics: for chunk c with rows i at positions t_i = position(c) + i, query head h and its KV head g,

    out[row(c) + i, h] = sum_{t <= t_i} softmax_t(scale * q[row(c) + i, h] . K[c, t, g]) V[c, t, g]

A program takes a *piece*: some rows of one chunk, all query heads of one KV head side by side, so that K and V are
read once for the group. The host cuts chunks into pieces (:func:`plan_pieces`).

Legend: T rows of the batch, H query heads, G KV heads, M (row, query head) pairs of a piece, D head_dim, N tokens
of a load, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.attention.triton_pages import KVLayout, check_pages
from stencilpress.kernels.triton_launch import INTERPRETED, launch_options, power_of_two

_LOG2_E = 1.4426950408889634
_PAIRS = 128


class ChunkRows(NamedTuple):
    """A chunk: first row in the batch, rows, position of the first, and its row of the page tables."""

    row_start: int
    rows: int
    position: int
    sequence: int


def rows_of_piece(heads_per_kv_head: int) -> int:
    """Rows that one program takes."""
    return max(1, _PAIRS // heads_per_kv_head)


def plan_pieces(chunks: Sequence[ChunkRows], heads_per_kv_head: int) -> npt.NDArray[np.int32]:
    """Cut chunks: (row, rows, position, sequence) int32 per piece, those with the longest context first."""
    most = rows_of_piece(heads_per_kv_head)
    facts = np.asarray(chunks, dtype=np.int64).reshape(-1, 4)
    cuts = -(-facts[:, 1] // most)
    of = np.repeat(np.arange(len(facts)), cuts)
    offset = (np.arange(len(of)) - np.repeat(np.cumsum(cuts) - cuts, cuts)) * most
    rows, position = np.minimum(most, facts[of, 1] - offset), facts[of, 2] + offset
    pieces = np.stack((facts[of, 0] + offset, rows, position, facts[of, 3]), axis=1)
    return pieces[np.argsort(-(position + rows), kind="stable")].astype(np.int32)


@triton.jit
def _attend(
    q_MD,
    acc_MD,
    peak_M,
    sum_M,
    kv_ptr,
    pages_ptr,
    t_M,
    start,
    end,
    page_elems,
    scale,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    CAUSAL: tl.constexpr,
    F32_DOT: tl.constexpr,
):
    """Tokens [start, end) into the running sums; CAUSAL hides those beyond each row's position."""
    d = tl.arange(0, DP)
    for first in range(start, end, N):
        t = first + tl.arange(0, N)
        inside = (d < D)[None, :] & (t >= 0)[:, None]
        if CAUSAL:
            inside = inside & (t < end)[:, None]
            page = tl.load(pages_ptr + t // PAGE, mask=t < end, other=0)
        else:
            page = tl.load(pages_ptr + t // PAGE)
        place_N = page.to(tl.int64) * page_elems + (t % PAGE) * (G * D)
        K_ND = tl.load(kv_ptr + place_N[:, None] + d[None, :], mask=inside, other=0.0)
        V_ND = tl.load(kv_ptr + PAGE * G * D + place_N[:, None] + d[None, :], mask=inside, other=0.0)
        if F32_DOT:
            K_ND, V_ND = K_ND.to(tl.float32), V_ND.to(tl.float32)
        score_MN = tl.dot(q_MD, tl.trans(K_ND), input_precision="ieee") * scale
        if CAUSAL:
            score_MN = tl.where(t[None, :] <= t_M[:, None], score_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(score_MN, axis=1))
        p_MN = tl.exp2(score_MN - new_peak_M[:, None])
        fade_M = tl.exp2(peak_M - new_peak_M)
        sum_M = sum_M * fade_M + tl.sum(p_MN, axis=1)
        acc_MD = tl.dot(p_MN.to(V_ND.dtype), V_ND, acc_MD * fade_M[:, None], input_precision="ieee")
        peak_M = new_peak_M
    return acc_MD, peak_M, sum_M


@triton.jit(do_not_specialize=["layer"])
def prefill_kernel(
    q_ptr,
    pool_ptr,
    pages_ptr,
    pieces_ptr,
    out_ptr,
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
    Q_DONE: tl.constexpr,
    F32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One piece for one KV head: first the tokens that all its rows see, then those near the diagonal. A piece of no
    rows costs little. Q_DONE: all that is read was complete before this launch."""
    if PDL:
        gdc_launch_dependents()
    g, piece_ptr = tl.program_id(0), pieces_ptr + 4 * tl.program_id(1)
    row, rows = tl.load(piece_ptr), tl.load(piece_ptr + 1)
    position, sequence = tl.load(piece_ptr + 2), tl.load(piece_ptr + 3)
    m, d = tl.arange(0, M), tl.arange(0, DP)
    i, head = m // HEADS, g * HEADS + m % HEADS
    ok = i < rows
    kv_ptr = pool_ptr + layer.to(tl.int64) * (2 * PAGE * G * D) + g * D
    table_ptr = pages_ptr + sequence.to(tl.int64) * pages_stride
    keep = ok[:, None] & (d < D)[None, :]
    if PDL and not Q_DONE:
        gdc_wait()
    q_place = (row + i).to(tl.int64) * q_stride + head * D
    q_MD = tl.load(q_ptr + q_place[:, None] + d[None, :], mask=keep, other=0.0)
    if F32_DOT:
        q_MD = q_MD.to(tl.float32)
    peak_M = tl.full((M,), float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros((M,), dtype=tl.float32)
    acc_MD = tl.zeros((M, DP), dtype=tl.float32)
    t_M = position + i
    near = (position + 1) // N * N
    acc_MD, peak_M, sum_M = _attend(
        q_MD, acc_MD, peak_M, sum_M, kv_ptr, table_ptr, t_M, 0, near, page_elems, scale,
        G, D, DP, PAGE, N, False, F32_DOT,
    )  # fmt: skip
    end = position + rows
    acc_MD, peak_M, sum_M = _attend(
        q_MD, acc_MD, peak_M, sum_M, kv_ptr, table_ptr, t_M, near, end, page_elems, scale,
        G, D, DP, PAGE, N, True, F32_DOT,
    )  # fmt: skip
    out_place = (row + i).to(tl.int64) * (G * HEADS * D) + head * D
    out_MD = (acc_MD / tl.maximum(sum_M, 1e-30)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_place[:, None] + d[None, :], out_MD, mask=keep)
    if PDL and Q_DONE:
        gdc_wait()


def prefill_attention(
    q_THD: torch.Tensor,
    pool: torch.Tensor,
    pages_SP: torch.Tensor,
    pieces_N4: torch.Tensor,
    out_THD: torch.Tensor,
    layer: int,
    kv: KVLayout,
    scale: float,
    *,
    q_done: bool = False,
) -> None:
    """Write the rows of all pieces into ``out_THD`` (rows, H, D), packed; other rows stay as they are. ``q_done``: the
    kernel before let its successor start only when queries and pages were complete; the two run side by side.

    ``pieces_N4`` is :func:`plan_pieces` on the device, ``pages_SP`` int32. Raises ValueError where shapes, strides or
    dtypes do not fit.
    """
    check_pages(q_THD, pool, pages_SP, kv)
    if out_THD.shape != q_THD.shape or not out_THD.is_contiguous() or out_THD.dtype != q_THD.dtype:
        raise ValueError("the output must be packed and of q's shape and dtype")
    heads, dim = q_THD.shape[1:]
    per_kv_head = heads // kv.kv_heads
    prefill_kernel[(kv.kv_heads, pieces_N4.shape[0])](
        q_THD,
        pool,
        pages_SP,
        pieces_N4,
        out_THD,
        layer,
        kv.page_elems,
        q_THD.stride(0),
        pages_SP.stride(0),
        scale * _LOG2_E,
        G=kv.kv_heads,
        HEADS=per_kv_head,
        D=dim,
        DP=max(16, power_of_two(dim)),
        PAGE=kv.page_tokens,
        M=max(_PAIRS, power_of_two(per_kv_head)),
        N=32,
        Q_DONE=q_done,
        F32_DOT=INTERPRETED,
        num_warps=4,
        num_stages=5,
        **launch_options(q_THD.device),
    )
