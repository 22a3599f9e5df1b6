"""From a plan to what the forward on a CPU takes: token ids, where keys and values lie, who adapts which rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.plan import Draw, RequestKey, StepPlan
from stencilpress.kernels.attention import Span
from stencilpress.kernels.attention.cpu import StepSpans, plan_spans
from stencilpress.kernels.sgmv.batched import Deltas, Piece
from stencilpress.kernels.sgmv.views import AdapterView


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward over T rows. Row ``draw_rows[i]`` draws for ``keys[i]`` by ``draws[i]``; the order is the plan's."""

    tokens: Tensor
    spans: StepSpans
    deltas: Deltas | None
    draw_rows: tuple[int, ...]
    keys: tuple[RequestKey, ...]
    draws: tuple[Draw, ...]


def make_batch(
    plan: StepPlan, memory: PoolMemory, adapter: Callable[[str], AdapterView], last: Deltas | None = None
) -> Batch:
    """Lay a plan out as rows, segment by segment. ``adapter`` gives the view of a placed adapter.

    ``last`` are the deltas of the step before: they serve again if the same adapters have the same rows.
    """
    tokens: list[int] = []
    spans: list[Span] = []
    pieces: list[Piece] = []
    drawing: list[tuple[int, RequestKey, Draw]] = []
    for segment in plan.segments:
        first = len(tokens)
        for chunk in segment.chunks:
            spans.append(Span(len(tokens), chunk.start, len(chunk.tokens), chunk.pages))
            tokens.extend(chunk.tokens)
            if chunk.draw is not None:
                drawing.append((len(tokens) - 1, chunk.key, chunk.draw))
        if segment.adapter is not None:
            pieces.append(Piece(first, len(tokens), adapter(segment.adapter)))
    return Batch(
        tokens=torch.tensor(tokens),
        spans=plan_spans(spans, memory.kv, memory.flat.dtype),
        deltas=_deltas(pieces, memory, last),
        draw_rows=tuple(row for row, _, _ in drawing),
        keys=tuple(key for _, key, _ in drawing),
        draws=tuple(draw for _, _, draw in drawing),
    )


def _deltas(pieces: list[Piece], memory: PoolMemory, last: Deltas | None) -> Deltas | None:
    if not pieces:
        return None
    if last is not None and last.pieces == pieces:
        return last
    return Deltas(pieces, memory.kv.elements, memory.layers, memory.shapes)
