"""The engine on a real GPU: its runner against the CPU's and against transformers + PEFT, graphs against eager steps,
the books after a storm of requests, and the process over its rings."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_base import Base
from bench.gpu_engine import GpuEngine, Run, Serving
from stencilpress.engine.client import EngineClient
from stencilpress.engine.copies import copy_pieces
from stencilpress.engine.cuda.prompt_graphs import CAPTURED_AT, CAPTURES_APART
from stencilpress.engine.cuda.runner import CudaRunner
from stencilpress.engine.limits import Limits
from stencilpress.engine.loader import Loader
from stencilpress.engine.messages import Sampling, Submit, pack_tokens
from stencilpress.engine.model.weights import load_weights
from stencilpress.engine.plan import (
    Chunk,
    Draw,
    DropOrder,
    Fetched,
    FetchOrder,
    LoadResult,
    Placed,
    PlaceOrder,
    Segment,
    Sized,
    StepPlan,
)
from stencilpress.engine.spec import load_spec, page_geometry
from stencilpress.kernels.triton_launch import INTERPRETED
from tests.gpu.references import Reference, check_greedy, relative
from tests.integration.test_engine_process import engine, generate
from tests.unit.cuda_parity import ALL, check_rows
from tests.unit.tiny_models import MAX_RANK, VOCAB, Engine, load, load_engine, placed_adapters, save_adapter, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU"),
]
on_one_llama = pytest.mark.xdist_group("llama")  # by one process, so that the fixture is made once
CUDA = torch.device("cuda")
GREEDY = Sampling(temperature=0.0)
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
FAMILIES = {
    "llama": SIZES,
    "llama-tied-llama3-rope": SIZES,
    "llama-biased": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 64},
}
ADAPTERS = (
    {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"]},
    {"r": 20, "lora_alpha": 20, "target_modules": ALL},
    {"r": 64, "lora_alpha": 16, "target_modules": ["v_proj", "down_proj"]},
)
LIMIT_S = 200.0


@dataclass(frozen=True)
class Served:
    """A tiny model on the GPU in bfloat16, its adapters placed; ``tables`` are page tables of four seats."""

    folder: Path
    engine: Engine
    runner: CudaRunner
    digests: list[str]
    tables: list[tuple[int, ...]]

    def reference(self, adapter: str | None) -> Reference:
        return Reference(self.folder / "model", None if adapter is None else self.folder / adapter)

    def plan(self, number: int, rows: list[tuple[str | None, int, list[int]]], sampling: Sampling = GREEDY) -> StepPlan:
        """Seat i computes ``tokens`` from position ``start`` with its adapter."""
        segments = []
        for seat, (adapter, start, tokens) in enumerate(rows):
            draw = Draw(sampling, [1] * (start + len(tokens)), 1, start + len(tokens) - 1)
            chunk = Chunk((0, seat), seat, start, tuple(tokens), self.tables[seat], draw)
            segments.append(Segment(adapter, (chunk,)))
        return StepPlan(number, tuple(segments))


def make_served(folder: Path, family: str) -> Iterator[Served]:
    save_model(folder / "model", family, **FAMILIES[family])
    digests = [save_adapter(folder, folder / "model", seed, **config) for seed, config in enumerate(ADAPTERS)]
    loaded = load_engine(folder / "model", pages=200, device=CUDA, dtype="bfloat16")
    pages = random.Random(1).sample(range(200), 200)
    loader = placed_adapters(loaded, folder, digests, pages)
    limits = Limits(
        max_num_seqs=4, max_num_batched_tokens=256, max_loras=4, max_waiting=9, max_model_len=256,
        page_tokens=loaded.memory.geometry.page_tokens, vocab_size=VOCAB,
    )  # fmt: skip
    weights = load_weights(folder / "model", loaded.spec, CUDA)
    runner = CudaRunner(loaded.spec, weights, loaded.memory, loader.adapter, limits, MAX_RANK)
    runner.warm()
    yield Served(folder, loaded, runner, digests, [tuple(pages.pop() for _ in range(16)) for _ in range(4)])
    loader.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from make_served(tmp_path_factory.mktemp("llama"), "llama")


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length + 7 * i)] for i in range(count)]


def test_rows_equal_the_cpu_runners(tmp_path: Path) -> None:
    check_rows(CUDA, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers_and_peft(family: str, tmp_path: Path) -> None:
    """A prompt's every logit is at most half again as far from float32 as transformers' own bfloat16; then 24 greedy
    steps by graphs, base and adapters in one batch."""
    making = make_served(tmp_path, family)
    served = next(making)
    adapters = [None, *served.digests]
    texts = prompts(4, 20, 3)
    lengths = [len(text) for text in texts]
    plan = served.plan(1, [(a, 0, text) for a, text in zip(adapters, texts, strict=True)])
    rows = torch.split(served.runner.logits(plan).float(), lengths)
    references = [served.reference(adapter) for adapter in adapters]
    for got, text, reference in zip(rows, texts, references, strict=True):
        want = reference.logits(text, torch.float32)
        assert relative(got, want) < 1.5 * relative(reference.logits(text, torch.bfloat16), want) + 2e-3
    last = [draw.token for draw in served.runner.run(plan)]
    answers = [[token] for token in last]
    for step in range(24):
        inputs = [(a, n + step, [t]) for a, n, t in zip(adapters, lengths, last, strict=True)]
        last = [draw.token for draw in served.runner.run(served.plan(2 + step, inputs))]
        for answer, token in zip(answers, last, strict=True):
            answer.append(token)
    for text, answer, reference in zip(texts, answers, references, strict=True):
        assert check_greedy(reference, text, answer) <= 8
    next(making, None)


@on_one_llama
def test_graphs_equal_eager_steps_whatever_adapters_come(llama: Served) -> None:
    """The same graph replays with other adapters, ranks and numbers of rows; what is rare is eager, then captured."""
    base = None
    small, all7, wide = llama.digests
    texts = prompts(4, 30, 5)
    llama.runner.run(llama.plan(1, [(None, 0, text) for text in texts]))
    captured = dict(llama.runner._graphs._graphs)
    mixes: list[list[str | None]] = [
        [base] * 4,
        [small] * 4,
        [all7, base, small, wide],
        [wide, wide, base, all7],
        [small],
        [base, all7],
    ]
    for mix in [*mixes, *reversed(mixes)]:
        rows = [(a, len(text), [7]) for a, text in zip(mix, texts, strict=False)]
        drawn = llama.runner.run(llama.plan(2, rows))
        by_graph = llama.runner._graphs.logits_BV[: len(mix)].float()
        assert [draw.token for draw in drawn] == by_graph.argmax(-1).tolist()
        eager = llama.runner.logits(llama.plan(2, rows)).float()
        assert relative(by_graph, eager) < 1e-2
    assert {variant.adapting is None for variant in captured} == {True, False}
    assert all(graph.graph is not None for graph in captured.values())


@on_one_llama
@torch.inference_mode()
def test_graphs_of_steps_with_prompts_equal_eager_steps(llama: Served) -> None:
    """By a graph that has more room, then by the kind's own; decodes and prompts, adapters of few rows and of many."""
    runner, prompt_graphs = llama.runner, llama.runner._prompts
    small, all7, wide = llama.digests
    texts = prompts(4, 30, 13)
    runner.run(llama.plan(1, [(None, 0, text) for text in texts]))
    assert all(prompt_graphs._graphs.values())
    for mix in ([None] * 4, [small, all7, wide, None], [wide, None, all7, small], [all7, all7, None, None]):
        tokens = [[7], [9], texts[2][:12], texts[3][:3]]
        plan = llama.plan(2, [(a, len(text), own) for a, text, own in zip(mix, texts, tokens, strict=True)])
        with runner._own_stream():
            rows = runner._rows.build(plan, runner._adapter)
            wanted = prompt_graphs._kinds.of(rows, prompt_graphs._kinds.plans(rows))
            eager = runner._eager.logits(rows)[0].float().cpu()
            found = []
            for _ in range(CAPTURED_AT + CAPTURES_APART + 2):
                answer = prompt_graphs.logits(rows)
                assert answer is not None
                found.append(answer[0].float().cpu())
        assert wanted in prompt_graphs._graphs
        assert all(relative(logits, eager) < 2e-2 for logits in found)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[-2], found[-1])


