"""Loading tiles of A and B out of rank slices, and what expands add up: shared by the segmented product's kernels.

Legend: D in_features, O out_features of a projection, R rank slices of a tile, K inputs of a tile (of
:func:`sum_parts`: parts of the inputs), M rows of a block. ``mask`` has a bit
for each projection of the group that the adapter adapts; ``address_R`` is -1 where there is no slice. The slices'
layout is in the package.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _adapted_before(mask, p):
    """How many of the projections before ``p`` an adapter adapts."""
    return tl.where(p > 0, mask & 1, 0) + tl.where(p > 1, (mask >> 1) & 1, 0)


@triton.jit
def load_A_RK(pool_ptr, address_R, mask, live, p, start, end, BLOCK: tl.constexpr, D: tl.constexpr):
    """Columns [start, start + BLOCK) of one projection's rows of A; zero where there are none."""
    i = start + tl.arange(0, BLOCK)
    base = address_R + _adapted_before(mask, p) * D
    wanted = live & (((mask >> p) & 1) != 0)
    there = (address_R >= 0)[:, None] & (i < end)[None, :] & wanted
    return tl.load(pool_ptr + base[:, None] + i[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def place_tile(tile, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK: tl.constexpr):
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
def _start_of_B(mask, p, D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr):
    return _rows_of_A(mask) * D + tl.where(p > 0, (mask & 1) * N0, 0) + tl.where(p > 1, ((mask >> 1) & 1) * N1, 0)


@triton.jit
def load_B_RO(
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
    base = address_R + tl.multiple_of(_start_of_B(mask, p, D, N0, N1), ALIGN)
    wanted = live & (((mask >> p) & 1) != 0)
    there = (address_R >= 0)[:, None] & (o < width)[None, :] & wanted
    return tl.load(pool_ptr + base[:, None] + o[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def prefetch_A(pool_ptr, address_R, mask, live, p, start, run, D: tl.constexpr):
    """Ask for what :func:`load_A_RK` is to load, ``run`` columns in all."""
    there_R = (address_R >= 0) & live & (((mask >> p) & 1) != 0)
    prefetch_rows(pool_ptr, address_R + _adapted_before(mask, p) * D, there_R, start, run, D)


@triton.jit
def prefetch_B(
    pool_ptr, address_R, mask, live, p, start, run, width, D: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr
):  # fmt: skip
    """Ask for what :func:`load_B_RO` is to load, ``run`` outputs in all."""
    there_R = (address_R >= 0) & live & (((mask >> p) & 1) != 0)
    prefetch_rows(pool_ptr, address_R + _start_of_B(mask, p, D, N0, N1), there_R, start, run, width)


@triton.jit
def prefetch_rows(base_ptr, offset_M, there_M, start, run, end):
    """Ask for elements [start, start + run) of rows, none from ``end`` on, in the L2 cache; for Hopper and later. A row
    is one request, and one thread in eight makes one. All addresses and sizes must be multiples of 16 bytes."""
    SIZE: tl.constexpr = base_ptr.dtype.element_ty.primitive_bitwidth // 8
    eighth = tl.arange(0, 8)
    run_bytes = tl.maximum(tl.minimum(run, end - start), 0) * SIZE
    bytes_M8 = tl.where(there_M[:, None] & (eighth == 0)[None, :], run_bytes, 0)
    from_M1 = (base_ptr + (offset_M + start)[:, None]).to(tl.int64)
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [from_M1, bytes_M8],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum_parts(partial_ptr, plane, address_R, scale, rows_ok, M: tl.constexpr, R: tl.constexpr, K: tl.constexpr):
    """The parts of one item and projection, added up and scaled; zero where there is no slice."""
    r, m = tl.arange(0, R), tl.arange(0, M)
    h_MR = tl.zeros((M, R), dtype=tl.float32)
    there = rows_ok & (address_R >= 0)[None, :]
    for k in tl.static_range(K):
        plane_ptr = partial_ptr + (plane + k).to(tl.int64) * (M * R) + m[:, None] * R + r[None, :]
        h_MR += tl.load(plane_ptr, mask=there, other=0.0, cache_modifier=".cg")
    return scale * h_MR


@triton.jit
def dot_exactly(h_MR, B_RO, acc_MO, F32_DOT: tl.constexpr):
    """h enters as the sum of two numbers of the weights' type, so that rounding it costs nothing beside rounding y. In
    fp32 the first is h itself."""
    if F32_DOT or B_RO.dtype == tl.float32:
        return tl.dot(h_MR, B_RO.to(tl.float32), acc_MO, input_precision="ieee")
    high_MR = h_MR.to(B_RO.dtype)
    low_MR = (h_MR - high_MR.to(tl.float32)).to(B_RO.dtype)
    acc_MO = tl.dot(high_MR, B_RO, acc_MO, input_precision="ieee")
    return tl.dot(low_MR, B_RO, acc_MO, input_precision="ieee")
