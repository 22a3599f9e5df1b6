"""How large the pool is, and settings that depend on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stencilpress.engine.limits import derive_limits
from stencilpress.engine.memory import CPU_POOL_BYTES, allocate_pool
from stencilpress.engine.settings import EngineSettings, SettingsError, read_settings, suit_device
from stencilpress.engine.spec import ModelSpec, Rope, page_geometry

SPEC = ModelSpec(
    family="llama", base_id="x", vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_position=64, rms_norm_eps=1e-5, rope=Rope(1e4), tied_embeddings=False,
    qkv_bias=False, o_bias=False, qk_norm=False, eos_ids=(), dtype="bfloat16",
)  # fmt: skip
GEOMETRY = page_geometry(SPEC, 16)


def _settings(**given: Any) -> EngineSettings:
    return EngineSettings(model_dir="", adapters_dir="", **given)


def test_the_pool_is_whole_pages_of_what_is_set() -> None:
    memory = allocate_pool(SPEC, GEOMETRY, _settings(pool_bytes=5 * GEOMETRY.page_bytes + 1), torch.device("cpu"))
    assert memory.num_pages == 5
    assert memory.flat.dtype == torch.bfloat16
    with pytest.raises(SettingsError, match="STENCILPRESS_POOL_BYTES is less than two pages"):
        allocate_pool(SPEC, GEOMETRY, _settings(pool_bytes=2 * GEOMETRY.page_bytes - 1), torch.device("cpu"))


def test_a_cpu_s_pool_has_a_bound() -> None:
    memory = allocate_pool(SPEC, GEOMETRY, _settings(), torch.device("cpu"))
    assert 2 <= memory.num_pages <= CPU_POOL_BYTES // GEOMETRY.page_bytes


def test_zeros_become_what_suits_the_device_and_nothing_else_changes() -> None:
    cpu, gpu = suit_device(_settings(max_num_seqs=7), "cpu"), suit_device(_settings(max_loras=9), "cuda")
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens, cpu.max_loras) == (7, 512, 16)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens, gpu.max_loras) == (256, 8192, 9)
    assert cpu == _settings(max_num_seqs=7, max_num_batched_tokens=512, max_loras=16)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_loras", 10**9),
        ("max_loras", -1),
        ("max_num_seqs", 10**15),
        ("max_num_batched_tokens", 10**18),
        ("max_waiting", 0),
        ("max_cpu_loras", 0),
        ("max_cpu_lora_bytes", 10**23),
        ("adapter_pool_bytes", 10**23),
        ("pool_bytes", 10**23),
        ("max_lora_rank", 1000),
        ("max_model_len", -1),
    ],
)
def test_a_value_that_no_machine_can_serve_is_named_before_anything_is_allocated(name: str, value: int) -> None:
    variable = f"STENCILPRESS_{name.upper()}"
    given = {"STENCILPRESS_MODEL_DIR": "m", "STENCILPRESS_ADAPTERS_DIR": "a", variable: str(value)}
    with pytest.raises(SettingsError, match=variable):
        read_settings(EngineSettings, given)


def test_a_context_of_one_token_is_refused_for_it_serves_nobody() -> None:
    two = derive_limits(_settings(max_model_len=2), SPEC, GEOMETRY)
    assert two.max_model_len == 2
    with pytest.raises(SettingsError, match="STENCILPRESS_MAX_MODEL_LEN"):
        derive_limits(_settings(max_model_len=1), SPEC, GEOMETRY)
