"""The segmented product on a CPU: what the CPU engine runs. The contract is in the package.

Rows of short segments are taken one by one, adapter slices read where they lie. A long segment is multiplied as a
whole, through strided views of the pool.
"""

# T rows, D input features, O output features of the group, E elements and W words

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from stencilpress.kernels.numba_bits import Elements, elements
from stencilpress.kernels.sgmv.numba_rows import add_rows
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.views import AdapterView

SHORT_ROWS = 32
"""Segments below go row by row."""


class Piece(NamedTuple):
    """Rows ``first .. end - 1`` and their adapter."""

    first: int
    end: int
    adapter: AdapterView

    @property
    def short(self) -> bool:
        return self.end - self.first < SHORT_ROWS


class Deltas:
    """The deltas of one step, or of several with the same pieces.

    ``pieces`` are in the order of rows; rows in none of them are the base's. ``pool`` is the whole pool, flat;
    ``shapes`` has the groups of a layer.
    """

    def __init__(self, pieces: Sequence[Piece], pool: Elements, layers: int, shapes: Sequence[GroupShape]) -> None:
        self.pieces = pieces
        self._pool = pool
        self._entries = layers * len(shapes)
        self._outputs = [np.array(shape.out_features, dtype=np.int64) for shape in shapes]
        self._long = [piece for piece in pieces if not piece.short]
        short = [piece for piece in pieces if piece.short]
        self._groups = 0
        for piece in short:
            self._groups |= piece.adapter.groups
        starts = np.cumsum([0, *(len(piece.adapter.table) for piece in short)])
        self._tables_W = np.concatenate([piece.adapter.table for piece in short] or [starts[:0]])
        self._table_T = np.full(max((piece.end for piece in short), default=0), -1, dtype=np.int64)
        for piece, start in zip(short, starts, strict=False):
            self._table_T[piece.first : piece.end] = start

    def add(self, y_TO: Tensor, x_TD: Tensor, layer: int, group: int) -> None:
        """Add the delta of one (layer, group) to ``y_TO`` in place."""
        entry = layer * len(self._outputs) + group
        if self._groups >> group & 1:
            outputs = self._outputs[group]
            add_rows(
                elements(y_TO), elements(x_TD), self._pool, self._tables_W, self._table_T, entry, self._entries, outputs
            )
        for first, end, adapter in self._long:
            x, y = x_TD[first:end], y_TO[first:end]
            for part in adapter.entries[entry]:
                y[:, part.columns].add_((x @ part.a.T) @ part.b, alpha=part.scale)
