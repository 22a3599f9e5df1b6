"""Expand: add each adapter's share to the outputs of its rows.

Semantics: for block b of the work list with items w, rows m and projection p of the group,

    y[row(b) + m, off_p + o] += sum_{w of b} sum_r h[w, p, m, r] * B[w, p, r, o]
    h[w, p, m, r] = scale[w, p] * sum_k partial[w, p, k, m, r]

accumulated in fp32, in place. Columns of projections that the adapter does not adapt are not touched.

Legend: T rows of the batch, O out_features of a projection, W items, P projections, K parts (KP: the
power of two at or above), M rows of a block,
R rank slices of an item, S elements of the pool, E entries. Each of the group's projections is cut into
tiles of BLOCK outputs; N0, N1, N2 are their widths (0: the group has no such projection).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.sgmv.triton_shrink import adapted_before


@triton.jit
def _place(tile, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr):
    """Of a tile of outputs: its projection, first output in it, the projection's width and first column of y."""
    T0: tl.constexpr = (N0 + BLOCK - 1) // BLOCK
    T1: tl.constexpr = T0 + (N1 + BLOCK - 1) // BLOCK
    p = (tile >= T0).to(tl.int32) + (tile >= T1).to(tl.int32)
    first = tl.where(p == 0, 0, tl.where(p == 1, T0, T1))
    width = tl.where(p == 0, N0, tl.where(p == 1, N1, N2))
    column = tl.where(p == 0, 0, tl.where(p == 1, N0, N0 + N1))
    return p, (tile - first) * BLOCK, width, column


@triton.jit
def _rows_of_A(mask):
    return (mask & 1) + ((mask >> 1) & 1) + ((mask >> 2) & 1)


