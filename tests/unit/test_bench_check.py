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

from bench.gpu_check import Exact, faults
from bench.gpu_random import ALL7, AdapterKind, RandomImages
from stencilpress.engine.model import linear
from stencilpress.engine.plan import Chunk, Segment, StepPlan
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


def test_what_differs_too_much_or_adapts_nothing_is_a_fault() -> None:
    assert not faults({"base vs float32": 0.02, "probe moves it": 0.4})
    assert faults({"base vs float32": 0.06}) == ["base vs float32: 0.06"]
    assert faults({"probe moves it": 0.05}) == ["probe moves it: 0.05"]
    assert faults({"base vs float32": float("nan"), "probe moves it": float("nan")}) == [
        "base vs float32: nan",
        "probe moves it: nan",
    ]
