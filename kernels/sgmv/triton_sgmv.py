"""The segmented product of ``kernels/sgmv`` on a GPU: shrink, then expand, two launches a group.

A step uses it so: the host plans (:func:`plan_work`), the list travels (:meth:`SgmvWork.load`), the device
resolves it once (:func:`resolve`), and each layer calls :func:`sgmv` for each of its groups. All shapes and
addresses stay the same from step to step, so the last two belong in a CUDA graph; adapters come and go
without a new capture.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def widths(self) -> tuple[int, int, int]:
        return (*self.out_features, 0, 0)[:3]  # type: ignore[return-value]


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
    """For blocks of one row: about 16 parts, and 32 KiB of B a program."""
    part = min(1024, max(64, triton.next_power_of_2(triton.cdiv(shape.in_features, 16))))
    outputs = min(16384 // ranks, max(64, triton.next_power_of_2(max(shape.out_features))))
    return Cut(part, part, outputs, warps=4, programs=16)


def blocks_cut(shape: GroupShape, rows: int) -> Cut:
    """For blocks of many rows: parts of 1024 inputs (fewer planes to add up), loads of 128."""
    part = min(1024, triton.next_power_of_2(shape.in_features)) if rows > 16 else 512
    outputs = min(128, max(64, triton.next_power_of_2(max(shape.out_features))))
    return Cut(part, min(128, part), outputs, warps=4, programs=16)


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
    if cut is None:
        cut = rows_cut(shape, ranks) if rows == 1 else blocks_cut(shape, rows)
    parts = triton.cdiv(shape.in_features, cut.part)
    projections = len(shape.out_features)
    partial = torch.empty(work.max_items * projections * parts * rows * ranks, dtype=torch.float32, device=y_TO.device)
    lists = (work.addresses_EWR, work.entries_EW4, partial, entry, work.max_items)
    sizes = {"D": shape.in_features, "P": projections, "K": parts, "R": ranks, "ALIGN": shape.align}
    options = {"num_warps": cut.warps, **launch_options(y_TO.device)}
    n0, n1, n2 = shape.widths
    tiles = sum(triton.cdiv(n, cut.outputs) for n in shape.out_features)
    outs = {"N0": n0, "N1": n1, "N2": n2, "BLOCK": cut.outputs, "TILES": tiles}
    most = cut.programs * multiprocessors(y_TO.device)
    shrink_grid = (min(work.max_items * projections * parts, most),)
    expand_grid = (min(work.blocks_B4.shape[0] * tiles, most),)
    to_shrink = (x_TD, pool, work.counts_4, work.items_W4, *lists, x_TD.stride(0))
    to_expand = (y_TO, pool, work.counts_4, work.blocks_B4, *lists, y_TO.stride(0))
    if rows == 1:
        shrink_rows_kernel[shrink_grid](*to_shrink, BLOCK=cut.part, **sizes, **options)
        expand_rows_kernel[expand_grid](*to_expand, KP=triton.next_power_of_2(parts), **sizes, **outs, **options)
        return
    dots = {"M": rows, "F32_DOT": INTERPRETED}
    shrink_blocks_kernel[shrink_grid](*to_shrink, PART=cut.part, BLOCK=cut.load, **dots, **sizes, **options)
    expand_blocks_kernel[expand_grid](*to_expand, **dots, **sizes, **outs, **options)


def _check(y_TO: torch.Tensor, x_TD: torch.Tensor, pool: torch.Tensor, shape: GroupShape) -> None:
    if x_TD.shape[1] != shape.in_features or y_TO.shape != (x_TD.shape[0], sum(shape.out_features)):
        raise ValueError(f"x {tuple(x_TD.shape)} and y {tuple(y_TO.shape)} do not fit {shape}")
    if not 1 <= len(shape.out_features) <= 3:
        raise ValueError("a group has one to three projections")
    if x_TD.stride(1) != 1 or y_TO.stride(1) != 1 or not pool.is_contiguous():
        raise ValueError("x and y need unit inner stride, the pool must be contiguous")
    if not x_TD.dtype == y_TO.dtype == pool.dtype or not x_TD.device == y_TO.device == pool.device:
        raise ValueError("x, y and the pool must share dtype and device")
