"""The gate of a SwiGLU layer.

Semantics: out[t, i] = round(silu(x[t, i])) * x[t, I + i], silu in fp32 and rounded to x's dtype.

Legend: T rows, I inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.triton_launch import divide_up, launch_options

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < WIDTH
    gate = tl.load(x_ptr + t * x_stride + i, mask=ok, other=0.0)
    up = tl.load(x_ptr + t * x_stride + WIDTH + i, mask=ok, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + t * WIDTH + i, (silu * up).to(gate.dtype), mask=ok)


def silu_mul(x_TN: torch.Tensor) -> torch.Tensor:
    """From (T, 2 I), gate then up, to (T, I). Raises ValueError on an odd width or an inner stride."""
    rows, width = x_TN.shape
    if width % 2 or x_TN.stride(1) != 1:
        raise ValueError(f"gate and up must lie side by side, not {tuple(x_TN.shape)}")
    inner = width // 2
    out = torch.empty((rows, inner), dtype=x_TN.dtype, device=x_TN.device)
    grid = (rows, divide_up(inner, _BLOCK))
    silu_mul_kernel[grid](
        x_TN, out, x_TN.stride(0), WIDTH=inner, BLOCK=_BLOCK, num_warps=4, **launch_options(x_TN.device)
    )
    return out
