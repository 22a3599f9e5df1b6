"""The segmented product in CUDA C++, where that was measured faster than Triton (docs/decisions/0020).

On Hopper and later, in bf16, with widths that are multiples of eight and rows that start at multiples of 16 bytes:
``rows.cu`` for decodes, ``expand.cu`` for prompts of blocks of one item each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from stencilpress.kernels.cuda_launch import CudaKernel, available, launch, resident, shared_by_processes
from stencilpress.kernels.sgmv.table import MAX_PROJECTIONS, GroupShape
from stencilpress.kernels.sgmv.triton_work import SgmvWork, Tile
from stencilpress.kernels.triton_launch import dependent_launch, divide_up

RUN, SLICES, TILES_AT_ONCE = 1024, 16, 2
"""Of ``rows.cu``: elements of a slice that a unit takes, slices of an item, and items' weights in shared memory."""
FEWEST_OF_SEVERAL = 48
"""Rows from which on there are enough to take several items of a row one after the other."""
EXPAND_RUN, EXPAND_ROWS = 512, 64


class _Group(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_int),
        ("projections", ctypes.c_int),
        ("widths", ctypes.c_int * MAX_PROJECTIONS),
    )

    @classmethod
    def of(cls, shape: GroupShape) -> _Group:
        return cls(shape.in_features, len(shape.out_features), shape.out_features)


def _fields(pointers: str, numbers: str) -> tuple[tuple[str, type], ...]:
    words = [*((name, ctypes.c_void_p) for name in pointers.split()), *((n, ctypes.c_int) for n in numbers.split())]
    return (*words, ("group", _Group))


class RowsParameters(ctypes.Structure):
    """``Rows`` of ``rows.cu``."""

    _fields_ = _fields(
        "x y pool counts blocks items addresses entries sums listed",
        "entry max_items x_stride y_stride parts tiles rows",
    )


class ExpandParameters(ctypes.Structure):
    """``Expand`` of ``expand.cu``."""

    _fields_ = _fields("y pool counts blocks addresses entries partial", "entry max_items y_stride parts tiles")


_HERE = Path(__file__).parent
ROWS_KERNEL = CudaKernel(
    _HERE / "rows.cu",
    "rows",
    128,
    (("PARAMETER_BYTES", ctypes.sizeof(RowsParameters)),),
    shared_bytes=TILES_AT_ONCE * SLICES * RUN * 2,
)


