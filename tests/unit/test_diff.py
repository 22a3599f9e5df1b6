"""Differences of two versions, against numpy on whole matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stencilpress.engine.image import Tensor
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.lifecycle.diff import ConfigChange, Diff, LayerRanks, Side, diff_versions
from tests.unit.adapters import FIRST_A, FIRST_B, GOOD, lora_tensors, tiny_spec, write_adapter, write_base

SPEC = tiny_spec()
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base", SPEC)


def side(folder: Path) -> Side:
    """A folder whose files are all one version's own."""
    return Side(folder, (folder / CONFIG_NAME).read_bytes())


async def compare(tmp_path: Path, base: Path, right: dict[str, Tensor], config: dict[str, Any] | None = None) -> Diff:
    left = write_adapter(tmp_path / "left", GOOD, lora_tensors(SPEC))
    other = write_adapter(tmp_path / "right", config or GOOD, right)
    return await diff_versions(side(left), side(other), base, "auto")


async def test_the_same_twice_differs_in_nothing(tmp_path: Path, base: Path) -> None:
    found = await compare(tmp_path, base, lora_tensors(SPEC))
    assert (found.config, found.added, found.removed) == ([], [], [])
    assert len(found.tensors) == 8
    assert all(tensor.change == 0 and tensor.left == tensor.right for tensor in found.tensors)
    assert all(delta.change == pytest.approx(0, abs=1e-5) for delta in found.deltas)
    ranks = {"q_proj": 4, "v_proj": 4}
    assert found.layers == [LayerRanks(0, ranks, ranks), LayerRanks(1, ranks, ranks)]


async def test_norms_are_those_of_the_whole_matrices(tmp_path: Path, base: Path) -> None:
    left, right = lora_tensors(SPEC), lora_tensors(SPEC, seed=5)
    found = await compare(tmp_path, base, right, {**GOOD, "lora_alpha": 12})
    assert found.config == [ConfigChange("lora_alpha", 8, 12)]
    (a,) = [tensor for tensor in found.tensors if tensor.name == f"{Q0}.lora_A"]
    assert a.left == pytest.approx(float(np.linalg.norm(left[FIRST_A])))
    assert a.change == pytest.approx(float(np.linalg.norm(right[FIRST_A] - left[FIRST_A])))
    (delta,) = [one for one in found.deltas if one.module == Q0]
    before = 2.0 * left[FIRST_B].astype(np.float64) @ left[FIRST_A]
    after = 3.0 * right[FIRST_B].astype(np.float64) @ right[FIRST_A]
    assert delta.left == pytest.approx(np.linalg.norm(before))
    assert delta.right == pytest.approx(np.linalg.norm(after))
    assert delta.change == pytest.approx(np.linalg.norm(after - before))
    assert delta.relative == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before))


async def test_the_same_delta_in_other_factors_has_not_moved(tmp_path: Path, base: Path) -> None:
    right = lora_tensors(SPEC)
    right[FIRST_A], right[FIRST_B] = 2 * right[FIRST_A], right[FIRST_B] / 2
    found = await compare(tmp_path, base, right)
    (a,) = [tensor for tensor in found.tensors if tensor.name == f"{Q0}.lora_A"]
    assert a.relative == pytest.approx(1)
    (delta,) = [one for one in found.deltas if one.module == Q0]
    assert delta.relative == pytest.approx(0, abs=1e-5)


async def test_modules_and_ranks_that_differ_are_named(tmp_path: Path, base: Path) -> None:
    right = lora_tensors(SPEC, rank=8, targets=("q_proj", "o_proj"))
    config = {**GOOD, "r": 8, "target_modules": ["o_proj", "q_proj"], "peft_version": "9"}
    found = await compare(tmp_path, base, right, config)
    assert found.added == [f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)]
    assert found.removed == [f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1)]
    assert {change.field for change in found.config or ()} == {"r", "target_modules"}
    assert found.layers[0] == LayerRanks(0, {"q_proj": 4, "v_proj": 4}, {"q_proj": 8, "o_proj": 8})
    (a,) = [tensor for tensor in found.tensors if tensor.name == f"{Q0}.lora_A"]
    assert (a.change, a.relative) == (None, None)
    (delta,) = [one for one in found.deltas if one.module == Q0]
    assert delta.change is not None, "deltas of two ranks have one shape"
    (gone,) = [one for one in found.deltas if one.module == found.removed[0]]
    assert (gone.right, gone.change) == (None, None)


async def test_the_order_of_target_modules_means_nothing(tmp_path: Path, base: Path) -> None:
    found = await compare(tmp_path, base, lora_tensors(SPEC), {**GOOD, "target_modules": ["v_proj", "q_proj"]})
    assert found.config == []


async def test_a_damaged_blob_is_told_as_such(tmp_path: Path, base: Path) -> None:
    left = write_adapter(tmp_path / "left", GOOD, lora_tensors(SPEC))
    right = write_adapter(tmp_path / "right", GOOD, lora_tensors(SPEC))
    (right / CONFIG_NAME).write_text(json.dumps({"r": "x"}))
    with pytest.raises(OSError, match="missing or damaged"):
        await diff_versions(side(left), side(right), base, "auto")


async def test_configs_are_those_that_were_uploaded_and_not_the_blobs(tmp_path: Path, base: Path) -> None:
    blob = write_adapter(tmp_path / "blob", {**GOOD, "loftq_config": {"of": "another"}}, lora_tensors(SPEC))
    mine = [json.dumps({**GOOD, "loftq_config": {"of": one}}).encode() for one in ("me", "us")]
    found = await diff_versions(Side(blob, mine[0]), Side(blob, mine[1]), base, "auto")
    assert found.config == [ConfigChange("loftq_config", {"of": "me"}, {"of": "us"})]
    assert (await diff_versions(Side(blob, mine[0]), Side(blob, None), base, "auto")).config is None
