"""Small bases and adapters for the tests of images, intake and blobs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from stencilpress.engine.image import Finding, Tensor, module_name, places
from stencilpress.engine.spec import Dtype, ModelSpec, Rope
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.intake_records import Accepted, IntakeLimits, IntakeRequest, Rejected
from stencilpress.gateway.intake_worker import inspect
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME

PREFIX = "base_model.model."
BASE_ID = "acme/tiny-llama"
GOOD: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": BASE_ID,
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
}
"""The config of ``lora_tensors`` as they come by default."""
FIRST_A = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
FIRST_B = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"


def tiny_spec(dtype: Dtype = "bfloat16", **changes: Any) -> ModelSpec:
    """Two layers; ``changes`` replace dimensions."""
    facts: dict[str, Any] = {
        "family": "llama",
        "base_id": BASE_ID,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 128,
        "rms_norm_eps": 1e-5,
        "rope": Rope(10000.0),
        "tied_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "qk_norm": False,
        "eos_ids": (1,),
        "dtype": dtype,
    }
    return ModelSpec(**{**facts, **changes})


def write_base(folder: Path, spec: ModelSpec, aliases: tuple[str, ...] = ()) -> Path:
    """A model folder from which ``load_spec`` makes ``spec``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
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
        "eos_token_id": list(spec.eos_ids),
        "torch_dtype": spec.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "base.json").write_text(json.dumps({"id": spec.base_id, "aliases": aliases}))
    return folder


def lora_tensors(
    spec: ModelSpec,
    rank: int = 4,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    seed: int = 0,
    dtype: type[np.floating[Any]] = np.float32,
) -> dict[str, Tensor]:
    """A and B of the targets in every layer, under PEFT's names."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for place in places(spec):
        projection = spec.groups[place.group].projections[place.projection]
        if projection.name in targets:
            name = PREFIX + module_name(spec, place)
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, projection.in_features)).astype(dtype)
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((projection.out_features, rank)).astype(dtype)
    return tensors


def safetensors_bytes(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The file as the format describes it."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int8": "I8"}
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        end = len(data) + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [len(data), end]}
        data += tensor.tobytes()
    return frame(json.dumps(header).encode(), data)


def frame(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    (folder / WEIGHTS_NAME).write_bytes(safetensors_bytes(tensors))
    return folder


class Desk:
    """One base and one upload folder, with a good adapter in it until a test spoils it."""

    def __init__(self, folder: Path) -> None:
        self.spec: ModelSpec = tiny_spec("bfloat16")
        self.model_dir = write_base(folder / "base", self.spec, aliases=("tiny",))
        self.folder = write_adapter(folder / "upload", GOOD, lora_tensors(self.spec))

    def config(self, **changes: Any) -> None:
        """Write the config with some fields changed."""
        (self.folder / CONFIG_NAME).write_text(json.dumps({**GOOD, **changes}))

    def weights(self, tensors: dict[str, Tensor] | bytes) -> None:
        content = tensors if isinstance(tensors, bytes) else safetensors_bytes(tensors)
        (self.folder / WEIGHTS_NAME).write_bytes(content)

    def inspect(self, limits: IntakeLimits | None = None, *, assert_base: bool = False) -> Accepted | Rejected:
        """The worker's own function, in this process."""
        return inspect(
            IntakeRequest(
                folder=str(self.folder),
                model_dir=str(self.model_dir),
                dtype="auto",
                limits=limits or IntakeLimits(),
                base_check="asserted" if assert_base else "named",
                archive="",
                cpu_limit_s=60,
                memory_limit_bytes=1 << 31,
            )
        )

    def findings(self, limits: IntakeLimits | None = None, *, assert_base: bool = False) -> tuple[Finding, ...]:
        verdict = self.inspect(limits, assert_base=assert_base)
        assert isinstance(verdict, Rejected), verdict
        assert sorted(path.name for path in self.folder.iterdir() if path.name.startswith("image")) == []
        return verdict.findings

    def only(self, limits: IntakeLimits | None = None, *, assert_base: bool = False) -> Finding:
        (finding,) = self.findings(limits, assert_base=assert_base)
        return finding
