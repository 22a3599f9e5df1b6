"""What a base model looks like: the single place for its shapes and for the geometry of a page.

Everything here is pure and torch-free: the gateway's intake, the engine's policy and the device code
all derive their numbers from one :class:`ModelSpec`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
DEFAULT_PAGE_TOKENS = 16
TABLE_ENTRY_WORDS = 4
"""int64 words of one (layer, group) entry in a slice table; the layout is in kernels/sgmv."""


class SpecError(ValueError):
    """A model folder that this engine cannot serve; the text names the field and what is supported."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. ``kind`` is ``default`` or ``llama3`` (the frequency bands of Llama 3.x)."""

    theta: float
    kind: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer that an adapter may adapt. Its weight is ``(out_features, in_features)``."""

    name: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Group:
    """Projections that read the same input and are adapted in one launch."""

    name: str
    projections: tuple[Projection, ...]

    @property
    def in_features(self) -> int:
        return self.projections[0].in_features

    @property
    def out_features(self) -> int:
        return sum(p.out_features for p in self.projections)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of one base model, as served (``dtype`` is the engine's, not the file's)."""

    family: str
    base_id: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    eos_ids: tuple[int, ...]
    dtype: Dtype

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def groups(self) -> tuple[Group, ...]:
        """The launches of one layer, in the order of a layer's computation."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return (
            Group(
                "qkv",
                (
                    Projection("q_proj", hidden, self.q_size),
                    Projection("k_proj", hidden, self.kv_size),
                    Projection("v_proj", hidden, self.kv_size),
                ),
            ),
            Group("o", (Projection("o_proj", self.q_size, hidden),)),
            Group("gate_up", (Projection("gate_proj", hidden, inner), Projection("up_proj", hidden, inner))),
            Group("down", (Projection("down_proj", inner, hidden),)),
        )

    @property
    def kv_elems_per_token(self) -> int:
        return self.num_layers * 2 * self.kv_size

    def fingerprint(self) -> str:
        """Names the adapter images that fit this base: equal for equal shapes, base id and dtype."""
        facts = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How the pool is cut. A page is ``page_tokens`` tokens of KV for all layers, or adapter slices."""

    page_tokens: int
    page_elems: int
    dtype_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.page_elems * self.dtype_bytes

    def pages_for_tokens(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


def page_geometry(spec: ModelSpec, max_lora_rank: int) -> PageGeometry:
    """The smallest page of at least 16 tokens that holds the widest slice and the longest slice table.

    Doubling the tokens of a page keeps it a power of two, which attention kernels want.
    """
    widest = max(slice_elems(g, tuple(range(len(g.projections)))) for g in spec.groups) * spec.dtype_bytes
    entries = spec.num_layers * len(spec.groups)
    table = 8 * entries * (TABLE_ENTRY_WORDS + max_lora_rank)
    tokens = DEFAULT_PAGE_TOKENS
    while tokens * spec.kv_elems_per_token * spec.dtype_bytes < max(widest, table):
        tokens *= 2
    return PageGeometry(tokens, tokens * spec.kv_elems_per_token, spec.dtype_bytes)


def slice_elems(group: Group, present: tuple[int, ...]) -> int:
    """Elements of one rank slice: a row of A and a row of Bᵀ of each present projection.

    Rounded up to 8 elements so that every slice starts on a 16-byte boundary; for the usual
    dimensions (multiples of 8) nothing is added.
    """
    used = sum(group.projections[i].in_features + group.projections[i].out_features for i in present)
    return -(-used // 8) * 8


def load_spec(model_dir: Path, dtype: Dtype | Literal["auto"] = "auto") -> ModelSpec:
    """Read ``config.json`` (and ``base.json``, which carries the base's id) of a model folder.

    Raises :class:`SpecError` for an architecture, activation or rope kind that is not supported.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path.name}: {error}") from error
    base = _base_record(model_dir)
    try:
        return _spec_from_config(config, str(base["id"]), dtype, _eos_ids(model_dir, config))
    except KeyError as error:
        raise SpecError(f"config.json lacks {error}") from error


def base_ids(model_dir: Path) -> tuple[str, ...]:
    """The base's id followed by its configured aliases."""
    base = _base_record(model_dir)
    return (str(base["id"]), *(str(alias) for alias in base.get("aliases", ())))


def _base_record(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "base.json"
    if not path.exists():
        raise SpecError(f"{model_dir.name} has no base.json; bring the model in with `stencilpress pull`")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _eos_ids(model_dir: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = model_dir / "generation_config.json"
    source = json.loads(generation.read_text()) if generation.exists() else {}
    eos = source.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)


def _spec_from_config(
    config: dict[str, Any], base_id: str, dtype: Dtype | Literal["auto"], eos_ids: tuple[int, ...]
) -> ModelSpec:
    family = config["model_type"]
    if family not in FAMILIES:
        raise SpecError(f"model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise SpecError(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("mlp_bias"):
        raise SpecError("mlp_bias is not supported")
    heads = config["num_attention_heads"]
    served = _dtype(config) if dtype == "auto" else dtype
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        family=family,
        base_id=base_id,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_position=_max_position(config),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        o_bias=bias and family != "qwen2",
        qk_norm=family == "qwen3",
        eos_ids=eos_ids,
        dtype=served,
    )


def _dtype(config: dict[str, Any]) -> Dtype:
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if stored not in DTYPE_BYTES:
        raise SpecError(f"dtype {stored!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return cast(Dtype, stored)


def _max_position(config: dict[str, Any]) -> int:
    """The context is cut to a sliding window where a model has one: full attention is exact up to it."""
    longest = int(config["max_position_embeddings"])
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", config["model_type"] == "mistral"):
        return longest
    return min(longest, int(window))


def _rope(config: dict[str, Any]) -> Rope:
    """Read either spelling: ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise SpecError(f"rope type {kind!r} is not supported; supported: default, llama3")
    return Rope(
        theta,
        "llama3",
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position=int(scaling["original_max_position_embeddings"]),
    )
