"""The expand of a SwiGLU layer's gate and up projections together with the gate, for blocks of many rows.

Semantics: with the blocks' shares of y as in ``triton_blocks``, but y left as it is,

    out[t, i] = round(silu(round(y[t, i] + share[t, i]))) * round(y[t, N + i] + share[t, N + i])

for every row t: those that are in no block have no share. It is what the expand and ``kernels/silu`` give one after the
other, bit for bit, with one pass over y instead of three.

Legend: T rows of the batch, N inner size, O outputs of a tile, D in_features, K parts of D, M rows of a block, R rank
slices of an item.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_sgmv import Constants, Cut, check, choose_cut, common_constants, shrink
from stencilpress.kernels.sgmv.triton_tiles import dot_exactly, load_B_RO, sum_parts
from stencilpress.kernels.sgmv.triton_work import SgmvWork, Tile
from stencilpress.kernels.triton_launch import INTERPRETED, divide_up, hopper, launch_options, power_of_two


@triton.jit(do_not_specialize=["entry", "max_blocks", "num_rows"])
def gate_blocks_kernel(
    y_ptr,
    out_ptr,
    pool_ptr,
    counts_ptr,
    blocks_ptr,
    addresses_ptr,
    entries_ptr,
    partial_ptr,
    in_blocks_ptr,
    entry,
    max_items,
    max_blocks,
    num_rows,
    y_stride,
    D: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    J: tl.constexpr,
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
    F32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes J tiles side by side: of a block, or, after all blocks, of M rows those that are in none. It
    starts when the shrink's predecessors are done, so y may be read before the wait for the shrink."""
    if PDL:
        gdc_launch_dependents()
    unit = tl.program_id(0)
    block, start = unit // TILES, unit % TILES * (BLOCK * J)
    m = tl.arange(0, M)
    if block >= max_blocks:
        row_M = (block - max_blocks) * M + m
        bare_M = (row_M < num_rows) & (tl.load(in_blocks_ptr + row_M, mask=row_M < num_rows, other=1) == 0)
        if tl.max(bare_M.to(tl.int32)) > 0:
            _gate_bare(y_ptr, out_ptr, row_M, bare_M, start, y_stride, N, BLOCK, J)
        if PDL:
            gdc_wait()
    else:
        r = tl.arange(0, R)
        addresses_ptr += entry.to(tl.int64) * max_items * R
        entries_ptr += (entry.to(tl.int64) * max_items + block) * 4
        address_R = tl.multiple_of(tl.load(addresses_ptr + block * R + r), ALIGN)
        mask, live = tl.load(entries_ptr), block < tl.load(counts_ptr)
        # y is gated whatever the adapter adapts: what it does not must add zero
        gate_scale = tl.where((mask & 1) != 0, tl.load(entries_ptr + 1).to(tl.float32, bitcast=True), 0.0)
        up_scale = tl.where((mask & 2) != 0, tl.load(entries_ptr + 2).to(tl.float32, bitcast=True), 0.0)
        row, rows = tl.load(blocks_ptr + block * 4), tl.load(blocks_ptr + block * 4 + 1)
        items, extra = tl.load(blocks_ptr + block * 4 + 2), tl.load(blocks_ptr + block * 4 + 3)
        rows_ok = (m < rows)[:, None]
        o = start + tl.arange(0, BLOCK)
        y_MO_ptr = y_ptr + (row + m).to(tl.int64)[:, None] * y_stride + o[None, :]
        out_MO_ptr = out_ptr + (row + m).to(tl.int64)[:, None] * N + o[None, :]
        inside = rows_ok & ((o < N) & live)[None, :]
        gate_B_RO = load_B_RO(pool_ptr, address_R, mask, live, 0, start, N, D, N, N, BLOCK, ALIGN)
        up_B_RO = load_B_RO(pool_ptr, address_R, mask, live, 1, start, N, D, N, N, BLOCK, ALIGN)
        gate_MO = tl.load(y_MO_ptr, mask=inside, other=0.0, cache_modifier=".cg")
        up_MO = tl.load(y_MO_ptr + N, mask=inside, other=0.0, cache_modifier=".cg")
        if PDL:
            gdc_wait()
        if live:
            gate_h_MR = sum_parts(partial_ptr, block * 2 * K, address_R, gate_scale, rows_ok, M, R, K)
            up_h_MR = sum_parts(partial_ptr, (block * 2 + 1) * K, address_R, up_scale, rows_ok, M, R, K)
            for j in tl.static_range(J):
                zeros_MO = tl.zeros((M, BLOCK), dtype=tl.float32)
                gate_acc_MO = dot_exactly(gate_h_MR, gate_B_RO, zeros_MO, F32_DOT)
                up_acc_MO = dot_exactly(up_h_MR, up_B_RO, zeros_MO, F32_DOT)
                for nth in tl.range(0, items - 1, num_stages=1):
                    item = extra + nth
                    later_R = tl.multiple_of(tl.load(addresses_ptr + item * R + r), ALIGN)
                    B_RO = load_B_RO(pool_ptr, later_R, mask, True, 0, start, N, D, N, N, BLOCK, ALIGN)
                    h_MR = sum_parts(partial_ptr, item * 2 * K, later_R, gate_scale, rows_ok, M, R, K)
                    gate_acc_MO = dot_exactly(h_MR, B_RO, gate_acc_MO, F32_DOT)
                    B_RO = load_B_RO(pool_ptr, later_R, mask, True, 1, start, N, D, N, N, BLOCK, ALIGN)
                    h_MR = sum_parts(partial_ptr, (item * 2 + 1) * K, later_R, up_scale, rows_ok, M, R, K)
                    up_acc_MO = dot_exactly(h_MR, B_RO, up_acc_MO, F32_DOT)
                gate_acc_MO += gate_MO.to(tl.float32)
                up_acc_MO += up_MO.to(tl.float32)
                done_ptr, done = out_MO_ptr, inside
                if j + 1 < J:
                    start += BLOCK
                    o += BLOCK
                    y_MO_ptr += BLOCK
                    out_MO_ptr += BLOCK
                    inside = rows_ok & (o < N)[None, :]
                    gate_B_RO = load_B_RO(pool_ptr, address_R, mask, True, 0, start, N, D, N, N, BLOCK, ALIGN)
                    up_B_RO = load_B_RO(pool_ptr, address_R, mask, True, 1, start, N, D, N, N, BLOCK, ALIGN)
                    gate_MO = tl.load(y_MO_ptr, mask=inside, other=0.0, cache_modifier=".cg")
                    up_MO = tl.load(y_MO_ptr + N, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(done_ptr, _gated(gate_acc_MO, up_acc_MO, y_ptr.dtype.element_ty), mask=done)


@triton.jit
def _gate_bare(y_ptr, out_ptr, row_M, bare_M, start, y_stride, N: tl.constexpr, BLOCK: tl.constexpr, J: tl.constexpr):
    """J tiles of the rows that are in no block."""
    y_M1_ptr = y_ptr + row_M.to(tl.int64)[:, None] * y_stride
    out_M1_ptr = out_ptr + row_M.to(tl.int64)[:, None] * N
    for j in tl.static_range(J):
        o_1O = (start + j * BLOCK + tl.arange(0, BLOCK))[None, :]
        ok = bare_M[:, None] & (o_1O < N)
        gate_MO = tl.load(y_M1_ptr + o_1O, mask=ok, other=0.0).to(tl.float32)
        up_MO = tl.load(y_M1_ptr + N + o_1O, mask=ok, other=0.0).to(tl.float32)
        tl.store(out_M1_ptr + o_1O, _gated(gate_MO, up_MO, y_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    """Rounded where separate kernels would store."""
    wide, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return ((wide * tl.sigmoid(wide)).to(dtype).to(tl.float32) * up).to(dtype)


def gate_suits(tile: Tile) -> bool:
    """Whether one kernel is faster. An H200's microseconds for gate and up of an 8B Llama with shrink, expand and gate
    apart, and in one: rank 16, 256 blocks of 64 rows 986 and 770, 8 of 64 36.0 and 32.4, 16 of 16 rows with mixed ranks
    30.4 and 25.4, 32 of 16 29.6 and 29.8; but items of 64 ranks, whose sums fill the registers, 1087 and 1090."""
    return tile.rows > 1 and tile.ranks == 16


@cache
def choose_gate_cut(
    shape: GroupShape, tile: Tile, blocks: int, items: int, *, warp_groups: bool = True, f32: bool = False
) -> Cut:
    """As :func:`choose_cut`, but a tile is of two projections: fewer outputs for as many registers."""
    cut = choose_cut(shape, tile, blocks, items, warp_groups=warp_groups, f32=f32)
    widest = max(16, power_of_two(shape.out_features[0]))
    if tile.rows == 16:
        return replace(cut, outputs=min(128, widest), tiles=1)
    return replace(cut, outputs=min(64, widest), tiles=1 if f32 else 4)


@cache
def gate_constants(shape: GroupShape, tile: Tile, cut: Cut, f32_dot: bool = INTERPRETED) -> Constants:
    """Compile-time constants of the gate's kernel."""
    inner = shape.out_features[0]
    tiles = divide_up(inner, cut.outputs * cut.tiles)
    outputs = {"N": inner, "BLOCK": cut.outputs, "J": cut.tiles, "TILES": tiles}
    common = common_constants(shape, tile, cut)
    return {**{name: common[name] for name in ("D", "K", "R", "ALIGN")}, **outputs, "M": tile.rows, "F32_DOT": f32_dot}


def sgmv_silu_mul(
    y_TO: torch.Tensor,
    x_TD: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    in_blocks_T: torch.Tensor,
    cut: Cut | None = None,
) -> torch.Tensor:
    """``silu_mul`` of y with the adapters' share, (T, N); y may be overwritten. For blocks of several rows.

    Arguments as of ``triton_sgmv.sgmv``; ``shape`` has two projections of one width, ``in_blocks_T`` is of
    :func:`listed_rows`. Raises ValueError where shapes, dtypes or strides do not fit.
    """
    check(y_TO, x_TD, pool, shape)
    if len(set(shape.out_features)) != 1 or len(shape.out_features) != 2 or not gate_suits(work.tile):
        raise ValueError(f"a gate takes two projections of one width in blocks of rows, not {shape}, {work.tile}")
    blocks, (rows, ranks) = work.blocks_B4.shape[0], work.tile
    if cut is None:
        f32 = pool.dtype == torch.float32
        cut = choose_gate_cut(shape, work.tile, blocks, work.max_items, warp_groups=hopper(y_TO.device), f32=f32)
    constants = gate_constants(shape, work.tile, cut)
    planes = work.max_items * 2 * divide_up(shape.in_features, cut.part)
    partial = torch.empty(planes * rows * ranks, dtype=torch.float32, device=y_TO.device)
    shrink(partial, x_TD, pool, work, entry, shape, cut)
    out_TN = torch.empty((len(y_TO), shape.out_features[0]), dtype=y_TO.dtype, device=y_TO.device)
    grid = ((blocks + divide_up(len(y_TO), rows)) * constants["TILES"],)
    lists = (work.counts_4, work.blocks_B4, work.addresses_EWR, work.entries_EW4, partial, in_blocks_T)
    numbers = (entry, work.max_items, blocks, len(y_TO), y_TO.stride(0))
    options = {"num_warps": cut.warps, **launch_options(y_TO.device)}
    gate_blocks_kernel[grid](y_TO, out_TN, pool, *lists, *numbers, **constants, **options)
    return out_TN
