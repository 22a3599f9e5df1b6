"""Whole steps through the runner: texts equal transformers' own, whatever shares the batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from stencilpress.engine.loader import Loader
from stencilpress.engine.messages import Sampling
from stencilpress.engine.plan import (
    FAILED,
    Chunk,
    Draw,
    DropOrder,
    Fetched,
    FetchOrder,
    Page,
    Placed,
    PlaceOrder,
    Sampled,
    Segment,
    StepPlan,
)
from tests.unit.tiny_models import MAX_RANK, Engine, load, load_engine, reference_logits, save_adapter, save_model

GREEDY = Sampling(temperature=0.0)


@dataclass
class _Stored:
    model_dir: Path
    adapters_dir: Path
    digests: list[str]


@dataclass
class _Request:
    """``computed`` positions of ``history`` have their keys and values in ``pages``."""

    number: int
    adapter: str | None
    history: list[int]
    pages: tuple[Page, ...]
    sampling: Sampling = GREEDY
    prompt_len: int = field(init=False)
    computed: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.history)

    def chunk(self, length: int = 0) -> Chunk:
        """The next ``length`` tokens, or all that are left; with a draw if they are the last."""
        end = self.computed + length if length else len(self.history)
        draw = Draw(self.sampling, self.history, self.prompt_len, len(self.history) - self.prompt_len)
        return Chunk(
            (0, self.number),
            self.number,
            self.computed,
            tuple(self.history[self.computed : end]),
            self.pages,
            draw if end == len(self.history) else None,
        )


class _Bench:
    def __init__(self, stored: _Stored) -> None:
        self.engine: Engine = load_engine(stored.model_dir, pages=160)
        self.ready = threading.Semaphore(0)
        self.loader = Loader(
            stored.adapters_dir, self.engine.spec, self.engine.memory, MAX_RANK, wake=self.ready.release
        )
        self.runner = self.engine.runner(self.loader.adapter)
        self.free = list(range(self.engine.memory.num_pages))
        self.steps = 0

    def place(self, digest: str) -> tuple[Page, ...]:
        fetched = load(self.loader, self.ready, FetchOrder(digest))
        assert isinstance(fetched, Fetched)
        pages = tuple(self.free.pop() for _ in range(fetched.pages))
        assert load(self.loader, self.ready, PlaceOrder(digest, pages)) == Placed(digest)
        return pages

    def request(self, number: int, adapter: str | None, prompt: list[int], sampling: Sampling = GREEDY) -> _Request:
        pages = tuple(self.free.pop() for _ in range(self.engine.memory.geometry.pages_for_tokens(100)))
        return _Request(number, adapter, list(prompt), pages, sampling)

    def step(self, groups: Sequence[Sequence[_Request]], length: int = 0) -> list[Sampled]:
        """Run all groups, one segment each, and append what was drawn."""
        self.steps += 1
        segments = tuple(Segment(group[0].adapter, tuple(r.chunk(length) for r in group)) for group in groups)
        sampled = self.runner.run(StepPlan(self.steps, segments))
        by_key = {answer.key: answer.token for answer in sampled}
        for request in (request for group in groups for request in group):
            request.computed = min(request.computed + length, len(request.history)) if length else len(request.history)
            if (0, request.number) in by_key:
                request.history.append(by_key[0, request.number])
        return sampled


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> _Stored:
    root = tmp_path_factory.mktemp("runner")
    save_model(root / "model", "llama")
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    digests = [
        save_adapter(root / "adapters", root / "model", 1, r=8, lora_alpha=16, target_modules=every),
        save_adapter(root / "adapters", root / "model", 2, r=3, lora_alpha=9, target_modules=["q_proj", "v_proj"]),
    ]
    return _Stored(root / "model", root / "adapters", digests)


@pytest.fixture
def bench(stored: _Stored) -> Iterator[_Bench]:
    made = _Bench(stored)
    yield made
    made.loader.close()


def _greedy(stored: _Stored, adapter: str | None, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        folder = None if adapter is None else stored.adapters_dir / adapter
        logits = reference_logits(stored.model_dir, folder, tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens


def test_greedy_texts_of_base_and_adapters_together(bench: _Bench, stored: _Stored) -> None:
    first, second = stored.digests
    for digest in stored.digests:
        bench.place(digest)
    prompts = {None: [1, 2, 3, 4, 5], first: [9, 8, 7], second: [50, 60, 70, 80, 90, 3, 1]}
    requests = {adapter: bench.request(n, adapter, p) for n, (adapter, p) in enumerate(prompts.items())}

    bench.step([[requests[None]], [requests[first]]])
    bench.step([[requests[first]], [requests[second]], [requests[None]]])
    for _ in range(4):
        bench.step([[request] for request in requests.values()])

    for adapter, request in requests.items():
        assert request.history == _greedy(stored, adapter, prompts[adapter], len(request.history) - request.prompt_len)


def test_answers_come_in_the_plans_order_and_only_for_draws(bench: _Bench) -> None:
    requests = [bench.request(number, None, [number + 1] * (4 if number % 2 else 2)) for number in (5, 3, 4, 1)]

    assert bench.step([[requests[0]], requests[1:3]], length=1) == []
    answers = bench.step([[requests[3], requests[0]], requests[1:3]], length=1)

    assert [answer.key for answer in answers] == [(0, 4)]
    assert [answer.key for answer in bench.step([requests])] == [(0, 5), (0, 3), (0, 4), (0, 1)]


def test_a_seeded_text_is_the_same_alone_and_in_company(bench: _Bench, stored: _Stored) -> None:
    bench.place(stored.digests[0])
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=42)
    alone = bench.request(0, stored.digests[0], [4, 5, 6], sampling)
    for _ in range(12):
        bench.step([[alone]])

    again = bench.request(1, stored.digests[0], [4, 5, 6], sampling)
    company = [bench.request(n, None, [n, n + 1], Sampling(temperature=1.5, seed=n)) for n in range(2, 6)]
    bench.step([[again], company], length=1)
    bench.step([company, [again]], length=1)
    for _ in range(12):
        bench.step([company, [again]])

    assert again.history == alone.history


def test_an_adapter_that_moves_between_steps_serves_on(bench: _Bench, stored: _Stored) -> None:
    digest = stored.digests[0]
    pages = bench.place(digest)
    request = bench.request(0, digest, [3, 1, 4, 1, 5])
    bench.step([[request]])
    bench.step([[request]])
    bench.loader.submit(DropOrder(digest, "hbm"))
    bench.place(digest)
    for page in pages:
        bench.engine.memory.flat.view(-1, bench.engine.memory.geometry.page_elems)[page].fill_(torch.nan)

    bench.step([[request]])

    assert request.history == _greedy(stored, digest, [3, 1, 4, 1, 5], 3)


def test_logits_that_are_not_finite_fail_their_own_request(bench: _Bench, stored: _Stored) -> None:
    sick, sound = bench.request(0, None, [1, 2, 3]), bench.request(1, None, [4, 5, 6])
    bench.step([[sick, sound]])
    elems = bench.engine.memory.geometry.page_elems
    bench.engine.memory.flat.view(-1, elems)[sick.pages[0]].fill_(torch.nan)

    failed, answer = bench.step([[sick, sound]])

    assert failed == Sampled((0, 0), FAILED)
    assert answer.token == _greedy(stored, None, [4, 5, 6], 2)[-1]


def test_an_adapter_that_is_not_placed_is_a_bug_of_the_plan(bench: _Bench, stored: _Stored) -> None:
    with pytest.raises(KeyError):
        bench.step([[bench.request(0, stored.digests[1], [1])]])
