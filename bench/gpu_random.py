"""Random weights and random adapters in real shapes, made on the device or written as an engine's files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from stencilpress.engine.image import Image, ImageHeader, Record, image_name, layout
from stencilpress.engine.image_check import Checksum
from stencilpress.engine.image_format import encode_header
from stencilpress.engine.incoming import Hosted, Incoming
from stencilpress.engine.loader import Loader
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.model.linear import Linear, make_linear
from stencilpress.engine.model.llama import LayerWeights, Weights
from stencilpress.engine.model.threads import Threads
from stencilpress.engine.spec import ModelSpec, Rope, slice_elems

LLAMA3_8B = ModelSpec(
    family="llama",
    base_id="bench/llama3-8b",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope=Rope(500000.0),
    tied_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    eos_ids=(),
    dtype="bfloat16",
)
SHAPES = {"llama3-8b": LLAMA3_8B}
ATTENTION = (7, 1, 0, 0)
"""Masks of the adapted projections, by group: q, k, v and o."""
ALL7 = (7, 1, 3, 1)
MAX_RANK = 64


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """An adapter's name, rank and adapted projections."""

    name: str
    rank: int
    masks: tuple[int, ...] = ATTENTION

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


def random_weights(spec: ModelSpec, device: torch.device) -> Weights:
    """Normal weights that keep activations near one."""
    dtype = getattr(torch, spec.dtype)
    threads = Threads()

    def linear(rows: int, columns: int) -> Linear:
        return make_linear(_normal((rows, columns), columns**-0.5, dtype, device), None, threads)

    def norm() -> Tensor:
        return torch.empty(spec.hidden_size, dtype=dtype, device=device).uniform_(0.5, 1.5)

    qkv, o, gate_up, down = spec.groups
    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=linear(qkv.out_features, qkv.in_features),
            q_norm=None,
            k_norm=None,
            o=linear(o.out_features, o.in_features),
            mlp_norm=norm(),
            gate_up=linear(gate_up.out_features, gate_up.in_features),
            down=linear(down.out_features, down.in_features),
        )
        for _ in range(spec.num_layers)
    )
    embedding = _normal((spec.vocab_size, spec.hidden_size), 1.0, dtype, device)
    return Weights(embedding, layers, norm(), linear(spec.vocab_size, spec.hidden_size), threads)


def _normal(shape: tuple[int, int], std: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=std)


class RandomImages:
    """Images of adapters whose weights are runs of one random buffer in host memory."""

    def __init__(self, spec: ModelSpec, kinds: Sequence[AdapterKind], device: torch.device) -> None:
        self.kinds = {kind.digest: (i, kind) for i, kind in enumerate(kinds)}
        self._spec = spec
        most = max((payload_bytes(spec, kind) for kind in kinds), default=0)
        dtype = getattr(torch, spec.dtype)
        elems = most // spec.dtype_bytes + 4096 * len(kinds)
        random = torch.empty(elems, dtype=dtype, device=device).normal_(std=1 / 32)
        self._buffer = torch.empty(elems, dtype=dtype, pin_memory=device.type == "cuda").copy_(random)

    def image(self, digest: str) -> Image:
        """The image of a kind."""
        index, kind = self.kinds[digest]
        spec = self._spec
        records = records_of(spec, kind)
        header = ImageHeader(
            digest, spec.fingerprint(), spec.dtype, spec.num_layers, len(spec.groups), records, payload_checksum=0
        )
        elems = header.payload_bytes // spec.dtype_bytes
        payload = self._buffer[index * 4096 : index * 4096 + elems].view(torch.uint8).numpy()
        return Image(header, payload)

    def write(self, adapters_dir: Path) -> None:
        """Write every image where the engine's loader looks for it."""
        for digest in self.kinds:
            image = self.image(digest)
            folder = adapters_dir / digest
            folder.mkdir()
            checksum = Checksum()
            checksum.update(image.payload.data)
            header = replace(image.header, payload_checksum=checksum.value())
            with (folder / image_name(header.fingerprint)).open("wb") as file:
                file.write(encode_header(header))
                file.write(image.payload.data)


class RandomLoader(Loader):
    """The engine's loader, whose images are in host memory already."""

    def __init__(self, spec: ModelSpec, memory: PoolMemory, images: RandomImages, wake: Callable[[], None]) -> None:
        self._images = images
        super().__init__(Path("/nonexistent"), spec, memory, MAX_RANK, wake)

    def _fetch(self, digest: str, _incoming: Incoming) -> Hosted:
        image = self._images.image(digest)
        return Hosted(image, layout(image.header, self._memory.geometry))


def records_of(spec: ModelSpec, kind: AdapterKind) -> tuple[Record, ...]:
    """The same in every layer, all scales one."""
    of_layer = []
    for group, mask in zip(spec.groups, kind.masks, strict=True):
        present = tuple(p for p in range(3) if mask >> p & 1)
        elems = slice_elems(group, present) if present else 0
        of_layer.append(Record(kind.rank, mask, elems, (1.0, 1.0, 1.0)) if present else Record())
    return tuple(of_layer) * spec.num_layers


def payload_bytes(spec: ModelSpec, kind: AdapterKind) -> int:
    """An adapter's weights at true rank."""
    return sum(record.rank * record.slice_elems for record in records_of(spec, kind)) * spec.dtype_bytes
