"""Reading a base model's safetensors: names and shapes checked, q/k/v and gate/up joined, one layer at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stencilpress.engine.model.linear import Linear, make_linear
from stencilpress.engine.model.llama import LayerWeights, Weights
from stencilpress.engine.model.threads import Threads
from stencilpress.engine.spec import ModelSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class WeightsError(ValueError):
    """Weights that do not fit ``config.json``; the text names the tensor or file."""


def load_weights(model_dir: Path, spec: ModelSpec, device: torch.device) -> Weights:
    """Read the model folder onto a device in the served dtype.

    Raises :class:`WeightsError` for a missing, surplus or misshapen tensor and for an unreadable file. The peak is
    the model plus one layer, and on a CPU the embedding twice when the head shares it (each in its own layout).
    """
    threads = Threads()
    with ExitStack() as files:
        source = _Source(model_dir, files, getattr(torch, spec.dtype), device)
        vocab = (spec.vocab_size, spec.hidden_size)
        embedding = source.take("model.embed_tokens.weight", vocab)
        weights = Weights(
            embedding=embedding,
            layers=tuple(_layer(source, spec, f"model.layers.{n}.", threads) for n in range(spec.num_layers)),
            final_norm=source.take("model.norm.weight", (spec.hidden_size,)),
            threads=threads,
            head=make_linear(
                embedding if spec.tied_embeddings else source.take("lm_head.weight", vocab), None, threads
            ),
        )
        source.finish(may_remain={"lm_head.weight"} if spec.tied_embeddings else set())
    return weights


def _layer(source: _Source, spec: ModelSpec, prefix: str, threads: Threads) -> LayerWeights:
    def linear(block: str, names: str, bias: bool) -> Linear:
        projections = [projections_by_name[name] for name in names.split()]
        full = [f"{prefix}{block}.{p.name}" for p in projections]
        weight = [
            source.take(f"{name}.weight", (p.out_features, p.in_features))
            for name, p in zip(full, projections, strict=True)
        ]
        biases = [
            source.take(f"{name}.bias", (p.out_features,)) for name, p in zip(full, projections, strict=True) if bias
        ]
        return make_linear(_joined(weight), _joined(biases) if bias else None, threads)

    def norm(name: str, size: int) -> Tensor:
        return source.take(f"{prefix}{name}.weight", (size,))

    projections_by_name = {p.name: p for group in spec.groups for p in group.projections}
    return LayerWeights(
        input_norm=norm("input_layernorm", spec.hidden_size),
        qkv=linear("self_attn", "q_proj k_proj v_proj", spec.qkv_bias),
        q_norm=norm("self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
        o=linear("self_attn", "o_proj", spec.o_bias),
        mlp_norm=norm("post_attention_layernorm", spec.hidden_size),
        gate_up=linear("mlp", "gate_proj up_proj", False),
        down=linear("mlp", "down_proj", False),
    )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class _Source:
    """The tensors of all files by name; each is taken once."""

    def __init__(self, model_dir: Path, files: ExitStack, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._holders: dict[str, Any] = {}
        for path in _files(model_dir):
            try:
                holder = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path.name}: {error}") from error
            self._holders.update(dict.fromkeys(holder.keys(), holder))

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        holder = self._holders.pop(name, None)
        if holder is None:
            raise WeightsError(f"tensor {name} is missing")
        tensor: Tensor = holder.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"tensor {name} has shape {tuple(tensor.shape)}, config.json implies {shape}")
        if not tensor.is_floating_point():
            raise WeightsError(f"tensor {name} is {tensor.dtype}: quantised weights are not supported")
        return tensor.to(self._device, self._dtype, copy=True)

    def finish(self, may_remain: set[str]) -> None:
        """Raise if a tensor was not taken: the model would compute without it. Buffers that are derived may remain."""
        surplus = sorted(n for n in self._holders if n not in may_remain and not n.endswith("rotary_emb.inv_freq"))
        if surplus:
            more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
            raise WeightsError(f"tensor {surplus[0]}{more} is not part of this architecture")


def _files(model_dir: Path) -> Iterator[Path]:
    """The single file, or the shards that the index names."""
    index = model_dir / INDEX_FILE
    if not index.exists():
        yield model_dir / SINGLE_FILE
        return
    try:
        names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{INDEX_FILE}: {error}") from error
    for name in sorted(names):
        if "/" in name or name == "..":
            raise WeightsError(f"{INDEX_FILE} names a file outside the model folder: {name}")
        yield model_dir / name
