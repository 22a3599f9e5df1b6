"""What numba lacks for kernels on a CPU: 16-bit floats, which numpy sees as their bits, and an exp that vectorises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from torch import Tensor

Elements = npt.NDArray[np.generic]
"""float32, or the bits of bfloat16 as uint16, or of float16 as int16."""

FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, so that they run in vectors; NaN and infinity keep their meaning."""

jit = njit(cache=True, fastmath=FAST, error_model="numpy", nogil=True)
inline = njit(fastmath=FAST, error_model="numpy", inline="always")

_I16, _I32, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()
_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def elements(tensor: Tensor) -> Elements:
    """A tensor on the CPU as the kernels take it, sharing its memory."""
    bits = _BITS.get(tensor.dtype)
    array: Elements = (tensor if bits is None else tensor.view(bits)).numpy()
    return array


def _generated(make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A generator of LLVM instructions as numba wants it, from one of the first argument alone."""
    return lambda _context, builder, _signature, args: make(builder, args[0])


def _same(_builder: Any, x: Any) -> Any:
    return x


def _from_bfloat16(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(x, _I32), _I32(16)), _F32)


def _from_float16(builder: Any, x: Any) -> Any:
    return builder.fpext(builder.bitcast(x, _F16), _F32)


def _to_bfloat16(builder: Any, x: Any) -> Any:
    bits = builder.bitcast(x, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(builder.add(bits, odd), _I32(0x7FFF))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.trunc(builder.lshr(builder.select(is_nan, _I32(0x7FC00000), rounded), _I32(16)), _I16)


def _to_float16(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.fptrunc(x, _F16), _I16)


def _power(builder: Any, exponent: Any) -> Any:
    return builder.bitcast(builder.shl(builder.add(exponent, _I32(127)), _I32(23)), _F32)


_WIDEN = {types.float32: _same, types.uint16: _from_bfloat16, types.int16: _from_float16}
_NARROW = {types.float32: _same, types.uint16: _to_bfloat16, types.int16: _to_float16}


@intrinsic
def widen(_typing: Any, value: Any) -> Any:
    """An element of :data:`Elements` as float32."""
    if value not in _WIDEN:
        raise TypingError(f"elements are float32, uint16 or int16, not {value}")
    return types.float32(value), _generated(_WIDEN[value])


@intrinsic
def narrow(_typing: Any, value: Any, like: Any) -> Any:
    """A float32 as an element of array ``like``, rounded to the nearest, ties to even; NaN stays NaN."""
    if value != types.float32 or like.dtype not in _NARROW:
        raise TypingError(f"float32 is narrowed to float32, uint16 or int16, not {value} to {like.dtype}")
    return like.dtype(value, like), _generated(_NARROW[like.dtype])


@intrinsic
def _power_of_two(_typing: Any, exponent: Any) -> Any:
    """2 ** exponent for an int32 in -126 .. 127."""
    if exponent != types.int32:
        raise TypingError(f"an exponent is an int32, not {exponent}")
    return types.float32(exponent), _generated(_power)


@inline
def exp(x):
    """e ** x in float32 within 2e-7 of itself for x <= 88; below -87 it is that of -87. NaN stays NaN.

    The polynomial is Cephes' ``expf`` (Moshier 1992).
    """
    t = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(t * np.float32(1.44269504) + np.float32(0.5))
    r = t - n * np.float32(0.69314718)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = (p * r * r + r + np.float32(1.0)) * _power_of_two(np.int32(n))
    return x if x != x else y
