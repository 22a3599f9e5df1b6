"""The segmented product word for word: reads the slice tables, loops over everything, accumulates in fp32.

The ground truth that faster forms are tested against. The contract is in the package.
"""

# T rows, D input features, O output features of the group, E elements of the pool, R rank

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stencilpress.kernels.sgmv.table import Entry, GroupShape, Words, read_table


def sgmv_reference(
    y_TO: Tensor,
    x_TD: Tensor,
    pool_E: Tensor,
    row_start: Sequence[int],
    tables: Sequence[Words | None],
    shapes: Sequence[GroupShape],
    layers: int,
    entry: tuple[int, int],
) -> None:
    """Add the delta of ``entry`` = (layer, group) to ``y_TO`` in place, rounding once.

    Segment s has rows ``row_start[s] .. row_start[s + 1] - 1`` and the slice table ``tables[s]``; None is the base.
    ``shapes`` has the groups of a layer.
    """
    layer, group = entry
    for s, table in enumerate(tables):
        found = None if table is None else read_table(table, layers, shapes)[layer * len(shapes) + group]
        if found is not None:
            rows = slice(row_start[s], row_start[s + 1])
            _add(y_TO[rows], x_TD[rows], pool_E, found, shapes[group])


def _add(y_TO: Tensor, x_TD: Tensor, pool_E: Tensor, entry: Entry, shape: GroupShape) -> None:
    slices = torch.stack([pool_E[a : a + entry.slice_elems].float() for a in entry.addresses.tolist()])
    a_start, b_start = 0, len(entry.present) * shape.in_features
    for projection, scale in zip(entry.present, entry.scales, strict=True):
        columns = shape.columns(projection)
        width = columns.stop - columns.start
        a_RD = slices[:, a_start : a_start + shape.in_features]
        b_RO = slices[:, b_start : b_start + width]
        y_TO[:, columns] = y_TO[:, columns].float() + scale * ((x_TD.float() @ a_RD.T) @ b_RO)
        a_start, b_start = a_start + shape.in_features, b_start + width
