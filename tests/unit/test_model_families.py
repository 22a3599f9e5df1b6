"""Every row of a mixed batch equals transformers + PEFT running that request alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stencilpress.engine.model.weights import WeightsError, load_weights
from stencilpress.engine.plan import Chunk, Segment, StepPlan
from stencilpress.engine.runner import Runner
from stencilpress.engine.spec import load_spec
from stencilpress.kernels.sgmv.views import AdapterView
from tests.unit.tiny_models import (
    CPU,
    FAMILIES,
    VOCAB,
    load_engine,
    placed_adapters,
    reference_logits,
    save_adapter,
    save_model,
)

TOLERANCE = 1e-4
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = (
    {"r": 1, "lora_alpha": 3, "target_modules": ["q_proj"]},
    {"r": 3, "lora_alpha": 3, "target_modules": ["k_proj", "v_proj", "down_proj"]},
    {"r": 6, "lora_alpha": 12, "target_modules": ["o_proj", "up_proj"]},
    {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]},
    {"r": 12, "lora_alpha": 6, "target_modules": ALL, "use_rslora": True},
    {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"layers.1.self_attn.q_proj": 24, "down_proj": 2},
        "alpha_pattern": {"v_proj": 1, "mlp.gate_proj": 20},
    },
    {"r": 24, "lora_alpha": 24, "target_modules": ["gate_proj", "down_proj"]},
    {"r": 64, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
)


@dataclass
class _Request:
    """``tokens`` are known beforehand; ``done`` of them are computed, their logits in ``rows``."""

    number: int
    adapter: str | None
    tokens: list[int]
    pages: tuple[int, ...]
    done: int = 0
    rows: list[Tensor] = field(default_factory=list)

    def chunk(self, length: int) -> Chunk:
        tokens = tuple(self.tokens[self.done : self.done + length])
        return Chunk((0, self.number), self.number, self.done, tokens, self.pages, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def _run_shuffled(runner: Runner, requests: list[_Request], rng: random.Random) -> None:
    """Run all requests to their end in mixed steps: prompts in chunks of random length among single tokens."""
    number = 0
    while waiting := [request for request in requests if request.done < len(request.tokens)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        lengths = {r.number: min(rng.choice((1, 1, 1, 2, 5, 40)), len(r.tokens) - r.done) for r in chosen}
        adapters = list({request.adapter: None for request in chosen})
        groups = [[r for r in chosen if r.adapter == adapter] for adapter in adapters]
        number += 1
        segments = tuple(
            Segment(adapter, tuple(r.chunk(lengths[r.number]) for r in group))
            for adapter, group in zip(adapters, groups, strict=True)
        )
        logits = runner.logits(StepPlan(number, segments))
        sizes = [lengths[r.number] for group in groups for r in group]
        for request, rows in zip((r for group in groups for r in group), torch.split(logits, sizes), strict=True):
            request.rows.append(rows)
            request.done += len(rows)


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_mixed_batches_equal_transformers_and_peft(family: str, folder: Path) -> None:
    model_dir, adapters_dir = folder / family, folder / f"{family}-adapters"
    save_model(model_dir, family)
    digests = [save_adapter(adapters_dir, model_dir, seed, **config) for seed, config in enumerate(ADAPTERS)]
    engine = load_engine(model_dir, pages=240)
    rng = random.Random(family)
    free = list(range(engine.memory.num_pages))
    rng.shuffle(free)
    loader = placed_adapters(engine, adapters_dir, digests, free)
    requests = []
    for number, adapter in enumerate([None, *digests, None, digests[4], digests[7]]):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 90))]
        pages = tuple(free.pop() for _ in range(engine.memory.geometry.pages_for_tokens(len(tokens))))
        requests.append(_Request(number, adapter, tokens, pages))

    _run_shuffled(engine.runner(loader.adapter), requests, rng)

    loader.close()
    for request in requests:
        base = expected = reference_logits(model_dir, None, request.tokens)
        if request.adapter is not None:
            expected = reference_logits(model_dir, adapters_dir / request.adapter, request.tokens)
            assert (expected - base).abs().max() > 100 * TOLERANCE, "this adapter proves nothing"
        torch.testing.assert_close(torch.cat(request.rows), expected, rtol=TOLERANCE, atol=TOLERANCE)


def _every_row(model_dir: Path, tokens: list[int]) -> Tensor:
    engine = load_engine(model_dir, pages=8)
    adapters: dict[str, AdapterView] = {}
    chunk = Chunk((0, 0), 0, 0, tuple(tokens), tuple(range(8)), None)
    return engine.runner(adapters.__getitem__).logits(StepPlan(1, (Segment(None, (chunk,)),)))


def test_sharded_weights_are_read(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3").save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors").unlink()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2

    torch.testing.assert_close(_every_row(tmp_path, [3, 1, 4]), reference_logits(tmp_path, None, [3, 1, 4]))


def test_an_output_head_stored_beside_tied_embeddings_is_not_surplus(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    _edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))

    torch.testing.assert_close(_every_row(tmp_path, [3, 1, 4]), reference_logits(tmp_path, None, [3, 1, 4]))


def _edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(Q), f"tensor {Q} is missing"),
        (lambda t: t.update({Q: torch.zeros(48, 47)}), f"tensor {Q} has shape (48, 47), config.json implies (48, 48)"),
        (lambda t: t.update({Q: torch.zeros(48, 48, dtype=torch.int8)}), f"{Q} is torch.int8: quantised weights"),
        (lambda t: t.update({f"{Q}_scale": torch.zeros(1)}), f"tensor {Q}_scale is not part of this architecture"),
        (lambda t: t.update({f"x.{n}": torch.zeros(1) for n in range(3)}), "tensor x.0 and 2 more is not part of"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], text: str
) -> None:
    save_model(tmp_path, "llama")
    _edit(tmp_path, change)

    with pytest.raises(WeightsError) as refusal:
        load_weights(tmp_path, load_spec(tmp_path), CPU)

    assert text in str(refusal.value)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "absent.safetensors"])
def test_an_index_may_only_name_files_of_the_folder(tmp_path: Path, name: str) -> None:
    save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q: name}}))

    with pytest.raises(WeightsError, match=name):
        load_weights(tmp_path, load_spec(tmp_path), CPU)


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])

    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_weights(tmp_path, load_spec(tmp_path), CPU)


def test_half_precision_stays_close(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    tokens = list(range(40))
    exact = reference_logits(tmp_path, None, tokens)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))

    rounded = _every_row(tmp_path, tokens)

    assert rounded.dtype == torch.bfloat16
    theirs = reference_logits(tmp_path, None, tokens, torch.bfloat16)
    assert _error(rounded, exact) < 1.2 * _error(theirs, exact), "rounds worse than transformers does"


def _error(logits: Tensor, exact: Tensor) -> float:
    """Root mean square."""
    return float((logits.float() - exact).square().mean().sqrt())
