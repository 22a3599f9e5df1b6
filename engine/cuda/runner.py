"""Runs plans on a GPU: steps of decodes as graphs, others eagerly; one wait for the results ends each."""

# T rows, N rows that are drawn from, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from stencilpress.engine.cuda.eager import EagerSteps
from stencilpress.engine.cuda.graphs import DecodeGraphs, best_tokens
from stencilpress.engine.cuda.inputs import Inputs, most_words
from stencilpress.engine.cuda.rows import RowBuilder, StepRows
from stencilpress.engine.limits import Limits
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.model.llama import Weights
from stencilpress.engine.model.triton_llama import TritonDecoder
from stencilpress.engine.plan import Sampled, StepPlan
from stencilpress.engine.sampler import only_best, sample
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.sgmv.views import AdapterView


class CudaRunner:
    """The decoder over a pool. ``adapter`` gives the view of an adapter that is placed, and raises for any other.

    Call :meth:`warm` before the first step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        memory: PoolMemory,
        adapter: Callable[[str], AdapterView],
        limits: Limits,
        max_lora_rank: int,
    ) -> None:
        device, max_pages = memory.device, limits.pages_for(limits.max_model_len)
        heads_per_kv_head = spec.num_heads // spec.num_kv_heads
        decoder = TritonDecoder(spec, weights, memory, limits.max_model_len)
        inputs = Inputs(
            most_words(
                tokens=limits.max_num_batched_tokens,
                seats=limits.seats,
                max_pages=max_pages,
                max_rank=max_lora_rank,
                heads_per_kv_head=heads_per_kv_head,
            ),
            device,
        )
        self._adapter = adapter
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._rows = RowBuilder(
            seats=limits.seats,
            max_pages=max_pages,
            page_tokens=limits.page_tokens,
            heads_per_kv_head=heads_per_kv_head,
            elem_bytes=memory.geometry.dtype_bytes,
        )
        self._eager = EagerSteps(decoder, inputs)
        self._graphs = DecodeGraphs(
            decoder,
            inputs,
            seats=limits.seats,
            max_model_len=limits.max_model_len,
            max_pages=max_pages,
            max_rank=max_lora_rank,
        )
        self._ids_N = torch.zeros(limits.seats, dtype=torch.int32, pin_memory=self._stream is not None)

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile and capture what most steps need. Where kernels are interpreted there is nothing to do."""
        if self._stream is None:
            return
        torch.cuda.synchronize()  # weights came on another stream
        with self._own_stream():
            self._eager.warm()
            self._graphs.warm()
        self._wait()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute a plan. One answer per chunk with a draw, in the plan's order."""
        rows = self._rows.build(plan, self._adapter)
        with self._own_stream():
            if len(rows.pieces_N4) or len(rows.tokens_T) > self._graphs.largest:
                logits_NV = self._eager.logits(rows)
                if rows.draws and only_best(rows.draws):
                    return self._read(best_tokens(logits_NV), range(len(rows.draws)), rows)
            else:
                self._graphs.run(rows)
                if only_best(rows.draws):
                    return self._read(self._graphs.tokens_B[: len(rows.tokens_T)], rows.draw_rows.tolist(), rows)
                logits_NV = self._graphs.logits_BV[rows.draw_rows]
            sampled = sample(logits_NV, rows.keys, rows.draws) if rows.draws else []
        self._wait()  # also after a step without draws: its pages may go to others now
        return sampled

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute a plan eagerly and return the logits of every row (T, V), decodes first; nothing is drawn."""
        with self._own_stream():
            logits_TV = self._eager.every_logit(self._rows.build(plan, self._adapter))
        self._wait()
        return logits_TV

    def _read(self, tokens_N: Tensor, places: Sequence[int], rows: StepRows) -> list[Sampled]:
        """Wait for the tokens; ``places[i]`` is where the one for ``rows.keys[i]`` lies."""
        ids_N = self._ids_N[: len(tokens_N)]
        ids_N.copy_(tokens_N, non_blocking=True)
        self._wait()
        ids = ids_N.tolist()
        return [Sampled(key, ids[place]) for key, place in zip(rows.keys, places, strict=True)]

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
