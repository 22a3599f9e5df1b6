"""The segmented product as few dense ones, in PyTorch: what the CPU engine runs. The contract is in the package.

Short neighbouring segments are stacked: their parts are copied side by side, A as (D, C) and B as a block-diagonal
(C, O), so that two products serve them all, and between the products each row keeps its own adapter's columns alone.
While the same adapters keep the same rows, step after step, the copies are kept. They are in fp32: a product of a few
rows takes 2 us in it, in half precision 13 us or more, however small. Segments are stacked only while the columns of
others cost less than the calls they save. A long segment is multiplied alone, through strided views of the pool.
"""

# T rows, D input features, O output features of the group, C columns: the ranks of all stacked parts

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.views import AdapterView, Part

SHORT_ROWS = 32
"""Segments below are stacked and multiplied in fp32."""
CALL_MACS = 160_000
"""Multiply-adds of a few rows in fp32 that take as long as the calls of one stack: about 8 us."""
KEPT_BYTES = 128 << 20
"""Copies that one set of adapters may keep; the pool's own pages stay the only lasting place of an adapter."""


class _Spare:
    """Bytes that may still be kept."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes

    def take(self, size_bytes: int) -> bool:
        fits = size_bytes <= self._left
        if fits:
            self._left -= size_bytes
        return fits


class Piece(NamedTuple):
    """Rows ``first .. end - 1`` and their adapter."""

    first: int
    end: int
    adapter: AdapterView


class Deltas:
    """The deltas of one step, or of several with the same pieces: how to compute them is worked out once.

    ``pieces`` are in the order of rows; rows in none of them are the base's. ``shapes`` has the groups of a layer.
    """

    def __init__(self, pieces: Sequence[Piece], shapes: Sequence[GroupShape]) -> None:
        self.pieces = pieces
        self._shapes = shapes
        self._products: dict[int, list[_Alone | _Stacked]] = {}
        self._weights: dict[object, tuple[Tensor | None, Tensor]] = {}
        self._spare = _Spare(KEPT_BYTES)

    def add(self, y_TO: Tensor, x_TD: Tensor, layer: int, group: int) -> None:
        """Add the delta of one (layer, group) to ``y_TO`` in place."""
        entry = layer * len(self._shapes) + group
        products = self._products.get(entry)
        if products is None:
            products = self._products[entry] = list(self._prepare(entry, self._shapes[group]))
        for product in products:
            product.add(y_TO, x_TD)

    def _prepare(self, entry: int, shape: GroupShape) -> Iterator[_Alone | _Stacked]:
        for adapted in _stacks(self.pieces, entry, shape):
            piece, parts = adapted[0]
            yield _Alone(piece, parts) if piece.end - piece.first >= SHORT_ROWS else self._stacked(adapted, shape)

    def _stacked(self, adapted: _Adapted, shape: GroupShape) -> _Stacked:
        stacks = [
            [(piece, part) for piece, parts in adapted for part in parts if part.columns == shape.columns(projection)]
            for projection in range(len(shape.out_features))
        ]
        columns = [column for stack in stacks for column in stack]
        rows = slice(adapted[0][0].first, adapted[-1][0].end)
        absent = [columns[0][1].b.new_empty(0, width) for width in shape.out_features]
        return _Stacked(
            rows,
            [part.a for _, part in columns],
            [[part.b for _, part in stack] or [none] for stack, none in zip(stacks, absent, strict=True)],
            *self._weights_of(columns, rows),
            self._spare,
        )

    def _weights_of(self, columns: list[tuple[Piece, Part]], rows: slice) -> tuple[Tensor | None, Tensor]:
        """Where a row meets another's column (T, C), if any does, and the scales, fp32 (C,). Most layers share them."""
        key = tuple((piece.first, piece.end, part.rank, part.scale) for piece, part in columns)
        if key not in self._weights:
            device = columns[0][1].a.device
            owner_C = [(piece, part.scale) for piece, part in columns for _ in range(part.rank)]
            first_C = torch.tensor([piece.first for piece, _ in owner_C], device=device)
            end_C = torch.tensor([piece.end for piece, _ in owner_C], device=device)
            row_T1 = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
            scale_C = torch.tensor([scale for _, scale in owner_C], device=device)
            foreign_TC = (row_T1 < first_C) | (row_T1 >= end_C)
            self._weights[key] = foreign_TC if bool(foreign_TC.any()) else None, scale_C
        return self._weights[key]


_Adapted = list[tuple[Piece, tuple[Part, ...]]]


def _stacks(pieces: Sequence[Piece], entry: int, shape: GroupShape) -> Iterator[_Adapted]:
    """The pieces whose adapter changes this entry; short neighbours together while that wastes less than it saves."""
    stack: _Adapted = []
    area = columns = 0
    for piece in pieces:
        parts = piece.adapter.entries[entry]
        if not parts:
            continue
        own = sum(part.rank for part in parts)
        first = stack[0][0].first if stack else piece.first
        joint = (piece.end - first) * (columns + own)
        waste = joint - area - (piece.end - piece.first) * own
        too_long = piece.end - first >= SHORT_ROWS
        if stack and (too_long or waste * (shape.in_features + sum(shape.out_features)) > CALL_MACS):
            yield stack
            stack, columns, first = [], 0, piece.first
        stack.append((piece, parts))
        columns += own
        area = (piece.end - first) * columns
    if stack:
        yield stack


class _Alone(NamedTuple):
    """One piece, through the pool's own rows."""

    piece: Piece
    parts: tuple[Part, ...]

    def add(self, y_TO: Tensor, x_TD: Tensor) -> None:
        first, end, _ = self.piece
        x, y = x_TD[first:end], y_TO[first:end]
        for part in self.parts:
            y[:, part.columns].add_((x @ part.a.T) @ part.b, alpha=part.scale)


class _Stacked:
    """Several pieces: all parts' A, per projection its parts' B, whose columns are foreign to which row, the scales."""

    def __init__(
        self, rows: slice, a: list[Tensor], b: list[list[Tensor]], foreign: Tensor | None, scale: Tensor, spare: _Spare
    ) -> None:
        self._rows = rows
        self._a = a
        self._b = b
        self._foreign = foreign
        self._scale = scale
        self._spare = spare
        self._used = False
        self._kept: tuple[Tensor, Tensor] | None = None

    def add(self, y_TO: Tensor, x_TD: Tensor) -> None:
        a_DC, b_CO = self._kept or self._copy()
        h_TC = torch.mm(x_TD[self._rows].float(), a_DC).mul_(self._scale)
        if self._foreign is not None:
            h_TC.masked_fill_(self._foreign, 0)
        y_TO[self._rows].add_(torch.mm(h_TC, b_CO))

    def _copy(self) -> tuple[Tensor, Tensor]:
        """Side by side; a set of adapters that comes a second time will come again, so its copy is kept."""
        b_CO = torch.block_diag(*map(torch.cat, self._b))  # type: ignore[no-untyped-call]
        copies = torch.cat(self._a).float().T, b_CO.float()
        if self._used and self._spare.take(sum(copy.nbytes for copy in copies)):
            self._kept = copies
        self._used = True
        return copies
