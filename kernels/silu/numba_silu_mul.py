"""The gate of a few rows on a CPU, in one pass of one thread."""

# T rows, I inner features

from __future__ import annotations

import numpy as np

from stencilpress.kernels.numba_bits import exp, jit, narrow, widen


@jit
def silu_mul(gate_up_TI, out_TI):
    """``out = silu(gate) * up`` of (T, 2 I) gate and up side by side; silu is rounded before the product."""
    inner = out_TI.shape[1]
    for t in range(out_TI.shape[0]):
        for i in range(inner):
            gate = widen(gate_up_TI[t, i])
            silu = narrow(gate / (np.float32(1) + exp(-gate)), out_TI)
            out_TI[t, i] = narrow(widen(silu) * widen(gate_up_TI[t, inner + i]), out_TI)
