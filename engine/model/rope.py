"""Rotary position embedding: the table, made once."""

# D head dimension, P positions

from __future__ import annotations

import math

import torch
from torch import Tensor

from stencilpress.engine.spec import Rope


def rotary_factors(rope: Rope, head_dim: int, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position below ``positions``, (P, D / 2) in the activations' dtype, computed in fp32.

    They rotate pairs (i, i + D / 2) of each head (arXiv 2104.09864, in the half-split order of Llama).
    """
    angle_PD = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return angle_PD.cos().to(dtype), angle_PD.sin().to(dtype)


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
