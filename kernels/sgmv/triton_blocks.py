"""The segmented product for blocks of many rows, on tensor cores: two kernels.

Semantics: for item w of the work list with rows m, projection p of the group and rank slice r,

    partial[w, p, k, m, r] = sum_{i in part k of D} x[row(w) + m, i] * A[w, p, r, i]

and for block b with items w,

    y[row(b) + m, off_p + o] += scale[b, p] * sum_{w of b} sum_r (sum_k partial[w, p, k, m, r]) * B[w, p, r, o]

accumulated in fp32, the parts in order and without atomics. What an adapter does not have counts as zero; columns of
projections that it does not adapt are not touched.

Legend: T rows of the batch, D in_features, O out_features of a projection, W items, P projections, K parts of D, M rows
of a block (MS: of a shrink program), R rank slices of an item, E entries. Each projection is cut into tiles of
BLOCK outputs; N0, N1, N2 are their widths (0: the group has no such projection).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.sgmv.triton_tiles import (
    dot_exactly,
    load_A_RK,
    load_B_RO,
    place_tile,
    prefetch_A,
    prefetch_B,
    prefetch_rows,
    sum_parts,
)


@triton.jit(do_not_specialize=["entry"])
def shrink_blocks_kernel(
    x_ptr,
    pool_ptr,
    counts_ptr,
    items_ptr,
    addresses_ptr,
    entries_ptr,
    partial_ptr,
    entry,
    max_items,
    x_stride,
    D: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    MS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    F32_DOT: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of PART inputs is walked BLOCK at a time, for MS rows of an item. Its successor starts only after
    the wait: then all that precedes this kernel is done, so that the expand may load y before it waits. Tensor cores
    take 64 rows at a time on Hopper: those are the ranks where x has fewer (SWAP). PREFETCH: the weights come to the L2
    cache before the wait ends."""
    SUBS: tl.constexpr = M // MS
    SWAP: tl.constexpr = R >= 64 and MS < 64
    r, m = tl.arange(0, R), tl.arange(0, MS)
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    unit = tl.program_id(0)
    item, sub, p, k = unit // (SUBS * P * K), unit // (P * K) % SUBS, unit // K % P, unit % K
    address_R = tl.multiple_of(tl.load(addresses_ptr + item * R + r), ALIGN)
    mask = tl.load(entries_ptr + item * 4)
    row, rows = tl.load(items_ptr + item * 4), tl.load(items_ptr + item * 4 + 1)
    live = (item < tl.load(counts_ptr + 1)) & (sub * MS < rows)
    if PREFETCH and PDL:
        prefetch_A(pool_ptr, address_R, mask, live, p, k * PART, PART, D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if live:
        m += sub * MS
        ok = (m < rows)[:, None]
        x_rows_ptr = x_ptr + (row + m).to(tl.int64)[:, None] * x_stride
        end = tl.minimum(D, (k + 1) * PART)
        acc_MR = tl.zeros((R, MS) if SWAP else (MS, R), dtype=tl.float32)
        for start in range(k * PART, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x_MK = tl.load(x_rows_ptr + i[None, :], mask=ok & (i < end)[None, :], other=0.0)
            A_RK = load_A_RK(pool_ptr, address_R, mask, True, p, start, end, BLOCK, D)
            if F32_DOT:
                x_MK, A_RK = x_MK.to(tl.float32), A_RK.to(tl.float32)
            if SWAP:
                acc_MR = tl.dot(A_RK, tl.trans(x_MK), acc_MR, input_precision="ieee")
            else:
                acc_MR = tl.dot(x_MK, tl.trans(A_RK), acc_MR, input_precision="ieee")
        if SWAP:
            acc_MR = tl.trans(acc_MR)
        place = ((item * P + p) * K + k).to(tl.int64) * (M * R)
        tl.store(partial_ptr + place + m[:, None] * R + r[None, :], acc_MR, mask=ok)


@triton.jit(do_not_specialize=["entry"])
def expand_blocks_kernel(
    y_ptr,
    pool_ptr,
    counts_ptr,
    blocks_ptr,
    addresses_ptr,
    entries_ptr,
    partial_ptr,
    entry,
    max_items,
    y_stride,
    D: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    J: tl.constexpr,
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    F32_DOT: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes J tiles of one block side by side. The first weights and y load before the wait for the shrink,
    the next ones before the last are stored; PREFETCH: they come to the L2 cache before the wait ends."""
    if PDL:
        gdc_launch_dependents()
    r, m = tl.arange(0, R), tl.arange(0, M)
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    unit = tl.program_id(0)
    block = unit // TILES
    address_R = tl.multiple_of(tl.load(addresses_ptr + block * R + r), ALIGN)
    mask = tl.load(entries_ptr + block * 4)
    live = block < tl.load(counts_ptr)
    row, rows = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
    items, extra = tl.load(blocks_ptr + block * 4 + 2), tl.load(blocks_ptr + block * 4 + 3)
    p, start, width, column = place_tile(unit % TILES, N0, N1, N2, BLOCK * J)
    scale = tl.load(entries_ptr + block * 4 + 1 + p).to(tl.float32, bitcast=True)
    rows_ok = (m < rows)[:, None]
    o = start + tl.arange(0, BLOCK)
    y_MO_ptr = y_ptr + (row + m).to(tl.int64)[:, None] * y_stride + (column + o)[None, :]
    wanted = live & (((mask >> p) & 1) != 0)
    inside = rows_ok & ((o < width) & wanted)[None, :]
    B_RO = load_B_RO(pool_ptr, address_R, mask, live, p, start, width, D, N0, N1, BLOCK, ALIGN)
    y_MO = tl.load(y_MO_ptr, mask=inside, other=0.0, cache_modifier=".cg")
    if PREFETCH and PDL and J > 1:
        ahead = (J - 1) * BLOCK
        y_M = (row + m).to(tl.int64) * y_stride + column
        prefetch_rows(y_ptr, y_M, (m < rows) & wanted, start + BLOCK, ahead, width)
        prefetch_B(pool_ptr, address_R, mask, live, p, start + BLOCK, ahead, width, D, N0, N1)
    if PDL:
        gdc_wait()
    if live:
        h_MR = sum_parts(partial_ptr, (block * P + p) * K, address_R, scale, rows_ok, M, R, K)
        for j in tl.static_range(J):
            acc_MO = dot_exactly(h_MR, B_RO, tl.zeros((M, BLOCK), dtype=tl.float32), F32_DOT)
            for nth in tl.range(0, items - 1, num_stages=1):
                item = extra + nth
                later_R = tl.multiple_of(tl.load(addresses_ptr + item * R + r), ALIGN)
                B_RO = load_B_RO(pool_ptr, later_R, mask, True, p, start, width, D, N0, N1, BLOCK, ALIGN)
                later_MR = sum_parts(partial_ptr, (item * P + p) * K, later_R, scale, rows_ok, M, R, K)
                acc_MO = dot_exactly(later_MR, B_RO, acc_MO, F32_DOT)
            done_MO, done_ptr, done = (y_MO.to(tl.float32) + acc_MO).to(y_ptr.dtype.element_ty), y_MO_ptr, inside
            if j + 1 < J:
                start += BLOCK
                o += BLOCK
                y_MO_ptr += BLOCK
                inside = rows_ok & ((o < width) & wanted)[None, :]
                B_RO = load_B_RO(pool_ptr, address_R, mask, True, p, start, width, D, N0, N1, BLOCK, ALIGN)
                y_MO = tl.load(y_MO_ptr, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(done_ptr, done_MO, mask=done)
