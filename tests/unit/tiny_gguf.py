"""A GGUF file with the demo base's structure, a few hundred kilobytes large and written by the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 2, 1, 32, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The merges with digits exist to be forbidden: the pre-tokenizer keeps every digit alone.
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ġ 1", "Ġ Ġ"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_gguf(
    path: Path, *, architecture: str = "llama", pre_tokenizer: str = "smollm", extra_tensor: str | None = None
) -> None:
    """Write random weights in F32, F16, Q8_0 and Q4_1; the same bytes every time."""
    writer = GGUFWriter(path, architecture)
    writer.add_license("apache-2.0")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab_size = _add_tokenizer(writer, pre_tokenizer)
    _add_tensors(writer, vocab_size)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, pre_tokenizer: str) -> int:
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = SPECIAL + byte_tokens + [merge.replace(" ", "") for merge in MERGES]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def _add_tensors(writer: GGUFWriter, vocab_size: int) -> None:
    rng = np.random.default_rng(5)

    def add(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    kinds = GGMLQuantizationType
    add("token_embd.weight", (vocab_size, HIDDEN), kinds.Q8_0)
    add("output_norm.weight", (HIDDEN,), kinds.F32)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (HIDDEN,), kinds.F32)
        add(f"blk.{layer}.attn_q.weight", (HEADS * HEAD_DIM, HIDDEN), kinds.Q4_1)
        add(f"blk.{layer}.attn_k.weight", (KV_HEADS * HEAD_DIM, HIDDEN), kinds.Q4_1)
        add(f"blk.{layer}.attn_v.weight", (KV_HEADS * HEAD_DIM, HIDDEN), kinds.F16)
        add(f"blk.{layer}.attn_output.weight", (HIDDEN, HEADS * HEAD_DIM), kinds.Q8_0)
        add(f"blk.{layer}.ffn_norm.weight", (HIDDEN,), kinds.F32)
        add(f"blk.{layer}.ffn_gate.weight", (INNER, HIDDEN), kinds.Q4_1)
        add(f"blk.{layer}.ffn_up.weight", (INNER, HIDDEN), kinds.Q4_1)
        add(f"blk.{layer}.ffn_down.weight", (HIDDEN, INNER), kinds.Q4_1)