@on_one_llama
def test_a_rare_step_is_captured_when_it_has_occurred_a_few_times(llama: Served) -> None:
    graphs = llama.runner._graphs
    text = prompts(1, 60, 8)[0]
    llama.runner.run(llama.plan(1, [(None, 0, text)]))
    for variant in [variant for variant in graphs._graphs if variant.rows == 1 and variant.adapting is not None]:
        del graphs._graphs[variant]
    logits = []
    for _ in range(5):
        llama.runner.run(llama.plan(2, [(llama.digests[1], len(text), [3])]))
        logits.append(graphs.logits_BV[:1].clone())
    assert all(torch.equal(logits[0], later) for later in logits)
    assert sum(variant.rows == 1 and variant.adapting is not None for variant in graphs._graphs) == 1


@on_one_llama
def test_draws_depend_on_seed_and_position_alone(llama: Served) -> None:
    """Also where the best few scores are not enough: at a high temperature every token of the vocabulary counts."""
    text = prompts(1, 12, 9)[0]
    llama.runner.run(llama.plan(1, [(None, 0, text)]))
    for sampling in (
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=3.0, top_p=0.99, seed=2, logprobs=2),
        Sampling(temperature=2.0, top_k=90, min_p=0.001, seed=3),
    ):
        runs = [llama.runner.run(llama.plan(2, [(None, len(text), [5])], sampling)) for _ in range(3)]
        assert runs[0] == runs[1] == runs[2]
        assert 0 <= runs[0][0].token < VOCAB


