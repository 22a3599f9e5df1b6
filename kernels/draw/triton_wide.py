"""A token from the filtered distribution of a whole row, where its best few scores are not enough to know it.

Semantics: for each row n with settled[n] = 0, let the tokens be ordered by score, highest first, equal ones by id, and
p = exp(x - log_sum) their probabilities. With K = keep[n] (V: no limit), M = the mass of the first K (1 if K = V):

    kept  = the longest prefix of at most K tokens in which each has p >= min_p p[0] and, where top_p < 1, is preceded
            by less mass than top_p M; at least one token
    token = the first token of it up to which, itself included, the mass exceeds uniform times the mass of ``kept``

Nothing is sorted: scores are at most 0, so their bits order them, and each threshold is found bit by bit (31 passes
over the row). Rows that are settled cost one load. Masses are summed in fp64, in one fixed order.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_COUNT: Any = tl.constexpr(0)
_REACHES: Any = tl.constexpr(1)
_EXCEEDS: Any = tl.constexpr(2)
_LAST: Any = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _magnitude(x):
    """Bits of scores that are at most 0: larger for lower scores."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass_of(magnitude, log_sum):
    """The probability of one token of this magnitude."""
    return tl.exp(-magnitude.to(tl.float32, bitcast=True) - log_sum).to(tl.float64)


@triton.jit
def _upto(x_ptr, log_sum, magnitude, V: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens are of at most this magnitude, and their mass."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < V, other=float("-inf"))
        inside = (v < V) & (_magnitude(x) <= magnitude)
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(x - log_sum), 0.0).to(tl.float64)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _threshold(x_ptr, log_sum, number, mass, HOW: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The least magnitude up to which there are ``number`` tokens, or a mass that reaches or exceeds ``mass``."""
    least = (number * 0).to(tl.int32)
    for i in range(31):
        bit = (number * 0 + 1).to(tl.int32) << (30 - i)
        count, found = _upto(x_ptr, log_sum, least + (bit - 1), V, BLOCK)
        if HOW == _COUNT:
            enough = count >= number
        elif HOW == _REACHES:
            enough = found >= mass
        else:
            enough = found > mass
        least = tl.where(enough, least, least + bit)
    return least


@triton.jit
def wide_kernel(
    x_ptr,
    log_sum_ptr,
    settled_ptr,
    keep_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    tokens_ptr,
    x_stride,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row."""
    n = tl.program_id(0).to(tl.int64)
    if tl.load(settled_ptr + n) == 0:
        x_ptr += n * x_stride
        log_sum = tl.load(log_sum_ptr + n)
        keep = tl.load(keep_ptr + n).to(tl.int32)
        top_p, min_p = tl.load(top_p_ptr + n), tl.load(min_p_ptr + n)
        number = keep
        limit = top_p
        if keep < V:
            last = _threshold(x_ptr, log_sum, keep, top_p, _COUNT, V, BLOCK)
            before, mass = _upto(x_ptr, log_sum, last - 1, V, BLOCK)
            limit = top_p * (mass + (keep - before) * _mass_of(last, log_sum))
        if top_p < 1:
            last = _threshold(x_ptr, log_sum, keep, limit, _REACHES, V, BLOCK)
            before, mass = _upto(x_ptr, log_sum, last - 1, V, BLOCK)
            equal = _upto(x_ptr, log_sum, last, V, BLOCK)[0] - before
            share = (limit - mass) / tl.maximum(_mass_of(last, log_sum), 1e-300)
            number = tl.minimum(number, before + _clipped(tl.ceil(share), equal))
        if min_p > 0:
            number = tl.minimum(number, _at_least(x_ptr, log_sum, min_p, V, BLOCK))
        number = tl.maximum(number, 1)
        last = _threshold(x_ptr, log_sum, number, top_p, _COUNT, V, BLOCK)
        before, total = _upto(x_ptr, log_sum, last - 1, V, BLOCK)
        total += (number - before) * _mass_of(last, log_sum)
        target = tl.load(uniform_ptr + n) * total
        last = tl.minimum(last, _threshold(x_ptr, log_sum, number, target, _EXCEEDS, V, BLOCK))
        before, mass = _upto(x_ptr, log_sum, last - 1, V, BLOCK)
        equal = tl.minimum(_upto(x_ptr, log_sum, last, V, BLOCK)[0], number) - before
        share = (target - mass) / tl.maximum(_mass_of(last, log_sum), 1e-300)
        nth = _clipped(tl.floor(share) + 1, equal) - 1
        tl.store(tokens_ptr + n, _nth_equal(x_ptr, last, nth, V, BLOCK).to(tl.int64))


@triton.jit
def _clipped(share, most):
    """A count of at least 1 and at most ``most``."""
    return tl.minimum(tl.maximum(share, 1.0), most.to(tl.float64)).to(tl.int32)


@triton.jit
def _at_least(x_ptr, log_sum, min_p, V: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens whose probability is at least ``min_p`` times the best one's."""
    limit = min_p * _mass_of((min_p * 0).to(tl.int32), log_sum)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < V, other=float("-inf"))
        count += ((v < V) & (tl.exp(x - log_sum).to(tl.float64) >= limit)).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _nth_equal(x_ptr, magnitude, nth, V: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the nth token (from 0) of exactly this magnitude."""
    seen = nth * 0
    found = nth * 0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + v, mask=v < V, other=float("-inf"))
        equal = ((v < V) & (_magnitude(x) == magnitude)).to(tl.int32)
        place = seen + tl.cumsum(equal, axis=0) - 1
        found += tl.sum(tl.where((equal == 1) & (place == nth), v, 0), axis=0)
        seen += tl.sum(equal, axis=0)
    return found


def draw_wide(
    x_NV: torch.Tensor,
    log_sum_N: torch.Tensor,
    settled_N: torch.Tensor,
    keep_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
    uniform_N: torch.Tensor,
    tokens_N: torch.Tensor,
) -> None:
    """Write ``tokens_N`` (int64) of rows that are not settled (bool).

    ``x_NV`` fp32, each row's highest exactly 0; ``log_sum_N`` fp32 their logsumexp; ``keep_N`` int64, 1 to V;
    ``top_p_N``, ``min_p_N`` and ``uniform_N`` fp64. Raises ValueError where sizes, strides or dtypes do not fit.
    """
    rows, vocabulary = x_NV.shape
    numbers = (log_sum_N, settled_N, keep_N, top_p_N, min_p_N, uniform_N, tokens_N)
    if x_NV.stride(1) != 1 or any(t.shape != (rows,) or not t.is_contiguous() for t in numbers):
        raise ValueError(f"{tuple(x_NV.shape)} scores and {[tuple(t.shape) for t in numbers]} do not fit")
    types = (torch.float32, torch.bool, torch.int64, torch.float64, torch.float64, torch.float64, torch.int64)
    if x_NV.dtype != torch.float32 or tuple(t.dtype for t in numbers) != types:
        raise ValueError(f"{[t.dtype for t in (x_NV, *numbers)]} are not the dtypes")
    if rows:
        settled = settled_N.view(torch.uint8)
        args = (x_NV, log_sum_N, settled, keep_N, top_p_N, min_p_N, uniform_N, tokens_N, x_NV.stride(0))
        wide_kernel[(rows,)](*args, V=vocabulary, BLOCK=_BLOCK, num_warps=8)
