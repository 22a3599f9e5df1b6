"""A linear layer for few rows, bound by the bytes of its weight, on tensor cores.

Semantics: y[t, o] = sum_i x[t, i] * W[o, i] + b[o], accumulated in fp32 and rounded once.

A program takes one tile of outputs and one split of the inputs. It asks for the first of its weights before it waits
for its predecessor (programmatic dependent launch), so that memory is never idle between the kernels of a step. With
several splits each leaves its sums in a plane, and the one that finishes last adds the planes up in order: no sum
depends on timing.

Legend: T rows (M: padded to 8 or more), D in_features, O out_features, N outputs of a tile, K inputs of a load, S splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.triton_launch import INTERPRETED, launch_options

MOST_ROWS = 64
MOST_TILES = 8192


class Cut(NamedTuple):
    """Outputs of a tile, inputs of a load, splits, loads in flight, inputs asked for before the wait, warps."""

    outputs: int
    inputs: int
    splits: int
    stages: int
    ahead: int
    warps: int = 4


@triton.jit
def _ask_for(w_ptr, row_N, start, count, D: tl.constexpr, N: tl.constexpr):
    """Have inputs [start, start + count) of these rows brought into the L2 cache: the copy engine does it."""
    half = tl.arange(0, 2)
    place_N2 = row_N[:, None] * D + start + half[None, :] * (count // 2)
    size_N2 = tl.zeros((N, 2), tl.int32) + count // 2 * (w_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [(w_ptr + place_N2).to(tl.int64), size_N2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    planes_ptr,
    arrived_ptr,
    rows,
    x_stride,
    D: tl.constexpr,
    O: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    F32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``arrived`` counts the splits of each tile that are done; the last one sets it back to zero."""
    RUN: tl.constexpr = (D // K + S - 1) // S * K
    tile, split = tl.program_id(0) // S, tl.program_id(0) % S
    m, i = tl.arange(0, M), tl.arange(0, K)
    o = tile * N + tl.arange(0, N)
    row_N = o.to(tl.int64)
    start = split * RUN
    end = tl.minimum(start + RUN, D)
    if PDL:
        gdc_launch_dependents()
        if AHEAD > 0:
            _ask_for(w_ptr, row_N, start, tl.minimum(end - start, AHEAD), D, N)
        gdc_wait()
    live_M = (m < rows)[None, :]
    x_KM_ptr = x_ptr + m[None, :].to(tl.int64) * x_stride + i[:, None]
    w_NK_ptr = w_ptr + row_N[:, None] * D + i[None, :]
    acc_NM = tl.zeros((N, M), dtype=tl.float32)
    for first in range(start, end, K):
        w_NK = tl.load(w_NK_ptr + first)
        x_KM = tl.load(x_KM_ptr + first, mask=live_M, other=0.0)
        if F32_DOT:
            w_NK, x_KM = w_NK.to(tl.float32), x_KM.to(tl.float32)
        acc_NM = tl.dot(w_NK, x_KM, acc_NM, input_precision="ieee")
    last = True
    if S > 1:
        plane_NM_ptr = planes_ptr + row_N[:, None] * M + m[None, :]
        tl.store(plane_NM_ptr + split * (O * M), acc_NM, mask=live_M)
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == S - 1
        if last:
            acc_NM = tl.zeros((N, M), dtype=tl.float32)
            for s in tl.static_range(S):
                acc_NM += tl.load(plane_NM_ptr + s * (O * M), mask=live_M, other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if last:
        if BIAS:
            acc_NM += tl.load(bias_ptr + o).to(tl.float32)[:, None]
        y_NM_ptr = y_ptr + m[None, :].to(tl.int64) * O + o[:, None]
        tl.store(y_NM_ptr, acc_NM.to(y_ptr.dtype.element_ty), mask=live_M)


def fits(rows: int, inputs: int, outputs: int, cut: Cut) -> bool:
    """Whether a product can be cut so."""
    return 0 < rows <= MOST_ROWS and inputs % cut.inputs == 0 and outputs % cut.outputs == 0


def linear_constants(
    rows: int, inputs: int, outputs: int, cut: Cut, *, bias: bool, f32_dot: bool = INTERPRETED
) -> dict[str, Any]:
    """Compile-time constants of the kernel."""
    return {
        "D": inputs,
        "O": outputs,
        "M": max(8, triton.next_power_of_2(rows)),
        "N": cut.outputs,
        "K": cut.inputs,
        "S": cut.splits,
        "AHEAD": cut.ahead,
        "BIAS": bias,
        "F32_DOT": f32_dot,
    }


def linear_few_rows(
    x_TD: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None, arrived_N: torch.Tensor, cut: Cut
) -> torch.Tensor:
    """Returns (T, O) in x's dtype. ``arrived_N`` int32, zero, of one stream: a counter for each tile of outputs.

    Raises ValueError where shapes, strides or dtypes do not fit, or the product cannot be cut so.
    """
    rows, inputs = x_TD.shape
    outputs = len(weight_OD)
    if weight_OD.shape != (outputs, inputs) or not fits(rows, inputs, outputs, cut):
        raise ValueError(f"x {tuple(x_TD.shape)} and weight {tuple(weight_OD.shape)} do not fit {cut}")
    if x_TD.stride(1) != 1 or not weight_OD.is_contiguous() or x_TD.dtype != weight_OD.dtype:
        raise ValueError("x needs unit inner stride, the weight must be packed, both of one dtype")
    tiles = outputs // cut.outputs
    if tiles > len(arrived_N):
        raise ValueError(f"{tiles} tiles of outputs; there are {len(arrived_N)} counters")
    y = torch.empty((rows, outputs), dtype=x_TD.dtype, device=x_TD.device)
    constants = linear_constants(rows, inputs, outputs, cut, bias=bias_O is not None)
    planes = y
    if cut.splits > 1:
        planes = torch.empty((cut.splits, outputs, constants["M"]), dtype=torch.float32, device=x_TD.device)
    linear_kernel[(tiles * cut.splits,)](
        x_TD,
        weight_OD,
        y if bias_O is None else bias_O,
        y,
        planes,
        arrived_N,
        rows,
        x_TD.stride(0),
        **constants,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x_TD.device),
    )
    return y


def choose_cut(rows: int, inputs: int, outputs: int, device: torch.device) -> Cut | None:
    """None where cuBLAS is as fast."""
    return None
