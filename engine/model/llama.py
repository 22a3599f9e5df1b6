"""The decoder of Llama, Mistral, Qwen2 and Qwen3: one forward over the rows of a mixed batch.

The families differ by a bias on q, k and v, a norm on the heads of q and k, and a tied output head; all of that is in
the weights. Activations keep the served dtype; norms accumulate in fp32.
"""

# T rows, X hidden size, N rows that are drawn from, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from stencilpress.engine.model.linear import Linear
from stencilpress.engine.model.rope import RotaryTable, rotate
from stencilpress.engine.model.threads import Threads
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.attention.reference import AttentionPlan, PagedKV, attend

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


class Deltas(Protocol):
    """What adapters add in one step; see ``kernels/sgmv``."""

    def add(self, y_TO: Tensor, x_TD: Tensor, layer: int, group: int) -> None: ...


class Decoder:
    """The base model; ``forward`` takes everything that changes between steps."""

    def __init__(self, spec: ModelSpec, weights: Weights, max_model_len: int) -> None:
        self.spec = spec
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._weights = weights
        self._rotary = RotaryTable(spec.rope, spec.head_dim, max_model_len, self.dtype, self.device)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, kv: PagedKV, attention: AttentionPlan, deltas: Deltas | None
    ) -> Tensor:
        """Run all layers, writing keys and values to ``kv``. Returns the last layer's output (T, X), not yet normed."""
        self._weights.threads.begin(len(tokens_T), attention.positions, short_operations=deltas is not None)
        factors = self._rotary.at(positions_T)
        x_TX = embedding(tokens_T, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            x_TX = self._attention(x_TX, layer, index, factors, kv, attention, deltas)
            x_TX = self._mlp(x_TX, layer, index, deltas)
        return x_TX

    def logits(self, x_NX: Tensor) -> Tensor:
        """(N, V) in the served dtype, from rows of :meth:`forward`'s result."""
        return self._weights.head(self._norm(x_NX, self._weights.final_norm))

    def _attention(
        self,
        x_TX: Tensor,
        layer: LayerWeights,
        index: int,
        factors: tuple[Tensor, Tensor],
        kv: PagedKV,
        attention: AttentionPlan,
        deltas: Deltas | None,
    ) -> Tensor:
        normed = self._norm(x_TX, layer.input_norm)
        qkv = layer.qkv(normed)
        if deltas is not None:
            deltas.add(qkv, normed, index, QKV)
        q, k, v = self._rotated(qkv, layer, factors)
        mixed = attend(q, k, v, kv, index, attention)
        out = layer.o.add(mixed, x_TX)
        if deltas is not None:
            deltas.add(out, mixed, index, OUT)
        return out

    def _rotated(self, qkv: Tensor, layer: LayerWeights, factors: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        """q, k and v as views of ``qkv``, q and k normed and rotated in place."""
        spec = self.spec
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        q_heads, k_heads, _ = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        for rows, weight in ((q_heads, layer.q_norm), (k_heads, layer.k_norm)):
            if weight is not None:
                rows.copy_(self._norm(rows, weight))
        rotate(heads[:, : spec.num_heads + spec.num_kv_heads], factors)
        return torch.split(qkv, [spec.q_size, spec.kv_size, spec.kv_size], 1)

    def _mlp(self, x_TX: Tensor, layer: LayerWeights, index: int, deltas: Deltas | None) -> Tensor:
        normed = self._norm(x_TX, layer.mlp_norm)
        gate_up = layer.gate_up(normed)
        if deltas is not None:
            deltas.add(gate_up, normed, index, GATE_UP)
        gate, up = gate_up.chunk(2, dim=1)
        inner = silu(gate).mul_(up)
        out = layer.down.add(inner, x_TX)
        if deltas is not None:
            deltas.add(out, inner, index, DOWN)
        return out

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.spec.rms_norm_eps)
