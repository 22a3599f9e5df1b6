"""RMS norm of a few rows on a CPU, in one pass of one thread. The contract is in the package."""

# T rows, X features

from __future__ import annotations

import numpy as np

from stencilpress.kernels.numba_bits import jit, narrow, widen


@jit
def rms_norm(x_TX, weight_X, eps, out_TX):
    """``out = (x / rms(x)) * weight``, rounded after the division and after the product, as transformers does."""
    for t in range(x_TX.shape[0]):
        total = np.float32(0)
        for i in range(x_TX.shape[1]):
            value = widen(x_TX[t, i])
            total += value * value
        inverse = np.float32(1) / np.sqrt(total / np.float32(x_TX.shape[1]) + np.float32(eps))
        for i in range(x_TX.shape[1]):
            normed = narrow(widen(x_TX[t, i]) * inverse, out_TX)
            out_TX[t, i] = narrow(widen(normed) * widen(weight_X[i]), out_TX)
