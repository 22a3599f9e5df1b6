"""The segmented product for blocks of one row each, as in a decode: one kernel.

Semantics: for block b of the work list, its row t, its items w, and projection p of the group,

    y[t, off_p + o] += scale[b, p] * sum_{w of b} sum_r (sum_i x[t, i] * A[w, p, r, i]) * B[w, p, r, o]

in fp32. The first programs of the launch shrink: each takes one part of the inputs of one item and leaves its sums in
``partial``. The others expand: each takes one tile of outputs of one item, loads its weights at once, waits until the
item's shrinks have arrived, and adds up their parts in order. Where a block has further items, these leave their
sums in ``delta``, and the program of the block's first item adds them to its own, in order: no sum depends on timing.

Waiting inside a launch is safe because programs start in the order of their numbers, and each waits only for programs
of lower numbers: expands for shrinks, first items for further ones (items are taken from the last to the first). Two
counters say how far things are: ``arrived``, of each item and projection (shrinks, then expands: the last one sets it
back to zero), and ``ready``, of each tile of a block (further items: the first item sets it back). Waiting is by one
thread a program: when all of them watch, the weights come later.

Legend: T rows of the batch, D in_features, O out_features of a projection, W items, B blocks, P projections, K parts
of D (KP: the power of two at or above), R rank slices of an item, E entries. PART inputs make a part; outputs are cut
into TILES tiles of BLOCK; N0, N1, N2 are the projections' widths (0: the group has no such projection).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.sgmv.triton_tiles import load_A_RK, load_B_RO, place_tile

COUNTER_WORDS = tl.constexpr(32)
"""int32 words from one item's counters to the next's: a cache line each, as many programs watch one."""


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
    ready_ptr,
    partial_ptr,
    delta_ptr,
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
    X_DONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """X_DONE: x was complete before this launch, so that only y is waited for."""
    if PDL:
        gdc_launch_dependents()
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    unit = tl.program_id(0)
    shrinks = max_items * (P * K)
    if unit < shrinks:
        _shrink(
            x_ptr, pool_ptr, counts_ptr, items_ptr, addresses_ptr, entries_ptr, arrived_ptr, partial_ptr,
            unit, max_items, x_stride, D, P, K, R, PART, ALIGN, X_DONE, PDL,
        )  # fmt: skip
    else:
        _expand(
            y_ptr, pool_ptr, counts_ptr, blocks_ptr, items_ptr, addresses_ptr, entries_ptr, arrived_ptr, ready_ptr,
            partial_ptr, delta_ptr, unit - shrinks, max_items, y_stride, D, N0, N1, N2, P, K, KP, R, BLOCK, TILES,
            ALIGN, X_DONE, PDL,
        )  # fmt: skip


@triton.jit
def _shrink(
    x_ptr, pool_ptr, counts_ptr, items_ptr, addresses_ptr, entries_ptr, arrived_ptr, partial_ptr,
    unit, max_items, x_stride,
    D: tl.constexpr, P: tl.constexpr, K: tl.constexpr, R: tl.constexpr, PART: tl.constexpr, ALIGN: tl.constexpr,
    X_DONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, R)
    item, p, k = max_items - 1 - unit // (P * K), unit // K % P, unit % K
    address_R = tl.multiple_of(tl.load(addresses_ptr + item * R + r), ALIGN)
    mask = tl.load(entries_ptr + item * 4)
    live = item < tl.load(counts_ptr + 1)
    row = tl.load(items_ptr + item * 4)
    A_RK = load_A_RK(pool_ptr, address_R, mask, live, p, k * PART, D, PART, D)
    if PDL and not X_DONE:
        gdc_wait()
    if live:
        i = k * PART + tl.arange(0, PART)
        x_K_ptr = x_ptr + row.to(tl.int64) * x_stride + i
        x_K = tl.load(x_K_ptr, mask=i < D, other=0.0, cache_modifier=".cg").to(tl.float32)
        place = ((item * P + p) * K + k).to(tl.int64) * R
        tl.store(partial_ptr + place + r, tl.sum(A_RK.to(tl.float32) * x_K[None, :], axis=1))
        tl.debug_barrier()
        tl.atomic_add(arrived_ptr + item * COUNTER_WORDS + p, 1, sem="release")


@triton.jit
def _wait_for(counter_ptr, count):
    seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
    while seen < count:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")


@triton.jit
def _count_up_to(counter_ptr, total, PDL: tl.constexpr):
    """Count one more; ``total`` counts as zero. On Hopper nobody waits for the answer, so that the program ends."""
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first red.relaxed.gpu.global.inc.u32 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [counter_ptr.to(tl.int64), total - 1],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    elif tl.atomic_add(counter_ptr, 1, sem="relaxed") == total - 1:
        tl.store(counter_ptr, 0)


@triton.jit
def _expand(
    y_ptr, pool_ptr, counts_ptr, blocks_ptr, items_ptr, addresses_ptr, entries_ptr, arrived_ptr, ready_ptr,
    partial_ptr, delta_ptr, unit, max_items, y_stride,
    D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ALIGN: tl.constexpr,
    X_DONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r, k = tl.arange(0, R), tl.arange(0, KP)
    item, tile = max_items - 1 - unit // TILES, unit % TILES
    address_R = tl.multiple_of(tl.load(addresses_ptr + item * R + r), ALIGN)
    mask = tl.load(entries_ptr + item * 4)
    num_blocks, live = tl.load(counts_ptr), item < tl.load(counts_ptr + 1)
    row, block = tl.load(items_ptr + item * 4), tl.load(items_ptr + item * 4 + 3)
    p, start, width, column = place_tile(tile, N0, N1, N2, BLOCK)
    scale = tl.load(entries_ptr + item * 4 + 1 + p).to(tl.float32, bitcast=True)
    B_RO = load_B_RO(pool_ptr, address_R, mask, live, p, start, width, D, N0, N1, BLOCK, ALIGN)
    if PDL and not X_DONE:
        gdc_wait()
    if live:
        first = item < num_blocks
        items, extra = tl.load(blocks_ptr + block * 4 + 2), tl.load(blocks_ptr + block * 4 + 3)
        o = start + tl.arange(0, BLOCK)
        inside = (o < width) & (((mask >> p) & 1) != 0)
        y_O_ptr = y_ptr + row.to(tl.int64) * y_stride + column + o
        if not X_DONE:
            y_O = tl.load(y_O_ptr, mask=inside & first, other=0.0)
        arrived_ptr += item * COUNTER_WORDS + p
        ready_ptr += block * TILES + tile
        delta_O_ptr = delta_ptr + column + o
        further = tl.where(first, items - 1, 0)
        _wait_for(arrived_ptr, K)
        planes_ptr = partial_ptr + ((item * P + p) * K).to(tl.int64) * R + k[:, None] * R + r[None, :]
        partial_KR = tl.load(planes_ptr, mask=(k < K)[:, None], other=0.0, cache_modifier=".cg")
        if further > 0:
            _wait_for(ready_ptr, further)
        h_R = tl.where(address_R >= 0, scale * tl.sum(partial_KR, axis=0), 0.0)
        sum_O = tl.sum(h_R[:, None] * B_RO.to(tl.float32), axis=0)
        if X_DONE:
            if PDL:
                gdc_wait()
            y_O = tl.load(y_O_ptr, mask=inside & first, other=0.0)
        if first:
            if further > 0:
                for past in range(0, further, 3):
                    for nth in tl.static_range(3):  # three on their way together
                        from_ptr = delta_O_ptr + (extra + past + nth).to(tl.int64) * (N0 + N1 + N2)
                        there = inside & (past + nth < further)
                        sum_O += tl.load(from_ptr, mask=there, other=0.0, cache_modifier=".cg")
                tl.store(ready_ptr, 0)
            tl.store(y_O_ptr, (y_O.to(tl.float32) + sum_O).to(y_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(delta_O_ptr + item.to(tl.int64) * (N0 + N1 + N2), sum_O, mask=inside)
            tl.debug_barrier()
            tl.atomic_add(ready_ptr, 1, sem="release")
        _count_up_to(arrived_ptr, K + (width + BLOCK - 1) // BLOCK, PDL)
    elif PDL and X_DONE:
        gdc_wait()
