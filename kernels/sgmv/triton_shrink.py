"""Shrink: what each row of a batch gives against the rank slices of its adapter.

Semantics: for item w of the work list with rows m, projection p of the group and rank slice r,

    partial[w, p, k, m, r] = sum_{i in part k of D} x[row(w) + m, i] * A[w, p, r, i]

in fp32. The parts are summed, in order, by the expand: no atomics, so a result does not depend on timing.
Slices and projections that an adapter does not have are left unwritten; the expand does not read them.

Legend: T rows of the batch, D in_features, W items, P projections, K parts of D, M rows of an item, R rank
slices of an item, S elements of the pool, E entries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def adapted_before(mask, p):
    """How many of the projections before ``p`` an adapter adapts."""
    return tl.where(p > 0, mask & 1, 0) + tl.where(p > 1, (mask >> 1) & 1, 0)


@triton.jit
def _load_A_RK(
    pool_ptr, address_R, mask, live, p, start, end, BLOCK: tl.constexpr, D: tl.constexpr, ALIGN: tl.constexpr
):
    """Columns [start, start + BLOCK) of one projection's rows of A; zero where there are none."""
    i = start + tl.arange(0, BLOCK)
    base = tl.multiple_of(address_R, ALIGN) + adapted_before(mask, p) * D
    wanted = live & (((mask >> p) & 1) != 0)
    there = (address_R >= 0)[:, None] & (i < end)[None, :] & wanted
    return tl.load(pool_ptr + base[:, None] + i[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["entry"])
def shrink_rows_kernel(
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
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Items of one row each. The first weights load before the wait for x."""
    if PDL:
        gdc_launch_dependents()
    r = tl.arange(0, R)
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    unit = tl.program_id(0)
    item = unit // (P * K)
    address_R = tl.load(addresses_ptr + item * R + r)
    mask = tl.load(entries_ptr + item * 4)
    units = tl.load(counts_ptr + 1) * (P * K)
    p, k = unit // K % P, unit % K
    A_RK = _load_A_RK(pool_ptr, address_R, mask, unit < units, p, k * BLOCK, D, BLOCK, D, ALIGN)
    if PDL:
        gdc_wait()
    while unit < units:
        row = tl.load(items_ptr + item * 4)
        i = k * BLOCK + tl.arange(0, BLOCK)
        x_K = tl.load(x_ptr + row.to(tl.int64) * x_stride + i, mask=i < D, other=0.0).to(tl.float32)
        place = ((item * P + p) * K + k).to(tl.int64) * R
        tl.store(partial_ptr + place + r, tl.sum(A_RK.to(tl.float32) * x_K[None, :], axis=1))
        unit += tl.num_programs(0)
        live = unit < units
        item, p, k = unit // (P * K), unit // K % P, unit % K
        address_R = tl.load(addresses_ptr + item * R + r, mask=live, other=-1)
        mask = tl.load(entries_ptr + item * 4, mask=live, other=0)
        A_RK = _load_A_RK(pool_ptr, address_R, mask, live, p, k * BLOCK, D, BLOCK, D, ALIGN)


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
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    F32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Items of up to M rows, on tensor cores. A part is PART inputs, walked BLOCK at a time."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    r, m = tl.arange(0, R), tl.arange(0, M)
    addresses_ptr += entry.to(tl.int64) * max_items * R
    entries_ptr += entry.to(tl.int64) * max_items * 4
    units = tl.load(counts_ptr + 1) * (P * K)
    unit = tl.program_id(0)
    while unit < units:
        item, p, k = unit // (P * K), unit // K % P, unit % K
        address_R = tl.load(addresses_ptr + item * R + r)
        mask = tl.load(entries_ptr + item * 4)
        row, rows = tl.load(items_ptr + item * 4), tl.load(items_ptr + item * 4 + 1)
        x_rows_ptr = x_ptr + (row + m).to(tl.int64)[:, None] * x_stride
        end = tl.minimum(D, (k + 1) * PART)
        acc_MR = tl.zeros((M, R), dtype=tl.float32)
        for start in range(k * PART, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x_MK = tl.load(x_rows_ptr + i[None, :], mask=(m < rows)[:, None] & (i < end)[None, :], other=0.0)
            A_RK = _load_A_RK(pool_ptr, address_R, mask, True, p, start, end, BLOCK, D, ALIGN)
            if F32_DOT:
                x_MK, A_RK = x_MK.to(tl.float32), A_RK.to(tl.float32)
            acc_MR = tl.dot(x_MK, tl.trans(A_RK), acc_MR, input_precision="ieee")
        place = ((item * P + p) * K + k).to(tl.int64) * (M * R)
        tl.store(partial_ptr + place + m[:, None] * R + r[None, :], acc_MR, mask=(m < rows)[:, None])
        unit += tl.num_programs(0)
