"""Runs plans on a GPU: steps of decodes as graphs, others eagerly; one wait for the results ends each."""

# T rows, N rows that are drawn from, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from stencilpress.engine.cuda.eager import EagerSteps
from stencilpress.engine.cuda.feedback import Feedback
from stencilpress.engine.cuda.graphs import DecodeGraphs
from stencilpress.engine.cuda.inputs import Inputs, most_words
from stencilpress.engine.cuda.products import Products
from stencilpress.engine.cuda.prompt_graphs import PromptGraphs
from stencilpress.engine.cuda.rows import RowBuilder, StepRows
from stencilpress.engine.limits import Limits
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.messages import Sampling
from stencilpress.engine.model.llama import Weights
from stencilpress.engine.model.triton_llama import TritonDecoder
from stencilpress.engine.plan import Draw, RequestKey, Sampled, StepPlan
from stencilpress.engine.sampler import draw, only_best, upload
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.compile_ahead import compiling_only
from stencilpress.kernels.sgmv.views import AdapterView

REHEARSED = Sampling(temperature=1.0, top_p=0.9, logprobs=20)
"""A draw that takes as much memory as any."""


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
        self._limits = limits
        self._max_rank = max_lora_rank
        self._adapter = adapter
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._rows = RowBuilder(
            seats=limits.seats,
            max_pages=max_pages,
            page_tokens=limits.page_tokens,
            heads_per_kv_head=heads_per_kv_head,
            elem_bytes=memory.geometry.dtype_bytes,
        )
        self._feedback = Feedback(limits.seats, device)
        self._eager = EagerSteps(decoder, inputs, self._feedback)
        products = Products(spec, weights)
        self._graphs = DecodeGraphs(
            decoder,
            inputs,
            self._feedback,
            products,
            seats=limits.seats,
            max_model_len=limits.max_model_len,
            max_pages=max_pages,
            max_rank=max_lora_rank,
        )
        self._prompts = PromptGraphs(
            decoder, inputs, self._feedback, products, self._graphs.memory, limits, max_rank=max_lora_rank
        )
        pinned = self._stream is not None
        self._ids = [torch.zeros(limits.seats, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile and capture what most steps need. Where kernels are interpreted there is nothing to do."""
        if self._stream is None:
            return
        torch.cuda.synchronize()  # weights came on another stream
        with self._own_stream():
            self._compile()
            self._eager.warm()
            self._graphs.warm()
            self._prompts.warm()
        self._wait()

    @torch.inference_mode()
    def rehearse(self) -> int:
        """Take once the memory that the largest step and the largest graphs take; returns how many graphs there
        will be."""
        limits = self._limits
        torch.cuda.synchronize()
        with self._own_stream():
            self._compile()
            self._eager.warm()
            graphs = self._graphs.rehearse() + self._prompts.rehearse()
            draws = [Draw(REHEARSED, [0], 1, n) for n in range(limits.seats)]
            logits_NV = self._eager.largest(limits.max_num_batched_tokens, len(draws), limits.max_loras, self._max_rank)
            draw(logits_NV, [(0, n) for n in range(len(draws))], draws).read()
        return graphs

    def _compile(self) -> None:
        with compiling_only():
            self._eager.warm()
        self._graphs.compile()
        self._prompts.compile()

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute a plan. One answer per chunk with a draw, in the plan's order."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], list[Sampled]]:
        """Give a plan to the device; what is returned waits for it and gives :meth:`run`'s answer.

        One more step may be launched before that: it starts from the tokens that this one draws.
        """
        rows = self._rows.build(plan, self._adapter)
        with self._own_stream():
            if len(rows.pieces_N4) or len(rows.tokens_T) > self._graphs.largest:
                logits_NV, seats_N = self._logits(rows)
                if not only_best(rows.draws):
                    return self._drawn(logits_NV, rows)
                tokens_N = torch.empty_like(seats_N)
                self._feedback.draw_best(logits_NV, seats_N, tokens_N)
                return self._reading(tokens_N, range(len(rows.draws)), rows.keys)
            self._graphs.run(rows)
            if not only_best(rows.draws):
                logits_BV = self._graphs.logits_BV[: len(rows.tokens_T)]
                if len(rows.draws) < len(logits_BV):
                    logits_BV = logits_BV.index_select(0, upload(rows.draw_rows, logits_BV.device))
                return self._drawn(logits_BV, rows)
            tokens_B = self._graphs.tokens_B[: len(rows.tokens_T)]
            return self._reading(tokens_B, rows.draw_rows.tolist(), rows.keys)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute a plan eagerly and return the logits of every row (T, V), decodes first; nothing is drawn."""
        with self._own_stream():
            logits_TV = self._eager.every_logit(self._rows.build(plan, self._adapter))
        self._wait()
        return logits_TV

    def _logits(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Of a step with prompts, or of more decodes than graphs take. Interpreted, idle rows only cost time."""
        found = self._prompts.logits(rows) if self._stream is not None else None
        return self._eager.logits(rows) if found is None else found

    def _drawn(self, logits_NV: Tensor, rows: StepRows) -> Callable[[], list[Sampled]]:
        """Draw by more than the best logit, on the current stream."""
        drawn = draw(logits_NV, rows.keys, rows.draws)
        self._feedback.keep(drawn.tokens_N, upload(rows.draw_seats, logits_NV.device))
        return drawn.read

    def _reading(
        self, tokens_N: Tensor, places: Sequence[int], keys: Sequence[RequestKey]
    ) -> Callable[[], list[Sampled]]:
        """Have the tokens copied to the host; ``places[i]`` is where the one for ``keys[i]`` lies."""
        self._ids.reverse()
        ids_N = self._ids[0][: len(tokens_N)]
        ids_N.copy_(tokens_N, non_blocking=True)
        arrived = torch.cuda.Event() if self._stream is not None else None  # type: ignore[no-untyped-call]
        if arrived is not None:
            arrived.record()

        def read() -> list[Sampled]:
            """Also of a step without draws: its pages may go to others then."""
            if arrived is not None:
                arrived.synchronize()
            ids = ids_N.tolist()
            return [Sampled(key, ids[place]) for key, place in zip(keys, places, strict=True)]

        return read

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
