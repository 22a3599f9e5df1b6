"""The models of the serve bench: a random base, PEFT's own adapters, and what transformers + PEFT make of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.tiny import save_tokenizer

BASE_ID = "bench/random-llama"
DOCS = Path(__file__).parents[1] / "docs"
VOCABULARY = 4096
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LARGE = {"hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
RANKS = (8, 16, 24, 32, 48, 64)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL7 = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def words() -> list[str]:
    """What prompts are cut from."""
    return (DOCS / "architecture.md").read_text().split()


def save_base(folder: Path, sizes: dict[str, int], device: str) -> Any:
    """A random Llama in bfloat16 as transformers saves it, with a tokenizer that learned the documentation; returns it.

    Logits have a standard deviation of two, and the residual stream is small enough that adapters show in it.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder.mkdir()
    texts = (path.read_text() for path in sorted(DOCS.glob("*.md")))
    vocab_size = save_tokenizer(folder, texts, vocab_size=VOCABULARY, template=TEMPLATE)
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=4096, eos_token_id=0, bos_token_id=None,
        tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.8, 1.2)
        else:
            scale = 2.0 / sizes["hidden_size"] ** 0.5 if "lm_head" in name else 0.9 / parameter.shape[-1] ** 0.5
            parameter.data.normal_(0, scale)
    model.save_pretrained(folder)
    return model


def save_adapter(model: Any, folder: Path, number: int, seed: int) -> int:
    """A random adapter as PEFT saves it; returns its bytes. High ranks are mostly on the attention alone."""
    from peft import LoraConfig, get_peft_model

    rank = RANKS[number % len(RANKS)]
    narrow = ["q_proj", "v_proj"] if number % 2 else ATTENTION
    targets = ALL7 if rank <= 16 or number % 12 == 5 else narrow
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=targets)
    torch.manual_seed(seed)
    with _others_warnings():
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        adapted.peft_config["default"].base_model_name_or_path = BASE_ID
        adapted.save_pretrained(folder, save_embedding_layers=False)
        adapted.unload()
    return (folder / WEIGHTS_NAME).stat().st_size


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the base and its adapters by name, and the base itself as transformers has it."""

    base: Path
    adapters: dict[str, Path]
    second: Path
    """Another version of the first adapter."""
    model: Any
    adapter_bytes: int

    @classmethod
    def made(cls, folder: Path, sizes: dict[str, int], adapters: int, device: str) -> Models:
        model = save_base(folder / "base", sizes, device)
        folders = {f"a{number:02d}": folder / f"a{number:02d}" for number in range(adapters)}
        written = sum(save_adapter(model, path, n, 100 + n) for n, path in enumerate(folders.values()))
        save_adapter(model, folder / "second", 0, 999)
        return cls(folder / "base", folders, folder / "second", model, written)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


class Reference:
    """transformers + PEFT with the base in its own dtype, and with the same weights computed with in float32."""

    def __init__(self, model: Any) -> None:
        self._models = (copy.deepcopy(model).float(), model)

    def logits(self, adapter: Path | None, sequences: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Of each sequence alone: in float32 and in the base's dtype, both (T, V) as float32 on the CPU."""
        adapted = [_adapted(model, adapter) for model in self._models]
        try:
            exact, half = ([_forward(model, ids) for ids in sequences] for model in adapted)
        finally:
            if adapter is not None:
                for model in adapted:
                    model.unload()
        return list(zip(exact, half, strict=True))


def _adapted(model: Any, adapter: Path | None) -> Any:
    from peft import PeftModel

    if adapter is None:
        return model
    with _others_warnings():
        return PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).eval()


@torch.inference_mode()
def _forward(model: Any, ids: Sequence[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([list(ids)], device=model.device)).logits[0]
    return logits.float().cpu()


@contextmanager
def _others_warnings() -> Iterator[None]:
    """transformers and PEFT warn of each other's deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
