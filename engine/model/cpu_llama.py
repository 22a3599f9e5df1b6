"""The decoder on a CPU: one forward over the rows of a mixed batch. Activations keep the served dtype.

Products are PyTorch's. What lies between them is numba's: an eager operator on a few rows takes longer to call than to
run.
"""

# T rows, X hidden size, N rows that are drawn from, V vocabulary, D head dimension, P positions

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding

from stencilpress.engine.model.llama import DOWN, GATE_UP, OUT, QKV, LayerWeights, Weights
from stencilpress.engine.model.rope import rotary_factors
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.attention.cpu import Heads, StepSpans, attend_spans
from stencilpress.kernels.attention.reference import PagedKV
from stencilpress.kernels.norm.numba_rms_norm import rms_norm
from stencilpress.kernels.numba_bits import Elements, elements
from stencilpress.kernels.silu.numba_silu_mul import silu_mul


class Deltas(Protocol):
    """What adapters add in one step; see ``kernels/sgmv``."""

    def add(self, y_TO: Tensor, x_TD: Tensor, layer: int, group: int) -> None: ...


class Decoder:
    """The base model; ``forward`` takes everything that changes between steps."""

    def __init__(self, spec: ModelSpec, weights: Weights, max_model_len: int) -> None:
        self.spec = spec
        self.dtype = weights.embedding.dtype
        self._weights = weights
        cos_PD, sin_PD = rotary_factors(spec.rope, spec.head_dim, max_model_len, self.dtype)
        self._heads = Heads(spec.num_heads, elements(cos_PD), elements(sin_PD), spec.rms_norm_eps)
        self._head_norms = [(self._optional(w.q_norm), self._optional(w.k_norm)) for w in weights.layers]

    def forward(self, tokens_T: Tensor, kv: PagedKV, spans: StepSpans, deltas: Deltas | None) -> Tensor:
        """Run all layers, writing keys and values to ``kv``. Returns the last layer's output (T, X), not yet normed."""
        self._weights.threads.begin(len(tokens_T))
        x_TX = embedding(tokens_T, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            x_TX = self._attention(x_TX, layer, index, kv, spans, deltas)
            x_TX = self._mlp(x_TX, layer, index, deltas)
        return x_TX

    def logits(self, x_NX: Tensor) -> Tensor:
        """(N, V) in the served dtype, from rows of :meth:`forward`'s result."""
        return self._weights.head(self._norm(x_NX, self._weights.final_norm))

    def _attention(
        self, x_TX: Tensor, layer: LayerWeights, index: int, kv: PagedKV, spans: StepSpans, deltas: Deltas | None
    ) -> Tensor:
        normed = self._norm(x_TX, layer.input_norm)
        qkv = layer.qkv(normed)
        if deltas is not None:
            deltas.add(qkv, normed, index, QKV)
        mixed = qkv.new_empty(len(qkv), self.spec.q_size)
        attend_spans(qkv, self._head_norms[index], self._heads, kv, index, spans, mixed)
        out = layer.o.add(mixed, x_TX)
        if deltas is not None:
            deltas.add(out, mixed, index, OUT)
        return out

    def _mlp(self, x_TX: Tensor, layer: LayerWeights, index: int, deltas: Deltas | None) -> Tensor:
        normed = self._norm(x_TX, layer.mlp_norm)
        gate_up = layer.gate_up(normed)
        if deltas is not None:
            deltas.add(gate_up, normed, index, GATE_UP)
        inner = gate_up.new_empty(len(gate_up), self.spec.intermediate_size)
        silu_mul(elements(gate_up), elements(inner))
        out = layer.down.add(inner, x_TX)
        if deltas is not None:
            deltas.add(out, inner, index, DOWN)
        return out

    def _norm(self, x_TX: Tensor, weight_X: Tensor) -> Tensor:
        normed = torch.empty_like(x_TX)
        rms_norm(elements(x_TX), elements(weight_X), self.spec.rms_norm_eps, elements(normed))
        return normed

    def _optional(self, norm_D: Tensor | None) -> Elements:
        return elements(torch.empty(0, dtype=self.dtype) if norm_D is None else norm_D)
