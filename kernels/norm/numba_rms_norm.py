"""RMS norm of a few rows on a CPU, in one pass of one thread. The contract is in the package."""

# T rows, X features

from __future__ import annotations

import numpy as np

from stencilpress.kernels.numba_bits import inline, jit, narrow, widen


@jit
def rms_norm(x_TX, weight_X, eps, out_TX):
    """:func:`norm_row` of every row."""
    for t in range(x_TX.shape[0]):
        norm_row(x_TX[t], weight_X, eps, out_TX[t])


@inline
def norm_row(x_X, weight_X, eps, out_X):
    """``out = (x / rms(x)) * weight``, rounded after the division and after the product, as transformers does.

    ``out`` may be ``x``.
    """
    total = np.float32(0)
    for i in range(x_X.shape[0]):
        value = widen(x_X[i])
        total += value * value
    inverse = np.float32(1) / np.sqrt(total / np.float32(x_X.shape[0]) + np.float32(eps))
    for i in range(x_X.shape[0]):
        normed = narrow(widen(x_X[i]) * inverse, out_X)
        out_X[i] = narrow(widen(normed) * widen(weight_X[i]), out_X)
