"""The decoder on a GPU: cuBLAS products, everything else in Triton kernels. Adapters' shares through the pool's tables.

Nothing here waits for the device or depends on what a step's numbers are, only on how many there are: a forward can be
captured in a CUDA graph.
"""

# T rows, X hidden size, D decodes, S sequences, P pages, N rows that are drawn from, V vocabulary

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import embedding

from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.model.linear import Linear, Plain
from stencilpress.engine.model.llama import DOWN, GATE_UP, OUT, QKV, LayerWeights, Weights
from stencilpress.engine.model.rope import inverse_frequencies
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.attention.triton_decode import decode_attention
from stencilpress.kernels.attention.triton_pages import KVLayout
from stencilpress.kernels.attention.triton_prefill import prefill_attention
from stencilpress.kernels.linear.triton_linear import LinearScratch, choose_cut, linear_few_rows
from stencilpress.kernels.norm.triton_rms_norm import rms_norm
from stencilpress.kernels.rope.triton_rope import rope_and_write_kv
from stencilpress.kernels.sgmv import cuda_sgmv
from stencilpress.kernels.sgmv.cuda_sgmv import room_is_free
from stencilpress.kernels.sgmv.triton_gate import gate_suits, sgmv_silu_mul
from stencilpress.kernels.sgmv.triton_sgmv import sgmv
from stencilpress.kernels.sgmv.triton_work import SgmvWork, listed_rows, resolve
from stencilpress.kernels.silu.triton_silu_mul import silu_mul

MOST_ROWS_ADDED = 1024
"""Of more rows, clearing and reading what the base's product is added to costs more than it gains."""
ATTENTION_GROUPS = 1 << QKV | 1 << OUT
ALL_GROUPS = ATTENTION_GROUPS | 1 << GATE_UP | 1 << DOWN


def covering_groups(groups: int) -> int:
    """Those of a graph that serves these groups: attention's alone, or all."""
    return ATTENTION_GROUPS if groups | ATTENTION_GROUPS == ATTENTION_GROUPS else ALL_GROUPS


@dataclass(frozen=True, slots=True)
class Adapted:
    """Which rows have adapters: loaded work lists of rows apart, and a bit for each group that they change.
    ``listed_T`` says which rows are in the last one, where its products may come before the base's."""

    works: tuple[SgmvWork, ...]
    groups: int
    listed_T: Tensor | None = None

    def changes(self, group: int) -> bool:
        return self.groups >> group & 1 == 1


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """One forward's numbers on the device, int32; engine/cuda/rows.py says what they are.

    ``splits`` is for how many runs a decode's positions are cut into. A row with slot -1 and length 0 is idle: it is
    computed and leaves nothing behind.
    """

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    lengths_D: Tensor
    pages_SP: Tensor
    splits: int
    pieces_N4: Tensor | None
    adapted: Adapted | None


class _Gating(NamedTuple):
    """Of a step whose adapters change the gate in blocks that suit: those, their rows, and the other adapters."""

    blocks: SgmvWork
    in_blocks_T: Tensor
    others: Adapted


def _gating(rows: DeviceRows) -> _Gating | None:
    if rows.adapted is None or not rows.adapted.changes(GATE_UP):
        return None
    works = rows.adapted.works
    blocks = next((work for work in works if gate_suits(work.tile)), None)
    if blocks is None:
        return None
    others = tuple(work for work in works if work is not blocks)
    return _Gating(blocks, listed_rows(blocks, len(rows.tokens_T)), replace(rows.adapted, works=others))


def _adds(linear: Linear, x_TD: Tensor) -> TypeGuard[Plain]:
    """Whether cuBLAS computes the product, and may add it to what is there at little cost."""
    few = len(x_TD) <= MOST_ROWS_ADDED
    return few and isinstance(linear, Plain) and linear.bias is None and choose_cut(x_TD, linear.weight) is None


