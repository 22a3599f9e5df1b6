"""What GPU benches prove their engine by, in any model folder: logits in float32, and limits of what may differ."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("triton")

from bench.gpu_base import Base
from bench.gpu_cases import PROBES, prompts, random_loader
from bench.gpu_check import PART, Checker, Exact, faults, part_of
from bench.gpu_engine import GpuEngine, Serving
from bench.gpu_random import ALL7, AdapterKind, RandomImages
from stencilpress.engine.model import linear
from stencilpress.engine.plan import Chunk, Segment, StepPlan
from stencilpress.engine.spec import load_spec
from tests.unit.tiny_models import (
    CPU,
    FAMILIES,
    VOCAB,
    load_engine,
    placed_adapters,
    reference_logits,
    save_model,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_logits_are_transformers_and_the_engines(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_packs", lambda _: False)  # as on a GPU
    save_model(tmp_path / "model", family)
    engine = load_engine(tmp_path / "model", pages=80)
    kind = AdapterKind("probe", 24, ALL7)
    images = RandomImages(engine.spec, [kind], CPU)
    (tmp_path / "adapters").mkdir()
    images.write(tmp_path / "adapters")
    tokens = random.Random(family).choices(range(VOCAB), k=40)
    driven: Any = SimpleNamespace(spec=engine.spec, weights=engine.weights, memory=engine.memory)
    exact = Exact(driven, images)

    base, adapted = exact.last_logits(tokens, ""), exact.last_logits(tokens, kind.digest)

    torch.testing.assert_close(base, reference_logits(tmp_path / "model", None, tokens)[-1], rtol=1e-4, atol=1e-4)
    free = list(range(80))
    loader = placed_adapters(engine, tmp_path / "adapters", [kind.digest], free)
    chunk = Chunk((0, 0), 0, 0, tuple(tokens), tuple(free[:8]), None)
    rows = engine.runner(loader.adapter).logits(StepPlan(1, (Segment(kind.digest, (chunk,)),)))
    loader.close()
    torch.testing.assert_close(adapted, rows[-1], rtol=1e-4, atol=1e-4)
    assert (adapted - base).abs().max() > 0.01, "the adapter proves nothing"


@pytest.mark.timeout(240)  # its kernels are interpreted
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_a_model_folder_is_proved_and_serves_base_and_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_packs", lambda _: False)  # as on a GPU
    save_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    base = Base("tiny", load_spec(tmp_path / "model"), tmp_path / "model")
    images = RandomImages(base.spec, PROBES, CPU)
    engine = GpuEngine(base, CPU, Serving(seats=4, tokens=128, max_loras=3, max_model_len=64, pool_bytes=1 << 21))
    engine.use(random_loader(base, images), len(PROBES))

    errors = Checker(engine, images, [probe.digest for probe in PROBES]).run()

    assert not faults(errors)
    assert max(error for name, error in errors.items() if not name.endswith(PART)) < 1e-5
    assert [v for name, v in errors.items() if name.endswith(PART)] == [pytest.approx(1, abs=1e-3)] * len(PROBES)
    adapters = ["", PROBES[1].digest]
    asked = prompts(base.spec, len(adapters), 12, seed=1)
    run = engine.serve(asked, adapters, 2)
    exact = Exact(engine, images)
    for i, (prompt, adapter) in enumerate(zip(asked, adapters, strict=True)):
        first = int(exact.last_logits(prompt, adapter).argmax())
        assert run.tokens[i] == [first, int(exact.last_logits([*prompt, first], adapter).argmax())]
    engine.close()


def test_what_differs_too_much_or_adapts_nothing_is_a_fault() -> None:
    assert not faults({"base vs float32": 0.02, f"probe{PART}": 0.9})
    for name, value in (("graph vs eager", 0.06), (f"probe{PART}", 0.02), (f"probe{PART}", 2.0)):
        assert faults({"base vs float32": 0.02, name: value}) == [f"{name}: {value}"]
        assert faults({name: float("nan")}) == [f"{name}: nan"]


def test_an_adapters_part_shows_below_the_error_of_bfloat16() -> None:
    """It moves these logits by 1.5 %, as it does a small real model's, and they are off by twice as much."""
    torch.manual_seed(2)
    base = torch.randn(4096)
    adapted = base + 0.015 * torch.randn(4096)
    wrong = 0.03 * torch.randn(4096)
    assert part_of(adapted + wrong, base, adapted) == pytest.approx(1, abs=0.2)
    assert part_of(base + wrong, base, adapted) == pytest.approx(0, abs=0.2)
    assert part_of(adapted + (adapted - base) + wrong, base, adapted) == pytest.approx(2, abs=0.2)