def test_the_pool_is_whole_after_ten_thousand_random_steps(tmp_path: Path) -> None:
    """Requests of all kinds come and are aborted over a pool that holds few of them; nothing leaks, each one ends. Half
    of them begin alike, so that adapters, common prefixes and answers compete for the pages."""
    save_model(tmp_path / "model", "llama", **SIZES, num_hidden_layers=2)
    configs = [ADAPTERS[i % 3] for i in range(9)]
    digests = [save_adapter(tmp_path, tmp_path / "model", seed, **config) for seed, config in enumerate(configs)]
    spec = load_spec(tmp_path / "model", "bfloat16")
    page_bytes = page_geometry(spec, 64).page_bytes
    serving = Serving(
        seats=12, tokens=96, max_loras=3, max_prefetched=2, max_model_len=200, pool_bytes=100 * page_bytes
    )
    served = GpuEngine(Base("tiny", spec, tmp_path / "model"), CUDA, serving)
    served.use(lambda memory, wake: Loader(tmp_path, spec, memory, 64, wake), 5)
    served.runner.warm()
    rng = random.Random(11)
    run = Run(times_s=defaultdict(list), tokens=defaultdict(list))
    live: list[tuple[int, int]] = []
    common = [rng.randrange(VOCAB) for _ in range(90)]
    number = 0
    while run.steps < 10_000:
        if rng.random() < 0.2 and len(live) < 40:
            number += 1
            live.append((1, number))
            sampling = Sampling(
                temperature=rng.choice((0.0, 0.0, 1.0, 2.5)),
                top_p=rng.choice((1.0, 0.9)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
                logprobs=rng.choice((-1, -1, 2)),
                seed=number,
            )
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 90))]
            salt = rng.choice((b"", b"salt"))
            if salt:
                prompt = [*common[: len(prompt) - 1], *prompt[-1:]]
            adapter = rng.choice(("", *digests))
            submit = Submit(number, pack_tokens(prompt), adapter, rng.randint(1, 60), sampling, salt=salt)
            served.scheduler.add(live[-1], submit)
        if live and rng.random() < 0.02:
            served.scheduler.abort(live.pop(rng.randrange(len(live))))
        served.turn(run, 0.0, 0.001)
        if run.steps % 100 == 0:
            served.scheduler.check()
            live = [key for key in live if key in served.scheduler._register]
    served.scheduler.abort_all()
    while served._flights or not served.scheduler.idle:
        served.turn(run, 0.0, 0.001)
    served.scheduler.check()
    stats = served.scheduler.stats(1)
    assert stats.pages_kv == 0
    assert stats.pages_free + stats.pages_adapter + stats.pages_cached == served.pool.total
    assert stats.cached_tokens > 0
    assert stats.completion_tokens == sum(map(len, run.tokens.values()))
    assert stats.adapter_evictions > 0
    assert stats.preemptions > 0
    served.close()


