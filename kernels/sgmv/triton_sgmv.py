"""The segmented product of ``kernels/sgmv`` on a GPU: shrink, then expand, two launches a group.

A step uses it so: the host plans (:func:`plan_work`), the list travels (:meth:`SgmvWork.load`), the device
resolves it once (:func:`resolve`), and each layer calls :func:`sgmv` for each of its groups. All shapes and
addresses stay the same from step to step, so the last two belong in a CUDA graph; adapters come and go
without a new capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from stencilpress.kernels.sgmv.triton_expand import expand_blocks_kernel, expand_rows_kernel
from stencilpress.kernels.sgmv.triton_shrink import shrink_blocks_kernel, shrink_rows_kernel
from stencilpress.kernels.sgmv.triton_work import SgmvWork
from stencilpress.kernels.triton_launch import INTERPRETED, launch_options, multiprocessors


@dataclass(frozen=True, slots=True)
class GroupShape:
    """in_features, and the out_features of each of up to three projections that share the input."""

    in_features: int
    out_features: tuple[int, ...]

    @property
    def align(self) -> int:
        """Elements that divide every row's start in a slice: 8 make loads 16 bytes wide."""
        return 8 if all(n % 8 == 0 for n in (self.in_features, *self.out_features)) else 1


@dataclass(frozen=True, slots=True)
class Cut:
    """How one launch pair is cut: inputs of a part and of a load, outputs of a tile, and the ceiling of
    programs a multiprocessor."""

    part: int
    load: int
    outputs: int
    warps: int
    programs: int


def rows_cut(shape: GroupShape, ranks: int) -> Cut:
    """For blocks of one row: about 16 parts, and up to 32 KiB of weights a program."""
    part = triton.next_power_of_2(triton.cdiv(shape.in_features, 16))
    part = min(16384 // ranks, max(64, part))
    outputs = min(16384 // ranks, max(64, triton.next_power_of_2(max(shape.out_features))))
    return Cut(part, part, outputs, warps=8 if part * ranks > 8192 else 4, programs=32)


def blocks_cut(shape: GroupShape, rows: int) -> Cut:
    """For blocks of many rows: few parts, because their planes cost rows * ranks to add up."""
    parts = 4 if rows > 16 else 16
    part = max(64, triton.next_power_of_2(triton.cdiv(shape.in_features, parts)))
    outputs = min(128, max(64, triton.next_power_of_2(max(shape.out_features))))
    return Cut(part, min(128, part), outputs, warps=8 if rows > 16 else 4, programs=32)


Constants = dict[str, Any]


def rows_constants(shape: GroupShape, ranks: int, cut: Cut | None = None) -> tuple[Constants, Constants]:
    """Compile-time constants of the shrink and of the expand for blocks of one row."""
    cut = cut or rows_cut(shape, ranks)
    common, outs = _common(shape, ranks, cut), _outs(shape, cut)
    return {**common, "BLOCK": cut.part}, {**common, **outs, "KP": triton.next_power_of_2(common["K"])}


def blocks_constants(
    shape: GroupShape, rows: int, ranks: int, f32_dot: bool, cut: Cut | None = None
) -> tuple[Constants, Constants]:
    """The same for blocks of many rows."""
    cut = cut or blocks_cut(shape, rows)
    common = {**_common(shape, ranks, cut), "M": rows, "F32_DOT": f32_dot}
    return {**common, "PART": cut.part, "BLOCK": cut.load}, {**common, **_outs(shape, cut)}


def _common(shape: GroupShape, ranks: int, cut: Cut) -> Constants:
    parts = triton.cdiv(shape.in_features, cut.part)
    return {"D": shape.in_features, "P": len(shape.out_features), "K": parts, "R": ranks, "ALIGN": shape.align}


def _outs(shape: GroupShape, cut: Cut) -> Constants:
    n0, n1, n2 = (*shape.out_features, 0, 0)[:3]
    tiles = sum(triton.cdiv(n, cut.outputs) for n in shape.out_features)
    return {"N0": n0, "N1": n1, "N2": n2, "BLOCK": cut.outputs, "TILES": tiles}


def sgmv(
    y_TO: torch.Tensor,
    x_TD: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    cut: Cut | None = None,
) -> None:
    """Add the adapters' share of one (layer, group) to ``y_TO``, in place.

    ``y_TO`` (rows, sum of out_features) and ``x_TD`` (rows, in_features) have unit inner stride; ``pool`` is flat;
    all three have one dtype. ``entry`` is layer * groups + group; ``work`` is resolved. Rows outside the work list
    are not read or written. Raises ValueError where shapes, dtypes or strides do not fit.
    """
    _check(y_TO, x_TD, pool, shape)
    rows, ranks = work.tile
    if rows == 1:
        kernels = (shrink_rows_kernel, expand_rows_kernel)
        shrink, expand = rows_constants(shape, ranks, cut)
    else:
        kernels = (shrink_blocks_kernel, expand_blocks_kernel)
        shrink, expand = blocks_constants(shape, rows, ranks, INTERPRETED, cut)
    cut = cut or (rows_cut(shape, ranks) if rows == 1 else blocks_cut(shape, rows))
    units = work.max_items * shrink["P"] * shrink["K"]
    partial = torch.empty(units * rows * ranks, dtype=torch.float32, device=y_TO.device)
    lists = (work.addresses_EWR, work.entries_EW4, partial, entry, work.max_items)
    most = cut.programs * multiprocessors(y_TO.device)
    options = {"num_warps": cut.warps, **launch_options(y_TO.device)}
    grid = (min(units, most),)
    kernels[0][grid](x_TD, pool, work.counts_4, work.items_W4, *lists, x_TD.stride(0), **shrink, **options)
    grid = (min(work.blocks_B4.shape[0] * expand["TILES"], most),)
    kernels[1][grid](y_TO, pool, work.counts_4, work.blocks_B4, *lists, y_TO.stride(0), **expand, **options)


def _check(y_TO: torch.Tensor, x_TD: torch.Tensor, pool: torch.Tensor, shape: GroupShape) -> None:
    if x_TD.shape[1] != shape.in_features or y_TO.shape != (x_TD.shape[0], sum(shape.out_features)):
        raise ValueError(f"x {tuple(x_TD.shape)} and y {tuple(y_TO.shape)} do not fit {shape}")
    if not 1 <= len(shape.out_features) <= 3:
        raise ValueError("a group has one to three projections")
    if x_TD.stride(1) != 1 or y_TO.stride(1) != 1 or not pool.is_contiguous():
        raise ValueError("x and y need unit inner stride, the pool must be contiguous")
    if not x_TD.dtype == y_TO.dtype == pool.dtype or not x_TD.device == y_TO.device == pool.device:
        raise ValueError("x, y and the pool must share dtype and device")
