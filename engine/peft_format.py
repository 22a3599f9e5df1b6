"""Which tensor of a PEFT LoRA adapter is which projection of a base, at what rank and scale.

Pure: it sees the parsed config and the tensors' names and shapes, and opens no file. Where PEFT would go on
with a warning, and serve something else than what was trained, this module reports a finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stencilpress.engine.peft_config import VOCABULARY_MODULES, AdapterError, Finding, PeftConfig, Rules
from stencilpress.engine.spec import ModelSpec, Projection

PARENTS = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}
"""The block of a layer in which each group's projections stand, in the names of the Llama family."""

_KEY = re.compile(
    r"(?:base_model\.)?(?:(?:model|language_model)\.)*"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,4})\.(?P<place>[a-z0-9_]+\.[a-z0-9_]+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
_REASONS = (
    ("modules_to_save", "unsupported_tensor", "a fully trained module (modules_to_save) is not supported"),
    ("lora_magnitude_vector", "unsupported_tensor", "a DoRA magnitude is not supported"),
    ("lm_head", "unsupported_vocabulary", "the output head cannot be adapted"),
    ("embed", "unsupported_vocabulary", "token embeddings cannot be adapted"),
    ("token_adapter", "unsupported_vocabulary", "trained tokens cannot be adapted"),
    (".bias", "unsupported_tensor", "a trained bias is not supported"),
    ("qkv_proj", "fused_projection", "split the fused projection into q_proj, k_proj and v_proj"),
    ("gate_up_proj", "fused_projection", "split the fused projection into gate_proj and up_proj"),
)
"""What to say of a tensor without a place, by a part of its name."""

Shapes = Mapping[str, tuple[int, ...]]


class Place(NamedTuple):
    """Where a projection stands: the layer, its group in ``spec.groups``, its index in the group."""

    layer: int
    group: int
    projection: int


@dataclass(frozen=True, slots=True)
class Module:
    """One adapted projection, its two tensors by name, its rank and scale.

    A is ``(rank, in_features)``, B is ``(out_features, rank)``; the delta is ``scale * B @ A``.
    """

    name: str
    place: Place
    a: str
    b: str
    rank: int
    scale: float


class TensorName(NamedTuple):
    """What a tensor's name says, such as ``layers.3.self_attn.q_proj.lora_A.weight``: 3, ``q_proj``, ``A``."""

    layer: int
    projection: str
    side: str


def split_tensor_name(name: str) -> TensorName | None:
    """None for a tensor that belongs to no projection of any layer."""
    match = _KEY.fullmatch(name)
    return TensorName(int(match["layer"]), match["place"].rpartition(".")[2], match["side"]) if match else None


def places(spec: ModelSpec) -> list[Place]:
    """Every projection that can be adapted, in the order of an image."""
    return [
        Place(layer, g, p)
        for layer in range(spec.num_layers)
        for g, group in enumerate(spec.groups)
        for p in range(len(group.projections))
    ]


def module_name(spec: ModelSpec, place: Place) -> str:
    """The name that PEFT's patterns are matched against, such as ``model.layers.3.self_attn.q_proj``."""
    group = spec.groups[place.group]
    return f"model.layers.{place.layer}.{PARENTS[group.name]}.{group.projections[place.projection].name}"


def resolve(spec: ModelSpec, config: PeftConfig, shapes: Shapes) -> tuple[tuple[Module, ...], list[Finding]]:
    """Map every tensor to a projection and settle each projection's rank and scale.

    Returns the modules in the order of an image, and the findings; only without any are the modules complete.
    """
    pairs, findings = _pair_tensors(spec, shapes)
    try:
        rules = Rules(config)
    except AdapterError as error:
        return (), [*findings, *error.findings]
    findings += _coverage(spec, rules, set(pairs))
    modules = []
    for place in sorted(pairs):
        problems = _pair_findings(spec, place, pairs[place], shapes)
        if not problems:
            modules.append(_module(spec, rules, place, pairs[place], shapes, problems))
        findings += problems
    return tuple(modules), findings


def _pair_tensors(spec: ModelSpec, shapes: Shapes) -> tuple[dict[Place, dict[str, str]], list[Finding]]:
    """Tensor names by projection and side: ``{place: {"A": name, "B": name}}``."""
    known = {
        f"{PARENTS[group.name]}.{projection.name}": (g, p)
        for g, group in enumerate(spec.groups)
        for p, projection in enumerate(group.projections)
    }
    pairs: dict[Place, dict[str, str]] = {}
    findings: list[Finding] = []
    for name in shapes:
        match = _KEY.fullmatch(name)
        where = known.get(match["place"]) if match else None
        if match is None or where is None:
            findings.append(_unplaced(name))
        elif int(match["layer"]) >= spec.num_layers:
            text = f"layer {match['layer']} does not exist; this base has {spec.num_layers} layers"
            findings.append(Finding(name, "unknown_layer", text))
        else:
            sides = pairs.setdefault(Place(int(match["layer"]), *where), {})
            twin = sides.setdefault(match["side"], name)
            if twin != name:
                findings.append(Finding(name, "duplicate_tensor", f"stands for the same projection as {twin}"))
    return pairs, findings


def _unplaced(name: str) -> Finding:
    for part, code, message in _REASONS:
        if part in name:
            return Finding(name, code, message)
    return Finding(name, "unknown_tensor", "matches no projection of this base")


def _coverage(spec: ModelSpec, rules: Rules, present: set[Place]) -> list[Finding]:
    """Tensors and targets must be the same set: PEFT would warn, and serve a part of the adapter."""
    wanted = {place for place in places(spec) if rules.targets(module_name(spec, place))}
    findings = [
        Finding("target_modules", "unsupported_vocabulary", f"{name} cannot be adapted")
        for name in VOCABULARY_MODULES
        if rules.targets(name)
    ]
    if not wanted:
        findings.append(Finding("target_modules", "no_match", "matches no projection of this base"))
    findings += _difference(spec, wanted - present, "missing_module", "is a target but has no tensors")
    findings += _difference(spec, present - wanted, "untargeted_module", "has tensors but is no target")
    return findings


def _difference(spec: ModelSpec, odd: Iterable[Place], code: str, message: str) -> list[Finding]:
    """One finding for all modules of a kind: they are often hundreds."""
    names = [module_name(spec, place) for place in sorted(odd)]
    if not names:
        return []
    more = f"; so are {len(names) - 1} others" if len(names) > 1 else ""
    return [Finding("target_modules", code, f"{names[0]} {message}{more}")]


def _pair_findings(spec: ModelSpec, place: Place, names: dict[str, str], shapes: Shapes) -> list[Finding]:
    """Both tensors must be there, with the base's dimensions and one rank."""
    if len(names) < 2:
        ((side, name),) = names.items()
        return [Finding(name, "missing_tensor", f"has no lora_{'B' if side == 'A' else 'A'} beside it")]
    projection: Projection = spec.groups[place.group].projections[place.projection]
    (a, b), findings = (shapes[names["A"]], shapes[names["B"]]), []
    if len(a) != 2 or a[0] < 1 or a[1] != projection.in_features:
        findings.append(Finding(names["A"], "wrong_shape", f"has shape {a}, expected (r, {projection.in_features})"))
    if len(b) != 2 or b[0] != projection.out_features:
        findings.append(Finding(names["B"], "wrong_shape", f"has shape {b}, expected ({projection.out_features}, r)"))
    if not findings and a[0] != b[1]:
        findings.append(Finding(names["B"], "rank_mismatch", f"has shape {b} and lora_A {a}: ranks {b[1]} and {a[0]}"))
    return findings


def _module(
    spec: ModelSpec, rules: Rules, place: Place, names: dict[str, str], shapes: Shapes, findings: list[Finding]
) -> Module:
    name, rank = module_name(spec, place), shapes[names["A"]][0]
    stated, scale = rules.rank(name), rules.scale(name, rank)
    if stated != rank:
        text = f"has rank {rank}, but the config (r, rank_pattern) gives {name} rank {stated}"
        findings.append(Finding(names["A"], "rank_conflict", text))
    if scale is None:
        findings.append(Finding("lora_alpha", "bad_scale", f"the scale of {name} is zero or beyond fp32"))
    return Module(name, place, names["A"], names["B"], rank, scale or 0.0)
