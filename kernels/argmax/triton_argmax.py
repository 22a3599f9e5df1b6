"""The most likely token of each row of logits, left where the next step looks for it.

Semantics: with best[n] = max_v x[n, v],

    token[n] = min { v : x[n, v] = best[n] }    and    last[seats[n]] = token[n]

where best[n] is finite; -1 where it is not: a row with NaN or +inf in it, or with nothing but -inf.

Legend: N rows, V vocabulary, P parts that a row is cut into, S seats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stencilpress.kernels.triton_launch import divide_up, launch_options, power_of_two

_BLOCK = 4096


@triton.jit
def parts_kernel(x_ptr, best_ptr, token_ptr, x_stride, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One part of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = p * BLOCK + tl.arange(0, BLOCK)
    x_V = tl.load(x_ptr + n * x_stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    x_V = tl.where(x_V == x_V, x_V, float("inf"))
    best = tl.max(x_V, axis=0)
    place = n * tl.num_programs(1) + p
    tl.store(best_ptr + place, best)
    tl.store(token_ptr + place, tl.min(tl.where(x_V == best, v, V), axis=0))


@triton.jit
def pick_kernel(
    best_ptr, token_ptr, seats_ptr, out_ptr, last_ptr, P: tl.constexpr, PP: tl.constexpr, PDL: tl.constexpr
):
    """The best of a row's parts."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n, p = tl.program_id(0), tl.arange(0, PP)
    best_P = tl.load(best_ptr + n * P + p, mask=p < P, other=float("-inf"))
    token_P = tl.load(token_ptr + n * P + p, mask=p < P, other=2147483647)
    best = tl.max(best_P, axis=0)
    token = tl.min(tl.where(best_P == best, token_P, 2147483647), axis=0)
    token = tl.where(tl.abs(best) < float("inf"), token, -1)
    tl.store(out_ptr + n, token)
    tl.store(last_ptr + tl.load(seats_ptr + n), token)


def best_tokens(x_NV: torch.Tensor, seats_N: torch.Tensor, out_N: torch.Tensor, last_S: torch.Tensor) -> None:
    """Write ``out_N`` and, at ``seats_N``, ``last_S``, all int32. Rows of one seat leave any of their tokens there.

    Raises ValueError where sizes or strides do not fit.
    """
    rows, vocabulary = x_NV.shape
    if x_NV.stride(1) != 1 or len(seats_N) != rows or len(out_N) != rows:
        raise ValueError(f"{tuple(x_NV.shape)} logits, {len(seats_N)} seats and {len(out_N)} tokens do not fit")
    if rows == 0:
        return
    parts = divide_up(vocabulary, _BLOCK)
    best = torch.empty((rows, parts), dtype=torch.float32, device=x_NV.device)
    token = torch.empty((rows, parts), dtype=torch.int32, device=x_NV.device)
    options = launch_options(x_NV.device)
    parts_kernel[(rows, parts)](x_NV, best, token, x_NV.stride(0), V=vocabulary, BLOCK=_BLOCK, num_warps=4, **options)
    padded = power_of_two(parts)
    pick_kernel[(rows,)](best, token, seats_N, out_N, last_S, P=parts, PP=padded, num_warps=1, **options)