def test_the_process_serves_a_model_folder_and_its_adapters(tmp_path: Path) -> None:
    """Over the rings, all at once: greedy tokens are transformers + PEFT's; adapters come through the loader."""
    save_model(tmp_path / "model", "llama", **SIZES)
    digests = [save_adapter(tmp_path, tmp_path / "model", seed, **config) for seed, config in enumerate(ADAPTERS)]
    adapters = [None, *digests, None, *digests]
    texts = prompts(len(adapters), 9, 21)

    async def answers() -> list[list[int]]:
        async with asyncio.timeout(LIMIT_S), EngineClient(tmp_path / "sock") as client:
            await client.wait_ready()
            submits = [
                Submit(0, pack_tokens(text), adapter or "", 32, GREEDY)
                for text, adapter in zip(texts, adapters, strict=True)
            ]
            found = await asyncio.gather(*(generate(client, submit) for submit in submits))
            assert (await client.stats()).pages_kv == 0
            return [text for text, _ in found]

    options = {"device": "cuda", "dtype": "bfloat16"}
    with engine(tmp_path / "sock", tmp_path / "model", tmp_path, **options) as process:
        got = asyncio.run(answers())
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    for adapter, text, answer in zip(adapters, texts, got, strict=True):
        reference = Reference(tmp_path / "model", None if adapter is None else tmp_path / adapter)
        assert len(answer) == 32
        assert check_greedy(reference, text, answer) <= 10


def test_a_load_that_is_copied_while_it_is_read_leaves_what_one_from_host_memory_does(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", **SIZES)
    digest = save_adapter(tmp_path, tmp_path / "model", 5, **ADAPTERS[1])
    pool, ready = load_engine(tmp_path / "model", 40, CUDA, "bfloat16"), threading.Semaphore(0)
    loader = Loader(tmp_path, pool.spec, pool.memory, MAX_RANK, ready.release)
    fetched = load(loader, ready, FetchOrder(digest))
    assert isinstance(fetched, Fetched)
    pages = tuple(range(fetched.pages))
    assert load(loader, ready, PlaceOrder(digest, pages)) == Placed(digest)
    bytes_ = pool.memory.flat.view(torch.uint8)
    from_host = bytes_.cpu()
    loader.submit(DropOrder(digest, "hbm"))
    loader.submit(DropOrder(digest, "host"))
    pool.memory.flat.fill_(torch.nan)
    loader.submit(FetchOrder(digest))
    answers: list[LoadResult] = []
    loader.submit(PlaceOrder(digest, pages))
    while len(answers) < 3:
        assert ready.acquire(timeout=30)
        answers += loader.results()
    loader.close()
    assert answers == [Sized(digest, len(pages)), fetched, Placed(digest)]
    assert torch.equal(bytes_.cpu(), from_host)


@pytest.mark.parametrize("sizes", [[2 << 20, 4096, 8, 1 << 20], [16] * 300, [24]])
def test_pieces_are_copied_to_their_places(sizes: list[int]) -> None:
    """By the driver's one call and piece by piece; what lies between them is left alone."""
    host = torch.randint(0, 255, (sum(sizes),), dtype=torch.uint8).pin_memory()
    sources = torch.split(host, sizes)
    starts = [2 * sum(sizes[:i]) + 16 for i in range(len(sizes))]
    target = torch.full((2 * sum(sizes) + 64,), 255, dtype=torch.uint8, device=CUDA)
    want = target.cpu()
    for start, source in zip(starts, sources, strict=True):
        want[start : start + len(source)] = source
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        copy_pieces(target, list(zip(starts, sources, strict=True)))
        torch.cuda.current_stream().synchronize()
    assert torch.equal(target.cpu(), want)
