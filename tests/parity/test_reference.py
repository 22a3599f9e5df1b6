"""The recorded reference belongs to the files that are shipped beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stencilpress.pull import DEMO_ID
from tests.parity.record import BASE, PROMPTS_PATH, REFERENCE_PATH, prompts, sha256, shipped_adapters


def test_reference_was_recorded_from_the_shipped_files() -> None:
    recorded = json.loads(REFERENCE_PATH.read_text(encoding="utf-8"))
    shipped = {name: sha256(path / "adapter_model.safetensors") for name, path in shipped_adapters().items()}
    assert recorded["adapters_sha256"] == shipped
    assert recorded["prompts_sha256"] == sha256(PROMPTS_PATH)
    assert recorded["answers"].keys() == {BASE, *shipped}


def test_every_answer_has_a_gap_per_token() -> None:
    recorded = json.loads(REFERENCE_PATH.read_text(encoding="utf-8"))
    for answers in recorded["answers"].values():
        assert len(answers) == len(prompts())
        for answer in answers:
            assert 0 < len(answer["token_ids"]) == len(answer["gaps"]) <= recorded["max_new_tokens"]


@pytest.mark.parametrize("folder", shipped_adapters().values(), ids=lambda folder: folder.name)
def test_shipped_adapters_are_portable(folder: Path) -> None:
    """Small, in bf16, bound to the base's public id, and without a trace of the machine that trained them."""
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    text = (folder / "adapter_config.json").read_text(encoding="utf-8")
    assert json.loads(text)["base_model_name_or_path"] == DEMO_ID
    assert "/" not in text.replace(DEMO_ID, "")
    weights = folder / "adapter_model.safetensors"
    assert weights.stat().st_size < 3_000_000
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
