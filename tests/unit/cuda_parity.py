"""The GPU's runner against the CPU's, on a tiny model with adapters; on CPU tensors its kernels are interpreted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from stencilpress.engine.cuda.runner import CudaRunner
from stencilpress.engine.limits import Limits
from stencilpress.engine.loader import Loader
from stencilpress.engine.messages import Sampling
from stencilpress.engine.plan import (
    PENDING,
    Chunk,
    Draw,
    RequestKey,
    Sampled,
    Segment,
    StepPlan,
)
from tests.unit.tiny_models import CPU, MAX_RANK, VOCAB, load_engine, placed_adapters, save_adapter, save_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = (
    {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"]},
    {"r": 20, "lora_alpha": 20, "target_modules": ALL},
)
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.5, top_p=0.95, seed=7, logprobs=3)


class _Sequence:
    """A request of so many tokens, played by hand."""

    def __init__(self, number: int, adapter: str | None, tokens: list[int], pages: tuple[int, ...]) -> None:
        self.number, self.adapter, self.tokens, self.pages = number, adapter, tokens, pages
        self.done = 0

    def chunk(self, length: int, sampling: Sampling = GREEDY) -> Chunk:
        start, self.done = self.done, self.done + length
        draw = Draw(sampling, self.tokens[: self.done], 1, self.done)
        return Chunk((0, self.number), self.number, start, tuple(self.tokens[start : self.done]), self.pages, draw)


def _plan(number: int, chunks: list[tuple[_Sequence, Chunk]]) -> StepPlan:
    segments = {adapter: [c for s, c in chunks if s.adapter == adapter] for adapter in {s.adapter for s, _ in chunks}}
    return StepPlan(number, tuple(Segment(adapter, tuple(own)) for adapter, own in segments.items()))


def _with_tokens(segment: Segment, token: Callable[[RequestKey], int]) -> Segment:
    return replace(segment, chunks=tuple(replace(chunk, tokens=(token(chunk.key),)) for chunk in segment.chunks))


def check_rows(device: torch.device, folder: Path) -> None:
    """A step of prompts, one of decodes alone (a graph's), one of both, and one launched ahead of another's tokens."""
    save_model(folder / "model", "qwen3", num_hidden_layers=2)
    digests = [save_adapter(folder, folder / "model", seed, **config) for seed, config in enumerate(ADAPTERS)]
    there, here = (load_engine(folder / "model", pages=80, device=where) for where in (device, CPU))
    rng = random.Random(4)
    pages = rng.sample(range(80), 80)
    sequences = []
    for number, adapter in enumerate([None, digests[1], digests[0]]):
        tokens = [rng.randrange(VOCAB) for _ in range(40)]
        sequences.append(_Sequence(number, adapter, tokens, tuple(pages.pop() for _ in range(3))))
    loaders = [placed_adapters(engine, folder, digests, [*pages]) for engine in (there, here)]
    limits = Limits(
        max_num_seqs=3, max_num_batched_tokens=128, max_loras=4, max_waiting=9, max_model_len=64,
        page_tokens=here.memory.geometry.page_tokens, vocab_size=VOCAB,
    )  # fmt: skip
    ours = CudaRunner(there.spec, there.weights, there.memory, loaders[0].adapter, limits, MAX_RANK)
    theirs = here.runner(loaders[1].adapter)
    ours.warm()

    for number, lengths in enumerate([(17, 12, 20), (1, 1, 1), (1, 9, 1)]):
        plan = _plan(number, [(s, s.chunk(n)) for s, n in zip(sequences, lengths, strict=True) if n])
        assert ours.run(plan) == theirs.run(plan)
    order = [chunk for segment in plan.segments for chunk in segment.chunks]
    rows = torch.split(theirs.logits(plan), [len(chunk.tokens) for chunk in order])
    decodes_first = torch.cat([rows[i] for i in sorted(range(len(order)), key=lambda i: len(order[i].tokens) > 1)])
    torch.testing.assert_close(ours.logits(plan).cpu(), decodes_first, rtol=1e-4, atol=1e-4)
    last_rows = torch.cat([part[-1:] for part in rows])
    torch.testing.assert_close(_logits_by_prompt_graph(ours, plan, loaders[0]), last_rows, rtol=1e-4, atol=1e-4)

    for number, (first_by, then_by) in enumerate([(GREEDY, SAMPLED), (SAMPLED, GREEDY)]):
        first = _plan(2 * number + 3, [(s, s.chunk(1, first_by)) for s in sequences[:2]])
        drawn = _tokens(theirs.run(first))
        ahead = _plan(2 * number + 4, [(s, s.chunk(1, then_by)) for s in sequences[:2]])
        pending = [_with_tokens(segment, lambda _: PENDING) for segment in ahead.segments]
        known = [_with_tokens(segment, drawn.__getitem__) for segment in ahead.segments]
        results = [ours.launch(first), ours.launch(StepPlan(ahead.number, tuple(pending)))]
        then = _tokens(theirs.run(StepPlan(ahead.number, tuple(known))))
        assert [_tokens(result()) for result in results] == [drawn, then]
    for loader in loaders:
        loader.close()


@torch.inference_mode()
def _logits_by_prompt_graph(runner: CudaRunner, plan: StepPlan, loader: Loader) -> torch.Tensor:
    """Of the rows that draw, in the plan's order; rows beside them are nobody's."""
    if runner._stream is None:
        runner._prompts._kinds.sizes = [16]  # the interpreter is slow
    with runner._own_stream():
        found = runner._prompts.logits(runner._rows.build(plan, loader.adapter))
        assert found is not None
        return found[0].cpu()  # in the order of the runner's own stream


def _tokens(sampled: list[Sampled]) -> dict[RequestKey, int]:
    return {draw.key: draw.token for draw in sampled}