def _expand_kernel(ranks: int, depth: int) -> CudaKernel:
    constants = (("STEPS", ranks // 16), ("DEPTH", depth), ("PARAMETER_BYTES", ctypes.sizeof(ExpandParameters)))
    return CudaKernel(_HERE / "expand.cu", "expand", 256, constants)


EXPAND_KERNELS = {16: _expand_kernel(16, depth=4), 64: _expand_kernel(64, depth=2)}
"""By ranks of an item. 64 ranks of weights leave registers for two eights of rows of y ahead."""


@cache
def rows_suit(tile: Tile, blocks: int, items: int) -> bool:
    """Whether ``rows.cu`` serves a work list of such capacity best. Measured us, Triton and CUDA, q, k and v of ranks
    8 to 64: 64 rows 21.0 and 18.3, 256 rows 80.2 and 69.4. It takes a block's items one after the other: for 16 rows
    7.9 and 9.1, and with ranks of 128 and 256 28.9 and 38.2 (output projection, 32 rows)."""
    return tile == (1, SLICES) and (items <= blocks or (blocks >= FEWEST_OF_SEVERAL and items <= 4 * blocks))


@cache
def expand_suits(tile: Tile, blocks: int, items: int) -> bool:
    """Whether ``expand.cu`` serves a work list of such capacity: blocks of one item, as many as fill a GPU."""
    return tile.rows == EXPAND_ROWS and tile.ranks in EXPAND_KERNELS and 16 <= blocks < 128 and items <= blocks


def rows_serve(y_TO: torch.Tensor, x_TD: torch.Tensor, work: SgmvWork, shape: GroupShape) -> bool:
    """Whether :func:`rows` computes this product."""
    suits = rows_suit(work.tile, work.blocks_B4.shape[0], work.max_items)
    return suits and _fits(y_TO, shape) and _fits(x_TD, shape) and _rows_run(y_TO.device)


def room_is_free(pool: torch.Tensor, shapes: Sequence[GroupShape], tile: Tile, blocks: int, items: int) -> bool:
    """Whether room in a work list of such capacity costs no time, in the products of all ``shapes``: in Triton each
    item is programs, whether it is there or not."""
    suits = rows_suit(tile, blocks, items) and all(map(_wide, shapes)) and pool.dtype == torch.bfloat16
    return suits and dependent_launch(pool.device) and _rows_run(pool.device)


def expand_serves(y_TO: torch.Tensor, work: SgmvWork, shape: GroupShape) -> bool:
    """Whether :func:`expand` computes this product."""
    suits = expand_suits(work.tile, work.blocks_B4.shape[0], work.max_items)
    return suits and _fits(y_TO, shape) and available(EXPAND_KERNELS[work.tile.ranks], y_TO.device)


def _fits(rows: torch.Tensor, shape: GroupShape) -> bool:
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % 8 == 0
    return rows.dtype == torch.bfloat16 and aligned and _wide(shape) and dependent_launch(rows.device)


def _rows_run(device: torch.device) -> bool:
    """All its programs must be there at once."""
    return available(ROWS_KERNEL, device) and not shared_by_processes(device)


def _wide(shape: GroupShape) -> bool:
    return all(n % 8 == 0 for n in (shape.in_features, *shape.out_features))


def _parts(shape: GroupShape) -> int:
    return divide_up(shape.in_features, RUN)


def _tiles(shape: GroupShape, run: int) -> int:
    return sum(divide_up(n, run) for n in shape.out_features)


def rows(
    y_TO: torch.Tensor,
    x_TD: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    listed_T: torch.Tensor | None = None,
) -> None:
    """``triton_sgmv.sgmv`` for blocks of one row, where :func:`rows_serve`. With ``listed_T`` (int32, ``listed_rows``
    of the work list) the adapters' share replaces y, which is zero where there is none."""
    parts, tiles = _parts(shape), _tiles(shape, RUN)
    mail = work.mailboxes.words(work.max_items * tiles * parts * SLICES)
    lists = (work.counts_4, work.blocks_B4, work.items_W4, work.addresses_EWR, work.entries_EW4)
    pointers = [t.data_ptr() for t in (x_TD, y_TO, pool, *lists, mail)]
    listed = None if listed_T is None else listed_T.data_ptr()
    numbers = (entry, work.max_items, x_TD.stride(0), y_TO.stride(0), parts, tiles, len(y_TO))
    parameters = RowsParameters(*pointers, listed, *numbers, _Group.of(shape))
    units = work.max_items * (len(shape.out_features) * parts + tiles)
    launch(ROWS_KERNEL, min(units, resident(ROWS_KERNEL, y_TO.device)), parameters, y_TO.device)


def expand(
    y_TO: torch.Tensor,
    partial: torch.Tensor,
    pool: torch.Tensor,
    work: SgmvWork,
    entry: int,
    shape: GroupShape,
    parts: int,
) -> None:
    """``triton_sgmv.expand`` where :func:`expand_serves`; ``partial`` is of so many parts of the inputs."""
    tiles = _tiles(shape, EXPAND_RUN)
    tensors = (y_TO, pool, work.counts_4, work.blocks_B4, work.addresses_EWR, work.entries_EW4, partial)
    numbers = (entry, work.max_items, y_TO.stride(0), parts, tiles)
    parameters = ExpandParameters(*(t.data_ptr() for t in tensors), *numbers, _Group.of(shape))
    launch(EXPAND_KERNELS[work.tile.ranks], work.blocks_B4.shape[0] * tiles, parameters, y_TO.device)
