"""A placed adapter as strided views of the pool: made once, when it is placed; nothing is copied.

Slices of one (layer, group) that lie in one page are equidistant, so the rows of A, and of Bᵀ, of a projection are one
strided matrix. An entry that runs over several pages is several such matrices, whose products add up.
"""

# D input features, O output features of a projection, R slices in one page, E elements of the pool

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from stencilpress.kernels.sgmv.table import ENTRY_WORDS, Entry, GroupShape, Words, read_table


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One projection in adjacent slices: y[:, columns] += scale * (x @ a.T) @ b, with ``a`` (R, D), ``b`` (R, O)."""

    scale: float
    columns: slice
    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterView:
    """An adapter in the pool. ``entries[layer * groups + group]`` has no parts where it changes nothing.

    For kernels that read the slice table itself: ``table`` is a host copy, ``table_offset`` the element offset of the
    device's, ``rank`` the largest
    of its entries, ``groups`` has a bit for each group that it changes in some layer.
    """

    table_offset: int
    rank: int
    groups: int
    entries: tuple[tuple[Part, ...], ...]
    table: Words


def adapter_view(
    pool_E: Tensor, table: Words, table_offset: int, layers: int, shapes: Sequence[GroupShape]
) -> AdapterView:
    """Views of the adapter whose slice table is ``table`` (a host copy). ``pool_E`` is flat."""
    entries = read_table(table, layers, shapes)
    parts = (tuple(_parts(pool_E, entry, shapes[e % len(shapes)])) for e, entry in enumerate(entries))
    return replace(table_view(table, table_offset, layers, shapes), entries=tuple(parts))


def table_view(table: Words, table_offset: int, layers: int, shapes: Sequence[GroupShape]) -> AdapterView:
    """The same without ``entries``: all that a device needs whose kernels read the table, and quick to make."""
    ranks_LG = (table[: layers * len(shapes) * ENTRY_WORDS : ENTRY_WORDS] & 0xFFFFFFFF).reshape(layers, -1)
    groups = sum(1 << group for group in np.flatnonzero(ranks_LG.any(axis=0)).tolist())
    return AdapterView(table_offset, int(ranks_LG.max(initial=0)), groups, (), table)


def _parts(pool_E: Tensor, entry: Entry | None, shape: GroupShape) -> Iterator[Part]:
    if entry is None:
        return
    breaks = np.flatnonzero(np.diff(entry.addresses) != entry.slice_elems) + 1
    for run in np.split(entry.addresses, breaks):
        a_start = int(run[0])
        b_start = a_start + len(entry.present) * shape.in_features
        for projection, scale in zip(entry.present, entry.scales, strict=True):
            columns = shape.columns(projection)
            width = columns.stop - columns.start
            a_RD = pool_E.as_strided((len(run), shape.in_features), (entry.slice_elems, 1), a_start)
            b_RO = pool_E.as_strided((len(run), width), (entry.slice_elems, 1), b_start)
            yield Part(scale, columns, a_RD, b_RO)
            a_start, b_start = a_start + shape.in_features, b_start + width
