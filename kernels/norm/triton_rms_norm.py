"""RMS norm, with the residual stream added first where there is one.

Semantics: residual[t, i] += x[t, i] (rounded to its dtype), then with v the new residual (or x, if there is none),

    out[t, i] = round(v[t, i] / sqrt(mean_i v[t, i]^2 + eps)) * weight[i]

in fp32 up to the rounding to x's dtype, as Llama's reference does (Zhang and Sennrich 2019, arXiv 1910.07467).

Legend: T rows, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.triton_launch import launch_options, power_of_two


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < D
    weight_D = tl.load(weight_ptr + i, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    v_D = tl.load(x_ptr + t * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        total_D = v_D + tl.load(residual_ptr + t * D + i, mask=ok, other=0.0).to(tl.float32)
        stored_D = total_D.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + t * D + i, stored_D, mask=ok)
        v_D = stored_D.to(tl.float32)
    scaled_D = v_D * tl.rsqrt(tl.sum(v_D * v_D, axis=0) / D + eps)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + t * D + i, (scaled_D.to(dtype).to(tl.float32) * weight_D).to(dtype), mask=ok)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns (T, D) in x's dtype. ``residual_TD``, packed, is updated in place. Raises ValueError on a misfit."""
    rows, dim = x_TD.shape
    if weight_D.shape != (dim,) or x_TD.stride(1) != 1:
        raise ValueError(f"x {tuple(x_TD.shape)} does not fit weight {tuple(weight_D.shape)}")
    if residual_TD is not None and (residual_TD.shape != x_TD.shape or not residual_TD.is_contiguous()):
        raise ValueError("the residual must be packed and of x's shape")
    out = torch.empty((rows, dim), dtype=x_TD.dtype, device=x_TD.device)
    block = power_of_two(dim)
    rms_norm_kernel[(rows,)](
        x_TD,
        x_TD if residual_TD is None else residual_TD,
        weight_D,
        out,
        x_TD.stride(0),
        eps,
        D=dim,
        BLOCK=block,
        RESIDUAL=residual_TD is not None,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(x_TD.device),
    )
    return out
