"""The segmented product of ``kernels/sgmv`` on a GPU: one launch a group for decodes, two for many rows an adapter.
Some sizes have kernels in CUDA C++ (cuda_sgmv), all have one in Triton.

A step uses it so: the host plans (:func:`plan_work`), the list travels (:meth:`SgmvWork.load`), the device
resolves it once (:func:`resolve`), and each layer calls :func:`sgmv` for each of its groups. All shapes and
addresses stay the same from step to step, so the last two belong in a CUDA graph; adapters come and go
without a new capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from stencilpress.kernels.sgmv import cuda_sgmv
from stencilpress.kernels.sgmv.table import MAX_PROJECTIONS, GroupShape
from stencilpress.kernels.sgmv.triton_blocks import expand_blocks_kernel, shrink_blocks_kernel
from stencilpress.kernels.sgmv.triton_rows import rows_kernel
from stencilpress.kernels.sgmv.triton_work import SgmvWork, Tile
from stencilpress.kernels.triton_launch import INTERPRETED, divide_up, hopper, launch_options, power_of_two


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: rows of a shrink program, inputs of a part and of a load, outputs of a tile and tiles of
    an expand program, warps, the most registers a thread of the rows kernel, and loads of a shrink of blocks that are
    on their way or in use together. Whether the kernels for blocks ask for what they are to load while they wait for
    their predecessor."""

    rows: int
    part: int
    load: int
    outputs: int
    tiles: int = 1
    warps: int = 4
    registers: int = 96
    stages: int = 3
    prefetch_in_shrink: bool = False
    prefetch_in_expand: bool = False


