"""Paged attention of a step on a CPU: decodes by numba, read where they lie; longer chunks as the reference does."""

# T rows, X = (H + 2 K) D or H D features, B decodes, N pages, D head dimension, P positions

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stencilpress.kernels.attention import Span
from stencilpress.kernels.attention.numba_decode import attend_decodes, rotate_and_write
from stencilpress.kernels.attention.reference import Chunk, Index, PagedKV, attend_chunk, plan_chunk
from stencilpress.kernels.numba_bits import Elements, elements

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepSpans:
    """What every layer of one step needs: where each token is and goes, the decodes, the longer chunks."""

    positions_T: Index
    write_rows_T: Index
    decode_rows_B: Index
    lengths_B: Index
    pages_BN: Index
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """What the rotation needs to know. ``cos`` and ``sin`` are (P, D / 2); a norm of no elements is absent."""

    count: int
    cos_PD: Elements
    sin_PD: Elements
    eps: float


def plan_spans(spans: Sequence[Span], kv: PagedKV, dtype: torch.dtype) -> StepSpans:
    """Lay out the spans of one step."""
    decodes = [span for span in spans if span.length == 1]
    pages_BN = np.zeros((len(decodes), max((len(span.pages) for span in decodes), default=0)), dtype=np.int64)
    for b, span in enumerate(decodes):
        pages_BN[b, : len(span.pages)] = span.pages
    positions = [np.arange(span.start, span.start + span.length) for span in sorted(spans, key=lambda span: span.row)]
    return StepSpans(
        positions_T=np.concatenate(positions),
        write_rows_T=kv.write_rows(spans),
        decode_rows_B=np.array([span.row for span in decodes], dtype=np.int64),
        lengths_B=np.array([span.start + 1 for span in decodes], dtype=np.int64),
        pages_BN=pages_BN,
        chunks=tuple(plan_chunk(span, kv, dtype, CPU) for span in spans if span.length > 1),
    )


def attend_spans(
    qkv_TX: Tensor,
    norms: tuple[Elements, Elements],
    heads: Heads,
    kv: PagedKV,
    layer: int,
    plan: StepSpans,
    out_TX: Tensor,
) -> None:
    """Norm and rotate q and k in place, write k and v to the pool, attend, and write the result to ``out_TX``."""
    qkv, pool_E, first_row = elements(qkv_TX), kv.elements, kv.first_row(layer)
    rotate_and_write(
        qkv, heads.count, *norms, heads.eps, heads.cos_PD, heads.sin_PD, plan.positions_T,
        pool_E, plan.write_rows_T, first_row, kv.page_tokens,
    )  # fmt: skip
    if len(plan.decode_rows_B):
        attend_decodes(
            qkv, plan.decode_rows_B, plan.pages_BN, plan.lengths_B,
            pool_E, kv.page_rows, first_row, kv.page_tokens, kv.kv_heads, kv.head_dim, elements(out_TX),
        )  # fmt: skip
    sizes = [heads.count * kv.head_dim, kv.kv_heads * kv.head_dim, kv.kv_heads * kv.head_dim]
    for chunk in plan.chunks:
        rows = slice(chunk.first, chunk.end)
        q_CX, k_CX, v_CX = torch.split(qkv_TX[rows], sizes, 1)
        out_TX[rows] = attend_chunk(q_CX, k_CX, v_CX, kv, layer, chunk)