class TritonDecoder:
    """The base model over one pool. It also runs on CPU tensors where kernels are interpreted."""

    def __init__(self, spec: ModelSpec, weights: Weights, memory: PoolMemory, max_model_len: int) -> None:
        self.spec = spec
        self.kv = KVLayout(memory.geometry.page_tokens, memory.geometry.page_elems, spec.num_kv_heads, spec.head_dim)
        self.pool = memory.flat
        self.shapes = memory.shapes
        self._weights = weights
        self._scratch = LinearScratch(self.pool.device)
        self._scale = spec.head_dim**-0.5
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angle_PF = torch.outer(positions, inverse_frequencies(spec.rope, spec.head_dim))
        self._cos, self._sin = angle_PF.cos().to(self.pool.device), angle_PF.sin().to(self.pool.device)

    def first_layer(self) -> TritonDecoder:
        """The same decoder with one layer only: it launches the same kernels."""
        decoder = copy(self)
        decoder._weights = replace(self._weights, layers=self._weights.layers[:1])  # noqa: SLF001
        return decoder

    @property
    def entries(self) -> int:
        """Entries of a slice table."""
        return self.spec.num_layers * len(self.shapes)

    def forward(self, rows: DeviceRows) -> tuple[Tensor, Tensor]:
        """Run all layers, writing keys and values to the pool. Returns, for :meth:`logits`, two (T, X) that add up to
        the last layer's output."""
        for work in rows.adapted.works if rows.adapted is not None else ():
            resolve(work, self.pool)
        residual_TX = embedding(rows.tokens_T, self._weights.embedding)
        if rows.adapted is not None:
            rows = replace(rows, adapted=self._ordered(rows.adapted, residual_TX))
        gating = _gating(rows)
        mixed_TX = self._mixed(rows, residual_TX)
        x_TX: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            normed_TX = self._norm(x_TX, layer.input_norm, residual_TX)
            self._attention(normed_TX, layer, index, rows, mixed_TX)
            x_TX = self._adapted(layer.o, mixed_TX, rows.adapted, index, OUT)
            normed_TX = self._norm(x_TX, layer.mlp_norm, residual_TX)
            inner = self._gated(layer.gate_up, normed_TX, rows.adapted, index, gating)
            x_TX = self._adapted(layer.down, inner, rows.adapted, index, DOWN)
        assert x_TX is not None, "a model has layers"  # noqa: S101
        return x_TX, residual_TX

    def logits(self, x_NX: Tensor, residual_NX: Tensor) -> Tensor:
        """(N, V) in the served dtype, from rows of :meth:`forward`'s results. Overwrites ``residual_NX``."""
        return self._product(self._weights.head, self._norm(x_NX, self._weights.final_norm, residual_NX))[0]

    def _norm(self, x_TX: Tensor | None, weight_X: Tensor, residual_TX: Tensor) -> Tensor:
        if x_TX is None:
            return rms_norm(residual_TX, weight_X, self.spec.rms_norm_eps)
        return rms_norm(x_TX, weight_X, self.spec.rms_norm_eps, residual_TX)

    def _mixed(self, rows: DeviceRows, like_TX: Tensor) -> Tensor:
        """What attention writes, layer after layer. Beside prompts may be idle rows that nothing writes: zeros."""
        shape = len(rows.tokens_T), self.spec.q_size
        return like_TX.new_empty(shape) if rows.pieces_N4 is None else like_TX.new_zeros(shape)

    def _attention(
        self, normed_TX: Tensor, layer: LayerWeights, index: int, rows: DeviceRows, mixed_TX: Tensor
    ) -> None:
        qkv = self._adapted(layer.qkv, normed_TX, rows.adapted, index, QKV)
        spec, kv, pages = self.spec, self.kv, rows.pages_SP
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm, layer.k_norm, spec.rms_norm_eps)
        rope_and_write_kv(
            qkv, spec.num_heads, self.pool, rows.positions_T, rows.slots_T, self._cos, self._sin, index, kv, norms
        )
        q_THD = qkv[:, : spec.q_size].view(len(qkv), spec.num_heads, spec.head_dim)
        decodes, scale = len(rows.lengths_D), self._scale
        out_THD = mixed_TX.view(q_THD.shape)
        beside = rows.pieces_N4 is not None and decodes > 0 and rows.splits == 1
        if decodes:
            q_DHD, out_DHD, lengths, tables = q_THD[:decodes], out_THD[:decodes], rows.lengths_D, pages[:decodes]
            decode_attention(q_DHD, self.pool, tables, lengths, index, kv, rows.splits, scale, out_DHD, for_next=beside)
        if rows.pieces_N4 is not None:
            prefill_attention(q_THD, self.pool, pages, rows.pieces_N4, out_THD, index, kv, scale, q_done=beside)

    def _gated(
        self, linear: Linear, x_TX: Tensor, adapted: Adapted | None, layer: int, gating: _Gating | None
    ) -> Tensor:
        """The gate of gate and up projections with the adapters' share."""
        if gating is None:
            return silu_mul(self._adapted(linear, x_TX, adapted, layer, GATE_UP))
        y_TO = self._adapted(linear, x_TX, gating.others, layer, GATE_UP)
        entry, shape = layer * len(self.shapes) + GATE_UP, self.shapes[GATE_UP]
        return sgmv_silu_mul(y_TO, x_TX, self.pool, gating.blocks, entry, shape, gating.in_blocks_T)

    def _ordered(self, adapted: Adapted, residual_TX: Tensor) -> Adapted:
        """Adapters of single rows before the base's product where that adds to what is there: their weights are on
        their way while the kernel before still runs, which cuBLAS's kernels do not allow."""
        single = adapted.works[-1]
        free = room_is_free(self.pool, self.shapes, single.tile, len(single.blocks_B4), single.max_items)
        if not free or not _adds(self._weights.layers[0].qkv, residual_TX):
            return adapted
        return replace(adapted, listed_T=listed_rows(single, len(residual_TX)))

    def _adapted(self, linear: Linear, x_TD: Tensor, adapted: Adapted | None, layer: int, group: int) -> Tensor:
        """The base's product and the adapters' share of one (layer, group)."""
        if adapted is None or not adapted.changes(group):
            return self._product(linear, x_TD)[0]
        entry, shape, works = layer * len(self.shapes) + group, self.shapes[group], adapted.works
        if adapted.listed_T is not None and works and _adds(linear, x_TD):
            y_TO = x_TD.new_empty(len(x_TD), sum(shape.out_features))
            cuda_sgmv.rows(y_TO, x_TD, self.pool, works[-1], entry, shape, adapted.listed_T)
            torch.addmm(y_TO, x_TD, linear.weight.T, out=y_TO)
            works, x_done = works[:-1], False
        else:
            y_TO, x_done = self._product(linear, x_TD, for_next=True)
        for work in works:
            sgmv(y_TO, x_TD, self.pool, work, entry, shape, x_done=x_done)
            x_done = False
        return y_TO

    def _product(self, linear: Linear, x_TD: Tensor, *, for_next: bool = False) -> tuple[Tensor, bool]:
        """The product, and whether the next kernel may read x before it waits."""
        if isinstance(linear, Plain):
            cut = choose_cut(x_TD, linear.weight)
            if cut is not None:
                y_TO = linear_few_rows(x_TD, linear.weight, linear.bias, self._scratch, cut, for_next=for_next)
                return y_TO, for_next
        return linear(x_TD), False
