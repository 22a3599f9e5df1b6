"""Other systems on the same GPU, shape and requests: transformers + PEFT and vLLM, where they are installed.

Each serves the bench's own base: a model folder as it is, or a shape with random weights of the peer's own making.
Adapters are PEFT folders of the case's ranks and projections. Greedy, exact lengths, token ids in and out.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from bench.gpu_base import Base
from bench.gpu_random import AdapterKind
from stencilpress.engine.spec import ModelSpec

DEVICE = "cuda"
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 files of a moment, in memory where there is such a place


class Peer(Protocol):
    """A system that serves one base and some adapters."""

    system: str

    @classmethod
    def serving(cls, base: Base, kinds: Sequence[AdapterKind], requests: int, slots: int = 0) -> Any:
        """A context with the peer ready for so many requests at once over these adapters, of which it has as many as
        it is best with, or ``slots``, on the GPU at once."""

    def elapsed_s(self, prompts: Sequence[Sequence[int]], digests: Sequence[str], new_tokens: int) -> float:
        """Seconds for ``new_tokens`` of every request; ``digests`` name adapters, "" the base."""


def installed(names: Sequence[str]) -> Iterator[type[Peer]]:
    """The peers that can be measured here; says so of those that cannot."""
    for name in dict.fromkeys(names):
        if importlib.util.find_spec(name) is None:
            print(f"peer {name} is not installed: not measured", flush=True)
        else:
            yield PEERS[name]


class Peft:
    """transformers' ``generate``; adapters of one batch by PEFT's ``adapter_names``. Their weights stay in the base's
    dtype, as everywhere here: PEFT would widen them, which training needs."""

    def __init__(self, model: Any, names: dict[str, str]) -> None:
        self.system = f"peft-{version('peft')}"
        self._model = model
        self._names = names

    @classmethod
    @contextmanager
    def serving(
        cls,
        base: Base,
        kinds: Sequence[AdapterKind],
        requests: int,  # noqa: ARG003
        slots: int = 0,  # noqa: ARG003
    ) -> Iterator[Peft]:
        from peft import PeftModel
        from transformers import AutoConfig, AutoModelForCausalLM

        with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
            dtype = getattr(torch, base.spec.dtype)
            config = AutoConfig.from_pretrained(model_folder(base, Path(folder) / "model"))
            with torch.device(DEVICE):
                if base.folder is None:
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
                else:
                    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=dtype).eval()
            names = {}
            for i, kind in enumerate(kinds):
                path = write_adapter(base.spec, kind, Path(folder) / f"adapter-{i}")
                if i == 0:
                    model = PeftModel.from_pretrained(model, path, adapter_name="a0", autocast_adapter_dtype=False)
                else:
                    model.load_adapter(path, adapter_name=f"a{i}", autocast_adapter_dtype=False)
                names[kind.digest] = f"a{i}"
            peer = cls(model.eval(), names)
            del model
            yield peer
            peer.release()

    def release(self) -> None:
        """Give the device's memory back, whoever still has this object."""
        del self._model
        _free()

    @torch.inference_mode()
    def elapsed_s(self, prompts: Sequence[Sequence[int]], digests: Sequence[str], new_tokens: int) -> float:
        ids = torch.tensor(prompts, device=DEVICE)
        options: dict[str, Any] = {}
        if self._names:
            options["adapter_names"] = [self._names[digest] if digest else "__base__" for digest in digests]
        _wait()
        start = time.perf_counter()
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        _wait()
        elapsed = time.perf_counter() - start
        assert out.shape[1] == ids.shape[1] + new_tokens
        return elapsed


class Vllm:
    """vLLM's offline engine with its defaults, and as many adapter slots as the case has adapters."""

    def __init__(self, llm: Any, requests: dict[str, Any]) -> None:
        self.system = f"vllm-{version('vllm')}"
        self._llm = llm
        self._requests = requests

    @classmethod
    @contextmanager
    def serving(cls, base: Base, kinds: Sequence[AdapterKind], requests: int, slots: int = 0) -> Iterator[Vllm]:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
            options: dict[str, Any] = {}
            if kinds:
                targets = sorted({target for kind in kinds for target in targets_of(base.spec, kind)})
                options = {
                    "enable_lora": True,
                    "max_loras": slots or len(kinds),
                    "max_cpu_loras": len(kinds),
                    "max_lora_rank": max(kind.rank for kind in kinds),
                    "lora_target_modules": targets,
                }
            llm = LLM(
                model=str(model_folder(base, Path(folder) / "model")),
                load_format="dummy" if base.folder is None else "auto",
                skip_tokenizer_init=True,
                dtype=base.spec.dtype,
                max_num_seqs=max(256, requests),
                max_model_len=min(1024, base.spec.max_position),
                enable_prefix_caching=False,
                **options,
            )
            loras = {
                kind.digest: LoRARequest(f"a{i}", i + 1, str(write_adapter(base.spec, kind, Path(folder) / f"a{i}")))
                for i, kind in enumerate(kinds)
            }
            peer = cls(llm, loras)
            del llm
            yield peer
            peer.release()

    def release(self) -> None:
        """The same; its engine is a process of its own, which ends with the last reference."""
        del self._llm
        _free()

    def elapsed_s(self, prompts: Sequence[Sequence[int]], digests: Sequence[str], new_tokens: int) -> float:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, min_tokens=new_tokens, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        loras = [self._requests[digest] if digest else None for digest in digests] if any(digests) else None
        start = time.perf_counter()
        answers = self._llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts], parameters, lora_request=loras, use_tqdm=False
        )
        elapsed = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == new_tokens for answer in answers)
        return elapsed


PEERS: dict[str, type[Peer]] = {"peft": Peft, "vllm": Vllm}


def model_folder(base: Base, folder: Path) -> Path:
    """The base's own folder, or a new one with the config of its shape."""
    if base.folder is not None:
        return base.folder
    spec = base.spec
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": spec.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def targets_of(spec: ModelSpec, kind: AdapterKind) -> list[str]:
    """Names of the projections that a kind adapts."""
    return [
        projection.name
        for group, mask in zip(spec.groups, kind.masks, strict=True)
        for p, projection in enumerate(group.projections)
        if mask >> p & 1
    ]


def write_adapter(spec: ModelSpec, kind: AdapterKind, folder: Path) -> Path:
    """A random adapter of a kind as PEFT saves one."""
    folder.mkdir()
    targets = targets_of(spec, kind)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": kind.rank, "lora_alpha": kind.rank,
              "target_modules": targets, "base_model_name_or_path": spec.base_id, "bias": "none"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    dtype, tensors = getattr(torch, spec.dtype), {}
    for layer in range(spec.num_layers):
        for group in spec.groups:
            for projection in group.projections:
                if projection.name not in targets:
                    continue
                block = "mlp" if projection.name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                name = f"base_model.model.model.layers.{layer}.{block}.{projection.name}"
                for part, shape in (
                    ("A", (kind.rank, projection.in_features)),
                    ("B", (projection.out_features, kind.rank)),
                ):
                    tensors[f"{name}.lora_{part}.weight"] = torch.randn(shape).div_(32).to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # of no effect where there is no GPU


def _memory_folder() -> Path | None:
    return MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
