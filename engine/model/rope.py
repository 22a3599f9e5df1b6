"""Rotary position embedding: a table made once, applied in place to queries and keys together."""

# T rows, N heads, D head dimension, P positions

from __future__ import annotations

import math

import torch
from torch import Tensor

from stencilpress.engine.spec import Rope


class RotaryTable:
    """cos and sin of every position below ``positions``, in the activations' dtype, computed in fp32."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angle_PD = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        sin = angle_PD.sin()
        self._cos = angle_PD.cos().view(positions, 1, 1, -1).to(device, dtype)
        self._sin = torch.stack((-sin, sin), 1).unsqueeze(1).to(device, dtype)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """The factors for the rows of one step: cos (T, 1, 1, D / 2) and signed sin (T, 1, 2, D / 2)."""
        return self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)


def rotate(x_TND: Tensor, factors: tuple[Tensor, Tensor]) -> None:
    """Rotate pairs (i, i + D / 2) of each head in place (arXiv 2104.09864, in the half-split order of Llama)."""
    cos, sin = factors
    halves = x_TND.view(*x_TND.shape[:2], 2, -1)
    swapped = halves.flip(2)
    halves.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair, fp32 (D / 2,).

    ``llama3`` divides those whose wavelength exceeds the trained context by ``factor``, leaves the short ones, and
    interpolates between (Llama 3.1's ``apply_scaling``).
    """
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "default":
        return frequency
    turns = rope.original_max_position * frequency / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequency / rope.factor, frequency, smooth.clamp(0, 1))
