"""The segmented product as few dense ones, in PyTorch: what the CPU engine runs. The contract is in the package.

A long segment multiplies the pool's own rows through strided views. Short neighbours (decodes of several adapters)
are copied side by side, A as (C, D) and B as a block-diagonal (C, O), so that two products serve them all; between
the products each row keeps its own adapter's columns alone. A product costs 15 to 30 us on a CPU whatever its size,
copying a few rows 1 us.
"""

# T rows, D input features, O output features of the group, C columns: the ranks of all stacked parts

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.views import AdapterView, Part

LONG_ROWS = 32
"""A segment of so many rows is multiplied alone: stacked, it would waste more on other adapters' columns."""
MAX_COLUMNS = 512
"""Stacks are cut at this width, so that the waste grows with the batch and not with its square."""


class Piece(NamedTuple):
    """Rows ``first .. end - 1`` and their adapter."""

    first: int
    end: int
    adapter: AdapterView


_Adapted = list[tuple[Piece, tuple[Part, ...]]]


class Deltas:
    """The deltas of one step. ``pieces`` are in the order of rows; rows in none of them are the base's."""

    def __init__(self, pieces: Sequence[Piece], shapes: Sequence[GroupShape]) -> None:
        self._shapes = shapes
        self._neighbours = _neighbours(pieces)
        self._weights: dict[object, tuple[Tensor, Tensor]] = {}

    def add(self, y_TO: Tensor, x_TD: Tensor, layer: int, group: int) -> None:
        """Add the delta of one (layer, group) to ``y_TO`` in place."""
        entry = layer * len(self._shapes) + group
        for pieces in self._neighbours:
            for adapted in _stacks(pieces, entry):
                if len(adapted) == 1:
                    _add_alone(y_TO, x_TD, *adapted[0])
                else:
                    self._add_stacked(y_TO, x_TD, adapted, self._shapes[group])

    def _add_stacked(self, y_TO: Tensor, x_TD: Tensor, adapted: _Adapted, shape: GroupShape) -> None:
        stacks = [
            [(piece, part) for piece, parts in adapted for part in parts if part.columns == shape.columns(projection)]
            for projection in range(len(shape.out_features))
        ]
        columns = [column for stack in stacks for column in stack]
        rows = slice(adapted[0][0].first, adapted[-1][0].end)
        foreign_TC, scale_TC = self._weights_of(columns, rows)
        a_CD = torch.cat([part.a for _, part in columns])
        b_CO = torch.block_diag(  # type: ignore[no-untyped-call]
            *(
                torch.cat([part.b for _, part in stack]) if stack else a_CD.new_empty(0, width)
                for stack, width in zip(stacks, shape.out_features, strict=True)
            )
        )
        h_TC = (x_TD[rows] @ a_CD.T).masked_fill_(foreign_TC, 0).mul_(scale_TC)
        y_TO[rows].add_(h_TC @ b_CO)

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


def _neighbours(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Runs of short pieces without a long one, or as many rows of the base, between them; long pieces alone."""
    runs: list[list[Piece]] = []
    last_end, after_long = 0, True
    for piece in pieces:
        long = piece.end - piece.first >= LONG_ROWS
        if long or after_long or piece.first - last_end >= LONG_ROWS:
            runs.append([])
        runs[-1].append(piece)
        last_end, after_long = piece.end, long
    return runs


def _stacks(pieces: list[Piece], entry: int) -> Iterator[_Adapted]:
    """The pieces whose adapter changes this entry, cut at :data:`MAX_COLUMNS`."""
    stack: _Adapted = []
    columns = 0
    for piece in pieces:
        parts = piece.adapter.entries[entry]
        width = sum(part.rank for part in parts)
        if stack and columns + width > MAX_COLUMNS:
            yield stack
            stack, columns = [], 0
        if parts:
            stack.append((piece, parts))
            columns += width
    if stack:
        yield stack


def _add_alone(y_TO: Tensor, x_TD: Tensor, piece: Piece, parts: Sequence[Part]) -> None:
    rows = slice(piece.first, piece.end)
    for part in parts:
        y_TO[rows, part.columns].add_((x_TD[rows] @ part.a.T) @ part.b, alpha=part.scale)
