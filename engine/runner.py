"""Runs one plan on the CPU: forward, logits of the rows that draw, sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stencilpress.engine.batch import Batch, make_batch
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.model.cpu_llama import Decoder
from stencilpress.engine.plan import Chunk, Sampled, Segment, StepPlan
from stencilpress.engine.sampler import sample
from stencilpress.kernels.sgmv.batched import Deltas
from stencilpress.kernels.sgmv.table import ENTRY_WORDS
from stencilpress.kernels.sgmv.views import AdapterView


class Runner:
    """A decoder over a pool. ``adapter`` gives the view of an adapter that is placed, and raises for any other."""

    def __init__(self, decoder: Decoder, memory: PoolMemory, adapter: Callable[[str], AdapterView]) -> None:
        self._decoder = decoder
        self._memory = memory
        self._adapter = adapter
        self._last_deltas: Deltas | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute a plan. One answer per chunk with a draw, in the plan's order."""
        batch = self._batch(plan)
        hidden_TX = self._forward(batch)
        if not batch.draws:
            return []
        return sample(self._decoder.logits(_rows(hidden_TX, batch.draw_rows)), batch.keys, batch.draws)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute a plan and return the logits of every row (T, V), in the served dtype; nothing is drawn."""
        return self._decoder.logits(self._forward(self._batch(plan)))

    def warm(self) -> None:
        """Have everything compiled that a step may need. Call it before the first: it writes to page 0."""
        table = np.zeros(ENTRY_WORDS * self._memory.layers * len(self._memory.shapes), dtype=np.int64)
        idle = AdapterView(0, 0, (1 << len(self._memory.shapes)) - 1, (), table)
        decode, chunk = Chunk((0, 0), 0, 0, (0,), (0,), None), Chunk((0, 1), 1, 0, (0, 0), (0,), None)
        warming = Runner(self._decoder, self._memory, lambda _: idle)
        warming.run(StepPlan(0, (Segment("", (decode, chunk)),)))

    def _batch(self, plan: StepPlan) -> Batch:
        batch = make_batch(plan, self._memory, self._adapter, self._last_deltas)
        self._last_deltas = batch.deltas
        return batch

    def _forward(self, batch: Batch) -> Tensor:
        return self._decoder.forward(batch.tokens, self._memory.kv, batch.spans, batch.deltas)


def _rows(hidden_TX: Tensor, rows: tuple[int, ...]) -> Tensor:
    if len(rows) == len(hidden_TX):
        return hidden_TX
    return hidden_TX.index_select(0, torch.tensor(rows))
