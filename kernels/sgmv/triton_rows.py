"""The segmented product for blocks of one row each, as in a decode: one kernel.

Semantics: for block b of the work list, its row t, its items w, and projection p of the group,

    y[t, off_p + o] += scale[b, p] * sum_{w of b} sum_r (sum_i x[t, i] * A[w, p, r, i]) * B[w, p, r, o]

in fp32. The first programs of the launch shrink: each takes one part of the inputs of one item and leaves its sums in
``partial``. The others expand: each takes one tile of outputs of one block, loads its weights at once, waits until the
block's shrinks have arrived, and adds up their parts in order: no sum depends on timing.

Waiting inside a launch is safe because programs start in the order of their numbers, and those that shrink wait for
nobody. ``arrived`` counts, for each block and projection, the shrinks and then the expands that are done; the last
one sets it back to zero.

Legend: T rows of the batch, D in_features, O out_features of a projection, W items, B blocks, P projections, K parts of D
(KP: the power of two at or above), R rank slices of an item, E entries. PART inputs make a part; outputs are cut
into TILES tiles of BLOCK; N0, N1, N2 are the projections' widths (0: the group has no such projection).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.sgmv.triton_tiles import load_A_RK, load_B_RO, place_tile


@triton.jit(do_not_specialize=["entry"])
def rows_kernel(
    x_ptr,
    y_ptr,
    pool_ptr,
    counts_ptr,
    blocks_ptr,
    items_ptr,
    addresses_ptr,
    entries_ptr,
    arrived_ptr,
    partial_ptr,
    entry,
    max_items,
    x_stride,
    y_stride,
    D: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    unit = tl.program_id(0)
    shrinks = max_items * (P * K)
    if unit < shrinks:
        _shrink(
            x_ptr, pool_ptr, counts_ptr, items_ptr, addresses_ptr, entries_ptr, arrived_ptr, partial_ptr,
            unit, x_stride, D, P, K, R, PART, ALIGN, PDL,
        )  # fmt: skip
    else:
        _expand(
            y_ptr, pool_ptr, counts_ptr, blocks_ptr, addresses_ptr, entries_ptr, arrived_ptr, partial_ptr,
            unit - shrinks, y_stride, D, N0, N1, N2, P, K, KP, R, BLOCK, TILES, ALIGN, PDL,
        )  # fmt: skip


@triton.jit
def _shrink(
    x_ptr, pool_ptr, counts_ptr, items_ptr, addresses_ptr, entries_ptr, arrived_ptr, partial_ptr,
    unit, x_stride,
    D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, R: tl.constexpr, PART: tl.constexpr, ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, R)
    item, p, k = unit // (P * K), unit // K % P, unit % K
    address_R = tl.multiple_of(tl.load(addresses_ptr + item * R + r), ALIGN)
    mask = tl.load(entries_ptr + item * 4)
    live = item < tl.load(counts_ptr + 1)
    row, block = tl.load(items_ptr + item * 4), tl.load(items_ptr + item * 4 + 3)
    A_RK = load_A_RK(pool_ptr, address_R, mask, live, p, k * PART, D, PART, D, ALIGN)
    if PDL:
        gdc_wait()
    if live:
        i = k * PART + tl.arange(0, PART)
        x_K = tl.load(x_ptr + row.to(tl.int64) * x_stride + i, mask=i < D, other=0.0).to(tl.float32)
        place = ((item * P + p) * K + k).to(tl.int64) * R
        tl.store(partial_ptr + place + r, tl.sum(A_RK.to(tl.float32) * x_K[None, :], axis=1))
        tl.debug_barrier()
        tl.atomic_add(arrived_ptr + block * 4 + p, 1, sem="release")


@triton.jit
def _expand(
    y_ptr, pool_ptr, counts_ptr, blocks_ptr, addresses_ptr, entries_ptr, arrived_ptr, partial_ptr,
    unit, y_stride,
    D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r, k = tl.arange(0, R), tl.arange(0, KP)
    block = unit // TILES
    address_R = tl.multiple_of(tl.load(addresses_ptr + block * R + r), ALIGN)
    mask = tl.load(entries_ptr + block * 4)
    live = block < tl.load(counts_ptr)
    row, items = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 2)
    extra = tl.load(blocks_ptr + block * 4 + 3)
    p, start, width, column = place_tile(unit % TILES, N0, N1, N2, BLOCK)
    scale = tl.load(entries_ptr + block * 4 + 1 + p).to(tl.float32, bitcast=True)
    B_RO = load_B_RO(pool_ptr, address_R, mask, live, p, start, width, D, N0, N1, BLOCK, ALIGN)
    if PDL:
        gdc_wait()
    if live:
        o = start + tl.arange(0, BLOCK)
        inside = (o < width) & (((mask >> p) & 1) != 0)
        y_O_ptr = y_ptr + row.to(tl.int64) * y_stride + column + o
        y_O = tl.load(y_O_ptr, mask=inside, other=0.0)
        arrived_ptr += block * 4 + p
        seen = tl.atomic_add(arrived_ptr, 0, sem="acquire")
        while seen < items * K:
            seen = tl.atomic_add(arrived_ptr, 0, sem="acquire")
        acc_O = tl.zeros((BLOCK,), dtype=tl.float32)
        item = block
        for nth in tl.range(0, items, num_stages=1):
            place = ((item * P + p) * K).to(tl.int64) * R
            planes_ptr = partial_ptr + place + k[:, None] * R + r[None, :]
            partial_KR = tl.load(planes_ptr, mask=(k < K)[:, None], other=0.0, cache_modifier=".cg")
            h_R = tl.where(address_R >= 0, tl.sum(partial_KR, axis=0), 0.0)
            acc_O += tl.sum(h_R[:, None] * B_RO.to(tl.float32), axis=0)
            item = extra + nth
            more = nth + 1 < items
            address_R = tl.multiple_of(tl.load(addresses_ptr + item * R + r, mask=more, other=-1), ALIGN)
            B_RO = load_B_RO(pool_ptr, address_R, mask, more, p, start, width, D, N0, N1, BLOCK, ALIGN)
        tl.store(y_O_ptr, (y_O.to(tl.float32) + scale * acc_O).to(y_ptr.dtype.element_ty), mask=inside)
        done = tl.atomic_add(arrived_ptr, 1, sem="relaxed")
        if done == items * K + (width + BLOCK - 1) // BLOCK - 1:
            tl.store(arrived_ptr, 0)
