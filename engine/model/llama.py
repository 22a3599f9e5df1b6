"""The weights of Llama, Mistral, Qwen2 and Qwen3: one structure for all of them.

The families differ by a bias on q, k and v, a norm on the heads of q and k, and a tied output head; all of that is in
the weights.
"""

# X hidden size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stencilpress.engine.model.linear import Linear
from stencilpress.engine.model.threads import Threads

QKV, OUT, GATE_UP, DOWN = range(4)
"""Indices of :attr:`ModelSpec.groups`."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. q, k, v are one product, gate and up another; the head norms are Qwen3's."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole base model on its device. ``embedding`` is (V, X); ``threads`` is what the layers' products share."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    threads: Threads