@triton.jit
def _load_B_RO(
    pool_ptr,
    address_R,
    mask,
    live,
    p,
    start,
    width,
    D: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Outputs [start, start + BLOCK) of one projection's rows of B transposed; zero where there are none."""
    o = start + tl.arange(0, BLOCK)
    before = tl.where(p > 0, (mask & 1) * N0, 0) + tl.where(p > 1, ((mask >> 1) & 1) * N1, 0)
    base = tl.multiple_of(address_R, ALIGN) + tl.multiple_of(_rows_of_A(mask) * D + before, ALIGN)
    wanted = live & (((mask >> p) & 1) != 0)
    there = (address_R >= 0)[:, None] & (o < width)[None, :] & wanted
    return tl.load(pool_ptr + base[:, None] + o[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["entry"])
def expand_rows_kernel(
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
    KP: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of one row each. The first weights load before the wait for the shrink."""
    if PDL:
        gdc_launch_dependents()
    r, k = tl.arange(0, R), tl.arange(0, KP)
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    unit = tl.program_id(0)
    block = unit // TILES
    address_R = tl.load(addresses_ptr + block * R + r)
    mask = tl.load(entries_ptr + block * 4)
    units = tl.load(counts_ptr) * TILES
    p, start, width, column = _place(unit % TILES, N0, N1, N2, BLOCK)
    B_RO = _load_B_RO(pool_ptr, address_R, mask, unit < units, p, start, width, D, N0, N1, BLOCK, ALIGN)
    if PDL:
        gdc_wait()
    while unit < units:
        row, items = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 2)
        extra = tl.load(blocks_ptr + block * 4 + 3)
        scale = tl.load(entries_ptr + block * 4 + 1 + p).to(tl.float32, bitcast=True)
        adapted = ((mask >> p) & 1) != 0
        o = start + tl.arange(0, BLOCK)
        y_O_ptr = y_ptr + row.to(tl.int64) * y_stride + column + o
        y_O = tl.load(y_O_ptr, mask=(o < width) & adapted, other=0.0)
        acc_O = tl.zeros((BLOCK,), dtype=tl.float32)
        item = block
        for nth in tl.range(0, items, num_stages=1):
            place = ((item * P + p) * K).to(tl.int64) * R
            there = (k < K)[:, None] & ((address_R >= 0) & adapted)[None, :]
            planes_ptr = partial_ptr + place + k[:, None] * R + r[None, :]
            partial_KR = tl.load(planes_ptr, mask=there, other=0.0, cache_modifier=".cg")
            acc_O += tl.sum(tl.sum(partial_KR, axis=0)[:, None] * B_RO.to(tl.float32), axis=0)
            item = extra + nth
            more = nth + 1 < items
            address_R = tl.load(addresses_ptr + item * R + r, mask=more, other=-1)
            B_RO = _load_B_RO(pool_ptr, address_R, mask, more, p, start, width, D, N0, N1, BLOCK, ALIGN)
        y_O = (y_O.to(tl.float32) + scale * acc_O).to(y_ptr.dtype.element_ty)
        tl.store(y_O_ptr, y_O, mask=(o < width) & adapted)
        unit += tl.num_programs(0)
        block = unit // TILES
        live = unit < units
        address_R = tl.load(addresses_ptr + block * R + r, mask=live, other=-1)
        mask = tl.load(entries_ptr + block * 4, mask=live, other=0)
        p, start, width, column = _place(unit % TILES, N0, N1, N2, BLOCK)
        B_RO = _load_B_RO(pool_ptr, address_R, mask, live, p, start, width, D, N0, N1, BLOCK, ALIGN)


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
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    F32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of up to M rows, on tensor cores. h enters as the sum of two bf16 numbers, so that rounding
    it costs nothing beside rounding y."""
    if PDL:
        gdc_launch_dependents()
    r, m = tl.arange(0, R), tl.arange(0, M)
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    if PDL:
        gdc_wait()
    units = tl.load(counts_ptr) * TILES
    unit = tl.program_id(0)
    while unit < units:
        block = unit // TILES
        p, start, width, column = _place(unit % TILES, N0, N1, N2, BLOCK)
        row, rows = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
        items, extra = tl.load(blocks_ptr + block * 4 + 2), tl.load(blocks_ptr + block * 4 + 3)
        mask = tl.load(entries_ptr + block * 4)
        scale = tl.load(entries_ptr + block * 4 + 1 + p).to(tl.float32, bitcast=True)
        adapted = ((mask >> p) & 1) != 0
        o = start + tl.arange(0, BLOCK)
        y_MO_ptr = y_ptr + (row + m).to(tl.int64)[:, None] * y_stride + (column + o)[None, :]
        inside = (m < rows)[:, None] & ((o < width) & adapted)[None, :]
        y_MO = tl.load(y_MO_ptr, mask=inside, other=0.0)
        acc_MO = tl.zeros((M, BLOCK), dtype=tl.float32)
        for nth in tl.range(0, items, num_stages=1):
            item = tl.where(nth == 0, block, extra + nth - 1)
            address_R = tl.load(addresses_ptr + item * R + r)
            B_RO = _load_B_RO(pool_ptr, address_R, mask, True, p, start, width, D, N0, N1, BLOCK, ALIGN)
            place = ((item * P + p) * K).to(tl.int64) * (M * R)
            there = (m < rows)[:, None] & ((address_R >= 0) & adapted)[None, :]
            h_MR = tl.zeros((M, R), dtype=tl.float32)
            for k in tl.static_range(K):
                plane_ptr = partial_ptr + place + k * (M * R) + m[:, None] * R + r[None, :]
                h_MR += tl.load(plane_ptr, mask=there, other=0.0, cache_modifier=".cg")
            if F32_DOT:
                acc_MO = tl.dot(h_MR, B_RO.to(tl.float32), acc_MO, input_precision="ieee")
            else:
                high_MR = h_MR.to(B_RO.dtype)
                low_MR = (h_MR - high_MR.to(tl.float32)).to(B_RO.dtype)
                acc_MO = tl.dot(high_MR, B_RO, acc_MO, input_precision="ieee")
                acc_MO = tl.dot(low_MR, B_RO, acc_MO, input_precision="ieee")
        tl.store(y_MO_ptr, (y_MO.to(tl.float32) + scale * acc_MO).to(y_ptr.dtype.element_ty), mask=inside)
        unit += tl.num_programs(0)
