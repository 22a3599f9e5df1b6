"""A linear layer for few rows, bound by the bytes of its weight, on tensor cores.

Semantics: y[t, o] = sum_i x[t, i] * W[o, i] + b[o], accumulated in fp32 and rounded once.

A program takes one tile of outputs and one split of the inputs. It loads the first of its weights before it waits for
its predecessor (programmatic dependent launch): memory is busy while norms, gates and attention compute, and while
the last sums of the product before are on their way. With several splits each leaves its sums in a plane, and the one
that finishes last adds the planes up in order: no sum depends on timing.

Legend: T rows (M: padded to a power of two), D in_features, O out_features, N outputs of a tile, K inputs of a load,
S splits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.triton_launch import (
    INTERPRETED,
    divide_up,
    hopper,
    launch_options,
    multiprocessors,
    power_of_two,
)

MOST_ROWS = 32
"""Of more rows cuBLAS is faster."""
_OUTPUTS, _INPUTS = 64, 128
_MOST_TILES = 8192
_MOST_PLANE_ELEMS = 1 << 21


class Cut(NamedTuple):
    """Outputs of a tile, inputs of a load, splits, loads in flight, inputs loaded before the wait, warps."""

    outputs: int
    inputs: int
    splits: int
    stages: int
    head: int
    warps: int = 4


class LinearScratch:
    """What the splits of a product meet in; serves one stream. ``arrived_N`` int32 is zero between launches.

    It is no memory of PyTorch's allocator: a kernel that starts early may otherwise be given the planes while its
    predecessor still uses them.
    """

    def __init__(self, device: torch.device) -> None:
        self.arrived_N = torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
        self.planes_N = torch.empty(_MOST_PLANE_ELEMS, dtype=torch.float32, device=device)


@triton.jit
def _dot(w_NK, x_KM, acc_NM, F32_DOT: tl.constexpr):
    if F32_DOT:
        w_NK, x_KM = w_NK.to(tl.float32), x_KM.to(tl.float32)
    return tl.dot(w_NK, x_KM, acc_NM, input_precision="ieee")


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
    O: tl.constexpr,  # noqa: E741
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    HEAD: tl.constexpr,
    FOR_NEXT: tl.constexpr,
    BIAS: tl.constexpr,
    F32_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``arrived`` counts the splits of each tile that are done; the last one sets it back to zero. FOR_NEXT: the
    successor starts only after the wait, so that it may read x before it waits itself."""
    RUN: tl.constexpr = (D // K + S - 1) // S * K
    tile, split = tl.program_id(0) // S, tl.program_id(0) % S
    m, i = tl.arange(0, M), tl.arange(0, K)
    o = tile * N + tl.arange(0, N)
    row_N = o.to(tl.int64)
    start = split * RUN
    end = tl.minimum(start + RUN, D)
    live_M = (m < rows)[None, :]
    x_M_ptr = x_ptr + m[None, :].to(tl.int64) * x_stride
    w_N_ptr = w_ptr + row_N[:, None] * D
    if PDL and not FOR_NEXT:
        gdc_launch_dependents()
    if HEAD > 0:
        h = start + tl.arange(0, HEAD)
        head_NH = tl.load(w_N_ptr + h[None, :])
    if PDL:
        gdc_wait()
        if FOR_NEXT:
            gdc_launch_dependents()
    acc_NM = tl.zeros((N, M), dtype=tl.float32)
    for first in range(start + HEAD, end, K):
        w_NK = tl.load(w_N_ptr + (first + i)[None, :])
        x_KM = tl.load(x_M_ptr + (first + i)[:, None], mask=live_M, other=0.0)
        acc_NM = _dot(w_NK, x_KM, acc_NM, F32_DOT)
    if HEAD > 0:
        acc_NM = _dot(head_NH, tl.load(x_M_ptr + h[:, None], mask=live_M, other=0.0), acc_NM, F32_DOT)
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
    if not 0 < rows <= MOST_ROWS or inputs % cut.inputs or outputs % cut.outputs or cut.head % cut.inputs:
        return False
    run = divide_up(inputs // cut.inputs, cut.splits) * cut.inputs
    elems = cut.splits * outputs * _padded(rows) if cut.splits > 1 else 0
    shortest = inputs - (cut.splits - 1) * run
    return shortest >= cut.head and outputs // cut.outputs <= _MOST_TILES and elems <= _MOST_PLANE_ELEMS


def _padded(rows: int) -> int:
    return max(8, power_of_two(rows))


def linear_constants(
    rows: int, inputs: int, outputs: int, cut: Cut, *, bias: bool, for_next: bool = False, f32_dot: bool = INTERPRETED
) -> dict[str, Any]:
    """Compile-time constants of the kernel."""
    return {
        "D": inputs,
        "O": outputs,
        "M": _padded(rows),
        "N": cut.outputs,
        "K": cut.inputs,
        "S": cut.splits,
        "HEAD": cut.head,
        "FOR_NEXT": for_next,
        "BIAS": bias,
        "F32_DOT": f32_dot,
    }


def linear_few_rows(
    x_TD: torch.Tensor,
    weight_OD: torch.Tensor,
    bias_O: torch.Tensor | None,
    scratch: LinearScratch,
    cut: Cut,
    *,
    for_next: bool = False,
) -> torch.Tensor:
    """Returns (T, O) in x's dtype. ``for_next``: the next kernel may read x before it waits.

    Raises ValueError where shapes, strides or dtypes do not fit, or the product cannot be cut so.
    """
    rows, inputs = x_TD.shape
    outputs = len(weight_OD)
    if weight_OD.shape != (outputs, inputs) or not fits(rows, inputs, outputs, cut):
        raise ValueError(f"x {tuple(x_TD.shape)} and weight {tuple(weight_OD.shape)} do not fit {cut}")
    if x_TD.stride(1) != 1 or not weight_OD.is_contiguous() or x_TD.dtype != weight_OD.dtype:
        raise ValueError("x needs unit inner stride, the weight must be packed, both of one dtype")
    y = torch.empty((rows, outputs), dtype=x_TD.dtype, device=x_TD.device)
    linear_kernel[(outputs // cut.outputs * cut.splits,)](
        x_TD,
        weight_OD,
        y if bias_O is None else bias_O,
        y,
        scratch.planes_N,
        scratch.arrived_N,
        rows,
        x_TD.stride(0),
        **linear_constants(rows, inputs, outputs, cut, bias=bias_O is not None, for_next=for_next),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x_TD.device),
    )
    return y


def choose_cut(x_TD: torch.Tensor, weight_OD: torch.Tensor) -> Cut | None:
    """How to cut a product of half precision on a Hopper GPU; None where cuBLAS is to compute it."""
    if not hopper(weight_OD.device) or weight_OD.element_size() != 2:
        return None
    outputs, inputs = weight_OD.shape
    return resident_cut(len(x_TD), inputs, outputs, multiprocessors(weight_OD.device))


def resident_cut(rows: int, inputs: int, outputs: int, processors: int) -> Cut | None:
    """A cut whose programs are resident at once, if there is one: then all memory is asked for from the start, and
    the head of the next product's weights while the last sums of this one are on their way.

    What measured best on an H200: two programs a multiprocessor with four loads in flight; for fewest rows three with
    three; for more rows and a small weight one with five.
    """
    tiles, head = outputs // _OUTPUTS, _INPUTS * (2 if rows <= 16 else 1)
    if rows > 16 and inputs <= 4096 and 2 * tiles <= processors:
        cuts = [Cut(_OUTPUTS, _INPUTS, splits=2, stages=5, head=head)]
    else:
        most = (3 if rows <= 8 else 2) * processors
        some = [splits for splits in (8, 4, 2) if splits * tiles <= most]
        cuts = [Cut(_OUTPUTS, _INPUTS, n, 3 if 2 * processors < n * tiles <= most else 4, head) for n in (*some, 1)]
    return next((cut for cut in cuts if fits(rows, inputs, outputs, cut)), None)
