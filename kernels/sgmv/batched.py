"""The segmented product as few dense ones, in PyTorch: what the CPU engine runs. The contract is in the package.

Neighbouring segments are stacked: their parts are copied side by side, A as (C, D) and B as a block-diagonal (C, O), so
that two products serve them all, and between the products each row keeps its own adapter's columns alone. A product
in half precision takes 13 us or more on a CPU however small it is, copying a few rows 1 us. Where the columns of others
would cost more than calls do, a segment is multiplied alone, through strided views of the pool.
"""

# T rows, D input features, O output features of the group, C columns: the ranks of all stacked parts

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.views import AdapterView, Part

FP32_ROWS = 32
"""Below so many rows a segment alone is multiplied in fp32: small products take 2 us in it."""
CALL_MACS = 4 << 20
"""Multiply-adds that take as long as the calls of one part that is multiplied alone."""


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
        self._weights: dict[object, tuple[Tensor, Tensor]] = {}

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
            yield _Alone(*adapted[0]) if len(adapted) == 1 else self._stacked(adapted, shape)

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
        )

    def _weights_of(self, columns: list[tuple[Piece, Part]], rows: slice) -> tuple[Tensor, Tensor]:
        """Where a row meets another's column (T, C), and the scales, fp32 (C,). Most layers share them."""
        key = tuple((piece.first, piece.end, part.rank, part.scale) for piece, part in columns)
        if key not in self._weights:
            device = columns[0][1].a.device
            owner_C = [(piece, part.scale) for piece, part in columns for _ in range(part.rank)]
            first_C = torch.tensor([piece.first for piece, _ in owner_C], device=device)
            end_C = torch.tensor([piece.end for piece, _ in owner_C], device=device)
            row_T1 = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
            scale_C = torch.tensor([scale for _, scale in owner_C], device=device)
            self._weights[key] = (row_T1 < first_C) | (row_T1 >= end_C), scale_C
        return self._weights[key]


_Adapted = list[tuple[Piece, tuple[Part, ...]]]


def _stacks(pieces: Sequence[Piece], entry: int, shape: GroupShape) -> Iterator[_Adapted]:
    """The pieces whose adapter changes this entry; neighbours together while that wastes less than it saves."""
    stack: _Adapted = []
    area = columns = 0
    for piece in pieces:
        parts = piece.adapter.entries[entry]
        if not parts:
            continue
        own = sum(part.rank for part in parts)
        joint = (piece.end - stack[0][0].first) * (columns + own) if stack else 0
        waste = joint - area - (piece.end - piece.first) * own
        if stack and waste * (shape.in_features + sum(shape.out_features)) > CALL_MACS * len(parts):
            yield stack
            stack, columns = [], 0
        stack.append((piece, parts))
        columns += own
        area = (piece.end - stack[0][0].first) * columns
    if stack:
        yield stack


class _Alone(NamedTuple):
    """One piece, through the pool's own rows."""

    piece: Piece
    parts: tuple[Part, ...]

    def add(self, y_TO: Tensor, x_TD: Tensor) -> None:
        first, end, _ = self.piece
        x, y = x_TD[first:end], y_TO[first:end]
        dtype = torch.float32 if end - first < FP32_ROWS else x.dtype
        x = x.to(dtype)
        for part in self.parts:
            y[:, part.columns].add_((x @ part.a.to(dtype).T) @ part.b.to(dtype), alpha=part.scale)


class _Stacked(NamedTuple):
    """Several pieces: all parts' A, per projection its parts' B, whose columns are foreign to which row, the scales."""

    rows: slice
    a: list[Tensor]
    b: list[list[Tensor]]
    foreign: Tensor
    scale: Tensor

    def add(self, y_TO: Tensor, x_TD: Tensor) -> None:
        a_CD = torch.cat(self.a)
        b_CO = torch.block_diag(*map(torch.cat, self.b))  # type: ignore[no-untyped-call]
        h_TC = (x_TD[self.rows] @ a_CD.T).masked_fill_(self.foreign, 0).mul_(self.scale)
        y_TO[self.rows].add_(h_TC @ b_CO)
