"""A tiny random base with a tokenizer, and PEFT adapters for it: the real formats, written by their own libraries."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

BASE_ID = "acme/Tiny-Llama"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
EOS = "<|eos|>"


def save_base(folder: Path) -> Path:
    """Two layers of random weights as transformers saves them, and a byte-level tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(
    folder: Path, texts: Iterable[str] = (), *, vocab_size: int = 30_000, template: str = TEMPLATE
) -> int:
    """A byte-level tokenizer of at most so many tokens, merged as often as ``texts`` give; returns how many it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "chat_template": template}))
    return tokenizer.get_vocab_size()


def save_adapter(folder: Path, base: Path, *, seed: int, declared: str | None = BASE_ID, **changes: Any) -> Path:
    """A LoRA adapter with random weights as PEFT saves it, naming ``declared`` as its base."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT still uses a deprecated name of transformers
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(init_lora_weights=False, **options))
    model.peft_config["default"].base_model_name_or_path = declared
    model.save_pretrained(folder, save_embedding_layers=False)  # finding out would ask the model hub
    return folder