@cache
def choose_cut(
    shape: GroupShape, tile: Tile, blocks: int, items: int, *, warp_groups: bool = True, f32: bool = False
) -> Cut:
    """What measured best on an H200 (bench/kernels.py). One row: 32 KiB of weights a program. More rows: inputs are
    cut into as few parts as fill the device, because each leaves a plane that expands read; expands take more tiles
    side by side the more blocks there are, but single ones where they read several items. 64 ranks take more warps,
    for their registers, where tensor cores have no products of warp groups. Shrinks of prompts load short runs, five or
    six at once: fewer leave the memory idle. What is asked for in the L2 cache must be
    little: the more there is, the later comes what others wait for. In fp32 tensor cores do not serve: each tile of an
    expand is thousands of instructions, and several of them compile for minutes and spill."""
    inputs, widest = (max(64, power_of_two(n)) for n in (shape.in_features, max(shape.out_features)))
    few, many, single = blocks < 16, blocks >= 128, items <= blocks
    if tile.rows == 1:
        most = 16384 // tile.ranks
        return Cut(1, min(most, inputs), min(most, inputs), min(most, widest))
    if tile.rows == 16 and single and not few:
        tiles = 2 if inputs <= 4096 and not f32 else 1
        return Cut(16, min(512, inputs), min(256, inputs), min(256, widest), tiles, prefetch_in_expand=True)
    narrow = tile.ranks == 16
    if single and many:
        part = min(max(4096, 0 if narrow else inputs // 2), inputs)  # of 64 ranks more than two would not fit registers
    else:
        part = max(64, inputs // (4 if few or (single and narrow) else 2))
    tiles = 1 if few or not single or f32 else 8 if many else 4
    rows = 16 if few else tile.rows if narrow else min(32, tile.rows)
    warps = 4 if narrow or (warp_groups and not f32) else 8
    load, stages = (256, 3) if few or many else (128, 5 if narrow else 6)
    return Cut(rows, part, min(load, part), min(128, widest), tiles, warps, stages=stages, prefetch_in_shrink=not many)


Constants = Mapping[str, Any]


@cache
def rows_constants(shape: GroupShape, tile: Tile, cut: Cut) -> Constants:
    """Compile-time constants of the rows kernel."""
    common = {**common_constants(shape, tile, cut), **_outputs(shape, cut)}
    return {**common, "PART": cut.part, "KP": power_of_two(common["K"])}


@cache
def shrink_constants(shape: GroupShape, tile: Tile, cut: Cut, f32_dot: bool = INTERPRETED) -> Constants:
    """Compile-time constants of the shrink of blocks."""
    rows = {"M": tile.rows, "MS": cut.rows, "PART": cut.part, "BLOCK": cut.load, "F32_DOT": f32_dot}
    return {**common_constants(shape, tile, cut), **rows, "PREFETCH": cut.prefetch_in_shrink and _align(shape) == 8}


@cache
def expand_constants(shape: GroupShape, tile: Tile, cut: Cut, f32_dot: bool = INTERPRETED) -> Constants:
    """Compile-time constants of the expand of blocks."""
    outputs = {**_outputs(shape, cut, cut.tiles), "J": cut.tiles}
    rows = {"M": tile.rows, "F32_DOT": f32_dot, "PREFETCH": cut.prefetch_in_expand and _align(shape) == 8}
    return {**common_constants(shape, tile, cut), **outputs, **rows}


def common_constants(shape: GroupShape, tile: Tile, cut: Cut) -> Constants:
    """What all kernels of the product have."""
    parts = divide_up(shape.in_features, cut.part)
    return {"D": shape.in_features, "P": len(shape.out_features), "K": parts, "R": tile.ranks, "ALIGN": _align(shape)}


def _align(shape: GroupShape) -> int:
    """Elements that divide every row's start in a slice: 8 make loads 16 bytes wide."""
    return 8 if all(n % 8 == 0 for n in (shape.in_features, *shape.out_features)) else 1


def _outputs(shape: GroupShape, cut: Cut, side_by_side: int = 1) -> Constants:
    n0, n1, n2 = (*shape.out_features, 0, 0)[:3]
    tiles = sum(divide_up(n, cut.outputs * side_by_side) for n in shape.out_features)
    return {"N0": n0, "N1": n1, "N2": n2, "BLOCK": cut.outputs, "TILES": tiles}


def sgmv(
    y_TO: torch.Tensor,
    x_TD: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    cut: Cut | None = None,
    *,
    x_done: bool = False,
) -> None:
    """Add the adapters' share of one (layer, group) to ``y_TO``, in place.

    ``y_TO`` (rows, sum of out_features) and ``x_TD`` (rows, in_features) have unit inner stride; ``pool`` is flat;
    all three have one dtype. ``entry`` is layer * groups + group; ``work`` is resolved, and serves one stream. Rows
    outside the work list are not read or written. ``cut``: in Triton, cut so. ``x_done``: the kernel that y comes from
    let its successor start only when x was complete, so that x may be read while that one still runs. Raises
    ValueError where shapes, dtypes or strides do not fit.
    """
    check(y_TO, x_TD, pool, shape)
    in_cuda = cut is None
    if cut is None:
        if not x_done and cuda_sgmv.rows_serve(y_TO, x_TD, work, shape):
            cuda_sgmv.rows(y_TO, x_TD, pool, work, entry, shape)
            return
        blocks = work.blocks_B4.shape[0]
        f32 = pool.dtype == torch.float32
        cut = choose_cut(shape, work.tile, blocks, work.max_items, warp_groups=hopper(y_TO.device), f32=f32)
    rows, ranks = work.tile
    parts = divide_up(shape.in_features, cut.part)
    planes = work.max_items * len(shape.out_features) * parts
    partial = torch.empty(planes * rows * ranks, dtype=torch.float32, device=y_TO.device)
    if rows == 1:
        _rows(y_TO, x_TD, partial, pool, work, entry, shape, cut, x_done)
        return
    shrink(partial, x_TD, pool, work, entry, shape, cut)
    if in_cuda and cuda_sgmv.expand_serves(y_TO, work, shape):
        cuda_sgmv.expand(y_TO, partial, pool, work, entry, shape, parts)
    else:
        expand(y_TO, partial, pool, work, entry, shape, cut)


def _rows(
    y_TO: torch.Tensor,
    x_TD: torch.Tensor,
    partial: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    cut: Cut,
    x_done: bool,
) -> None:
    constants = {**rows_constants(shape, work.tile, cut), "X_DONE": x_done}
    delta = torch.empty((work.max_items, y_TO.shape[1]), dtype=torch.float32, device=y_TO.device)
    grid = (work.max_items * (constants["P"] * constants["K"] + constants["TILES"]),)
    lists = (work.counts_4, work.blocks_B4, work.items_W4, work.addresses_EWR, work.entries_EW4)
    scratch = (work.arrived_WN, work.ready(constants["TILES"]), partial, delta)
    numbers = (entry, work.max_items, x_TD.stride(0), y_TO.stride(0))
    options = {"num_warps": cut.warps, "maxnreg": cut.registers, **launch_options(x_TD.device)}
    rows_kernel[grid](x_TD, y_TO, pool, *lists, *scratch, *numbers, **constants, **options)


def shrink(
    partial: torch.Tensor,
    x_TD: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    cut: Cut,
) -> None:
    """The first kernel for blocks; ``partial`` is fp32 (items, projections, parts, rows, ranks)."""
    constants = shrink_constants(shape, work.tile, cut)
    grid = (work.max_items * (work.tile.rows // cut.rows) * constants["P"] * constants["K"],)
    lists = (work.counts_4, work.items_W4, work.addresses_EWR, work.entries_EW4)
    options = {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(x_TD.device)}
    numbers = (entry, work.max_items, x_TD.stride(0))
    shrink_blocks_kernel[grid](x_TD, pool, *lists, partial, *numbers, **constants, **options)


def expand(
    y_TO: torch.Tensor,
    partial: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    cut: Cut,
) -> None:
    """The second: adds what ``partial`` gives to ``y_TO``."""
    constants = expand_constants(shape, work.tile, cut)
    if constants["PREFETCH"] and (y_TO.data_ptr() % 16 or y_TO.stride(0) * y_TO.element_size() % 16):
        constants = {**constants, "PREFETCH": False}
    grid = (work.blocks_B4.shape[0] * constants["TILES"],)
    lists = (work.counts_4, work.blocks_B4, work.addresses_EWR, work.entries_EW4)
    options = {"num_warps": cut.warps, **launch_options(y_TO.device)}
    numbers = (entry, work.max_items, y_TO.stride(0))
    expand_blocks_kernel[grid](y_TO, pool, *lists, partial, *numbers, **constants, **options)


def check(y_TO: torch.Tensor, x_TD: torch.Tensor, pool: torch.Tensor, shape: GroupShape) -> None:
    """Raise ValueError where shapes, dtypes or strides do not fit."""
    if x_TD.shape[1] != shape.in_features or y_TO.shape != (x_TD.shape[0], sum(shape.out_features)):
        raise ValueError(f"x {tuple(x_TD.shape)} and y {tuple(y_TO.shape)} do not fit {shape}")
    if not 1 <= len(shape.out_features) <= MAX_PROJECTIONS:
        raise ValueError(f"a group has one to {MAX_PROJECTIONS} projections")
    if x_TD.stride(1) != 1 or y_TO.stride(1) != 1 or not pool.is_contiguous():
        raise ValueError("x and y need unit inner stride, the pool must be contiguous")
    if not x_TD.dtype == y_TO.dtype == pool.dtype or not x_TD.device == y_TO.device == pool.device:
        raise ValueError("x, y and the pool must share dtype and device")
