"""Tiny random models of every family and PEFT adapters on them, made by transformers and PEFT themselves."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stencilpress.engine.image import adapter_digest
from stencilpress.engine.loader import Loader
from stencilpress.engine.memory import PoolMemory, allocate_pool
from stencilpress.engine.model.llama import Weights
from stencilpress.engine.model.weights import load_weights
from stencilpress.engine.plan import Fetched, FetchOrder, LoadResult, Placed, PlaceOrder, Sized
from stencilpress.engine.settings import EngineSettings
from stencilpress.engine.spec import Dtype, ModelSpec, load_spec, page_geometry
from stencilpress.kernels.sgmv.views import AdapterView

if TYPE_CHECKING:
    from stencilpress.engine.runner import Runner

VOCAB = 97
MAX_RANK = 96
CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied-llama3-rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "llama-biased": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


def save_model(folder: Path, family: str, **overrides: Any) -> Any:
    """A random model of a family, saved as a model folder of the engine; returns it."""
    config = AutoConfig.for_model(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            **FAMILIES[family],
            **overrides,
        }
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # the defaults are zero biases, unit norms, 0.02 weights
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0, 0.5 if name.endswith("bias") else 0.15)
    model.save_pretrained(folder)
    (folder / "base.json").write_text(json.dumps({"id": f"test/{family}"}))
    return model


def save_adapter(adapters_dir: Path, model_dir: Path, seed: int, **config: Any) -> str:
    """A random adapter made and saved by PEFT, stored as the engine expects it; returns its digest."""
    staging = adapters_dir / "staging"
    torch.manual_seed(seed)
    with _others_warnings():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config))
        adapted.save_pretrained(staging)
    parsed = json.loads((staging / "adapter_config.json").read_text())
    digest = adapter_digest(load_spec(model_dir), parsed, load_file(staging / "adapter_model.safetensors"))
    shutil.move(staging, adapters_dir / digest)
    return digest


def reference_logits(
    model_dir: Path, adapter_dir: Path | None, tokens: list[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """What transformers, with PEFT for an adapter, computes for one sequence alone: (T, V)."""
    with _others_warnings():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager")
        if adapter_dir is not None:
            model = PeftModel.from_pretrained(model, adapter_dir)
    with torch.inference_mode():
        logits: Tensor = model.eval()(torch.tensor([tokens])).logits[0]
    return logits


@dataclass(frozen=True)
class Engine:
    """The device side of an engine on a model folder."""

    spec: ModelSpec
    weights: Weights
    memory: PoolMemory

    def runner(self, adapter: Callable[[str], AdapterView]) -> Runner:
        """On the CPU."""
        from stencilpress.engine.model.cpu_llama import Decoder  # numba may be missing where a GPU computes
        from stencilpress.engine.runner import Runner

        return Runner(Decoder(self.spec, self.weights, self.spec.max_position), self.memory, adapter)


def load_engine(
    model_dir: Path, pages: int, device: torch.device = CPU, dtype: Dtype | Literal["auto"] = "auto"
) -> Engine:
    """Load a model folder with a pool of so many pages, all NaN: nothing may be read before it is written."""
    spec = load_spec(model_dir, dtype)
    geometry = page_geometry(spec, MAX_RANK)
    settings = EngineSettings(model_dir=str(model_dir), adapters_dir="", pool_bytes=pages * geometry.page_bytes)
    weights = load_weights(model_dir, spec, device)
    memory = allocate_pool(spec, geometry, settings, device)
    memory.flat.fill_(torch.nan)
    return Engine(spec, weights, memory)


def placed_adapters(engine: Engine, adapters_dir: Path, digests: list[str], free: list[int]) -> Loader:
    """A loader that has brought these adapters into pages taken off ``free``."""
    ready = threading.Semaphore(0)
    loader = Loader(adapters_dir, engine.spec, engine.memory, MAX_RANK, ready.release)
    for digest in digests:
        fetched = load(loader, ready, FetchOrder(digest))
        assert isinstance(fetched, Fetched)
        assert not fetched.error
        order = PlaceOrder(digest, tuple(free.pop() for _ in range(fetched.pages)))
        assert load(loader, ready, order) == Placed(digest)
    return loader


def load(loader: Loader, ready: threading.Semaphore, order: FetchOrder | PlaceOrder) -> LoadResult:
    """Have one order carried out; ``ready`` is what the loader wakes."""
    loader.submit(order)
    while True:
        assert ready.acquire(timeout=30)
        for result in loader.results():
            if not isinstance(result, Sized):
                return result


@contextmanager
def _others_warnings() -> Iterator[None]:
    """transformers and PEFT warn of each other's deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
