"""The part of ``adapter_config.json`` that decides what a LoRA adapter computes, read as PEFT reads it.

Pure: names in, ranks and scales out. The rules are those of PEFT's ``LoraModel._create_and_replace`` and
``check_target_module_exists``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

VOCABULARY_MODULES = ("lm_head", "model.embed_tokens")
"""Modules that PEFT could adapt and this engine does not."""
FP32_TINY, FP32_HUGE = 2.0**-126, 3.4028234663852886e38


class Finding(msgspec.Struct, frozen=True):
    """One reason to refuse an adapter. ``field`` is a config key, a tensor's name or a file's name."""

    field: str
    code: str
    message: str


class AdapterError(ValueError):
    """An adapter that cannot be served. Carries every finding, not just the first."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{f.field}: {f.message}" for f in self.findings))


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that have an effect. ``msgspec.convert(config_dict, PeftConfig)`` skips all others.

    Whether the others may be skipped is intake's decision (gateway/adapter_config.py).
    """

    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...]
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    layers_to_transform: int | tuple[int, ...] | None = None
    layers_pattern: str | tuple[str, ...] | None = None
    exclude_modules: str | tuple[str, ...] | None = None


class Rules:
    """A config with its patterns compiled. Raises :class:`AdapterError` for those that do not compile."""

    def __init__(self, config: PeftConfig) -> None:
        findings: list[Finding] = []
        self._config = config
        self._ranks = _suffix_patterns("rank_pattern", config.rank_pattern, findings)
        self._alphas = _suffix_patterns("alpha_pattern", config.alpha_pattern, findings)
        self._targets = _NameMatcher("target_modules", config.target_modules, findings)
        self._excluded = _NameMatcher("exclude_modules", config.exclude_modules or (), findings)
        self._layer_index = _layer_patterns(config.layers_pattern, findings)
        if findings:
            raise AdapterError(findings)

    def rank(self, module: str) -> int:
        """The rank that the config gives a module; the first pattern that matches wins."""
        return next((rank for pattern, rank in self._ranks if pattern.match(module)), self._config.r)

    def scale(self, module: str, rank: int) -> float | None:
        """``alpha / rank``, with rsLoRA ``alpha / sqrt(rank)`` (arXiv 2312.03732); None if fp32 cannot hold it.

        A negative alpha subtracts the adapter, as in PEFT. Zero, which would serve the base, is None too.
        """
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.match(module)), self._config.lora_alpha)
        scale = alpha / math.sqrt(rank) if self._config.use_rslora else alpha / rank
        return scale if FP32_TINY <= abs(scale) <= FP32_HUGE else None

    def targets(self, module: str) -> bool:
        """Whether the config adapts a module, named as in the base: ``model.layers.0.self_attn.q_proj``."""
        if self._excluded.matches(module) or not self._targets.matches(module):
            return False
        layers = self._config.layers_to_transform
        if layers is None or layers == () or isinstance(self._config.target_modules, str):
            return True
        index = next((int(m["idx"]) for p in self._layer_index if (m := p.match(module))), None)
        return index == layers if isinstance(layers, int) else index in layers


class _NameMatcher:
    """A regular expression for the whole name, or names of which one must be a dotted suffix of it."""

    def __init__(self, field: str, wanted: str | tuple[str, ...], findings: list[Finding]) -> None:
        self._every_projection = isinstance(wanted, str) and wanted.lower() == "all-linear"
        self._names = frozenset(() if isinstance(wanted, str) else wanted)
        self._pattern = _compile(field, wanted, wanted, findings) if isinstance(wanted, str) else None

    def matches(self, module: str) -> bool:
        if self._every_projection:
            return module not in VOCABULARY_MODULES
        if self._pattern is not None:
            return self._pattern.fullmatch(module) is not None
        parts = module.split(".")
        return any(".".join(parts[start:]) in self._names for start in range(len(parts)))


T = TypeVar("T")


def _suffix_patterns(field: str, values: Mapping[str, T], findings: list[Finding]) -> list[tuple[re.Pattern[str], T]]:
    """Keys of rank_pattern and alpha_pattern match the end of a name, from a dot on."""
    compiled = ((_compile(field, key, rf"(.*\.)?({key})$", findings), value) for key, value in values.items())
    return [(pattern, value) for pattern, value in compiled if pattern is not None]


def _layer_patterns(wanted: str | tuple[str, ...] | None, findings: list[Finding]) -> list[re.Pattern[str]]:
    """Where a module's name tells its layer: behind any container, or behind those of layers_pattern."""
    names = (wanted,) if isinstance(wanted, str) else wanted or ()
    sources = [rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\." for name in names] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
    compiled = [_compile("layers_pattern", source, source, findings) for source in sources]
    return [pattern for pattern in compiled if pattern is not None]


def _compile(field: str, shown: str, source: str, findings: list[Finding]) -> re.Pattern[str] | None:
    try:
        return re.compile(source)
    except (re.error, OverflowError, RecursionError) as error:
        findings.append(Finding(field, "bad_pattern", f"{shown[:80]!r} is no regular expression: {error}"))
        return None
