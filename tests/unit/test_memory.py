"""What an accelerator keeps free beside the pool."""

from __future__ import annotations

from dataclasses import replace

from stencilpress.engine.memory import step_bytes
from stencilpress.engine.settings import EngineSettings
from stencilpress.engine.spec import ModelSpec, Rope

SPEC = ModelSpec(
    family="llama", base_id="x", vocab_size=1000, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_position=64, rms_norm_eps=1e-5, rope=Rope(1e4), tied_embeddings=False,
    qkv_bias=False, o_bias=False, qk_norm=False, eos_ids=(), dtype="bfloat16",
)  # fmt: skip
SETTINGS = EngineSettings(model_dir="", adapters_dir="", max_num_seqs=4, max_num_batched_tokens=8, max_lora_rank=16)


def test_a_step_is_sized_by_its_rows_draws_and_adapters() -> None:
    rows = 2 * 8 * (3 * 128 + 4 * 64 + 3 * (64 + 2 * 32)) * 2
    logits = 4 * 1000 * (2 + 32)
    addresses = 16 * 2 * 4 * 4 * 16
    assert step_bytes(SPEC, SETTINGS) == rows + logits + addresses


def test_every_seat_is_a_row_of_a_step() -> None:
    assert step_bytes(SPEC, SETTINGS) < step_bytes(replace(SPEC, vocab_size=1001), SETTINGS)
    few = EngineSettings(model_dir="", adapters_dir="", max_num_seqs=8, max_num_batched_tokens=4, max_lora_rank=16)
    many = EngineSettings(model_dir="", adapters_dir="", max_num_seqs=8, max_num_batched_tokens=8, max_lora_rank=16)
    assert step_bytes(SPEC, few) == step_bytes(SPEC, many)
