"""The segmented product row by row on a CPU: one thread reads each adapter's slices where they lie.

The contract is in the package.
It costs what the ranks ask for and nothing per call but the call, which is what few rows of many adapters need.
"""

# T rows, D input features, O output features of the group, E elements and W words of the pool

from __future__ import annotations

import numpy as np

from stencilpress.kernels.numba_bits import inline, jit, narrow, widen
from stencilpress.kernels.sgmv.table import ENTRY_WORDS


@jit
def add_rows(y_TO, x_TD, pool_E, tables_W, table_T, entry, entries, out_features):
    """Add to row t of ``y`` the delta of ``entry`` of the adapter whose slice table begins at ``tables_W[table_T[t]]``.

    Rows from ``len(table_T)`` on, and those with a negative start, have no adapter. ``entries`` is how many a table
    has, ``out_features`` (projections,) how wide each one's output is.
    """
    in_features, projections = x_TD.shape[1], out_features.shape[0]
    x_D = np.empty(in_features, np.float32)
    sum_O = np.empty(y_TO.shape[1], np.float32)
    for t in range(table_T.shape[0]):
        if table_T[t] < 0:
            continue
        word = table_T[t] + ENTRY_WORDS * entry
        rank, mask = tables_W[word] & 0xFFFFFFFF, tables_W[word] >> 32
        if rank == 0:
            continue
        first = table_T[t] + ENTRY_WORDS * entries + tables_W[word + 1]
        scales = tables_W[word + 2 : word + 4].view(np.float32)
        for i in range(in_features):
            x_D[i] = widen(x_TD[t, i])
        sum_O[:] = 0
        for j in range(rank):
            a_start = tables_W[first + j]
            b_start = a_start + in_features * _ones(mask)
            column = 0
            for p in range(projections):
                width = out_features[p]
                if mask >> p & 1:
                    h = _dot(x_D, pool_E[a_start : a_start + in_features]) * scales[p]
                    _add(sum_O[column : column + width], h, pool_E[b_start : b_start + width])
                    a_start += in_features
                    b_start += width
                column += width
        for o in range(y_TO.shape[1]):
            y_TO[t, o] = narrow(widen(y_TO[t, o]) + sum_O[o], y_TO)


@inline
def _dot(x_D, a_D):
    total = np.float32(0)
    for i in range(a_D.shape[0]):
        total += x_D[i] * widen(a_D[i])
    return total


@inline
def _add(sum_O, factor, b_O):
    for o in range(b_O.shape[0]):
        sum_O[o] += factor * widen(b_O[o])


@inline
def _ones(mask):
    return (mask & 1) + (mask >> 1 & 1) + (mask >> 2 & 1)
