"""The strict reading of an uploaded ``adapter_config.json``.

A field either decides the result and is checked (``PeftConfig``), or is known to have no effect on inference,
or must be off. A field that is none of these may only hold null, false, 0 or nothing: a feature unknown to us
that is switched on would change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stencilpress.engine.image import Finding, PeftConfig
from stencilpress.gateway.strict_json import shown

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_ENTRIES = 4096
MAX_TEXT_CHARS = 4096
MAX_FIELD_CHARS = 64
MAX_INT = 1 << 31

_NO_EFFECT = frozenset(
    {
        "auto_mapping",  # names the class that was trained; nothing is imported by it
        "base_model_name_or_path",  # checked by check_base
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "fan_in_fan_out",  # PEFT drops it for linear layers
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
_MUST_BE_OFF = {
    "use_dora": "DoRA scales each output by a magnitude of the merged weight",
    "use_qalora": "QALoRA pools the input",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "lora_bias": "a bias on lora_B is not supported",
    "modules_to_save": "fully trained modules are not supported",
    "trainable_token_indices": "trained token embeddings are not supported",
    "target_parameters": "adapting bare parameters is not supported",
    "layer_replication": "it changes the layers of the base",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "arrow_config": "routing between adapters is not supported",
    "monteclora_config": "Monte Carlo LoRA is not supported",
    "kasa_config": "KaSA truncates the base's weights",
    "velora_config": "VeLoRA is not supported",
    "megatron_config": "Megatron layers are not supported",
    "auto_map": "it names code to run; nothing in an upload is ever run",
}
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base's weights as they were."""

_Check = Callable[[Any], str | None]


def read_config(raw: dict[str, Any]) -> tuple[PeftConfig | None, list[Finding]]:
    """Check every field. The config is None if a field that decides the result is missing or malformed."""
    findings = [Finding(field, "unsupported", text) for field, text in _switched_on(raw)]
    if raw.get("peft_type") != "LORA":
        findings.append(Finding("peft_type", "unsupported", f"is {shown(raw.get('peft_type'))}; supported: 'LORA'"))
    if raw.get("bias", "none") != "none":
        findings.append(Finding("bias", "unsupported", f"is {shown(raw['bias'])}; trained biases are not supported"))
    malformed = [
        Finding(field, "bad_value" if field in raw else "missing", problem)
        for field, check in _CHECKS.items()
        if (problem := check(raw.get(field)))
    ]
    malformed += _combination_findings(raw)
    config = None if malformed else _peft_config(raw)
    return config, findings + malformed


def deciding_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that decide the result, of a config that was accepted, and what says that it is one."""
    return {"peft_type": "LORA", **_given(raw)}


def check_base(raw: dict[str, Any], base_ids: Sequence[str], *, assert_base: bool) -> tuple[list[Finding], bool]:
    """Is the adapter for this base? ``base_ids`` are the base's id and aliases.

    Returns findings, and whether the answer rests on the uploader's word: that counts when the config names
    no base or a local path, never against another base's name.
    """
    field, name = "base_model_name_or_path", raw.get("base_model_name_or_path")
    if name in base_ids:
        return [], False
    unnamed = name is None or name == "" or (isinstance(name, str) and _is_local_path(name))
    if unnamed and assert_base:
        return [], True
    expected = f"this server's base is {shown(base_ids[0])}"
    if unnamed:
        text = (
            f"is {shown(name)}, which does not say which base was trained on; {expected}. Name it, or assert the base"
        )
        return [Finding(field, "unknown_base", text)], False
    return [Finding(field, "wrong_base", f"is {shown(name)}; {expected}")], False


def _is_local_path(name: str) -> bool:
    """A hub id is ``name`` or ``owner/name``."""
    return name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1 or name.endswith("/")


def _switched_on(raw: dict[str, Any]) -> list[tuple[str, str]]:
    """Fields that must be off and are not, each with the reason."""
    problems = []
    for field, value in raw.items():
        if not value or field in _CHECKS or field in _NO_EFFECT or field == "bias":
            continue
        if field == "init_lora_weights":
            problem = _init_problem(value)
        elif field in _MUST_BE_OFF:
            problem = f"is {shown(value)}: {_MUST_BE_OFF[field]}"
        else:
            problem = f"is {shown(value)}: this field is unknown here and could change the result"
        if problem:
            problems.append((field[:MAX_FIELD_CHARS], problem))
    return problems


def _init_problem(value: Any) -> str:
    if value in _KEEPS_BASE:
        return ""
    return (
        f"is {shown(value)}: such an initialisation may change the base's weights. Save the adapter with "
        "path_initial_model_for_weight_conversion (PEFT), which converts it to plain LoRA and writes true here"
    )


def _is_int(value: Any, low: int) -> bool:
    return type(value) is int and low <= value < MAX_INT


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MAX_INT and value != 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT_CHARS


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ENTRIES and all(map(_is_text, value))


def _is_pattern(value: Any, is_value: Callable[[Any], bool]) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_ENTRIES
        and all(_is_text(key) and is_value(item) for key, item in value.items())
    )


def _expect(what: str, accepts: Callable[[Any], bool], *, required: bool = False) -> _Check:
    """A check that passes null unless the field is required."""

    def check(value: Any) -> str | None:
        if (value is None and not required) or accepts(value):
            return None
        return f"is {shown(value)}, expected {what}"

    return check


_CHECKS: dict[str, _Check] = {
    "r": _expect("an integer of 1 or more", lambda v: _is_int(v, 1), required=True),
    "lora_alpha": _expect("a finite number other than 0", _is_alpha, required=True),
    "target_modules": _expect(
        "a list of module names or a regular expression",
        lambda v: _is_text(v) or (v != [] and _is_texts(v)),
        required=True,
    ),
    "use_rslora": _expect("true or false", lambda v: isinstance(v, bool)),
    "rank_pattern": _expect("a map of integers of 1 or more", lambda v: _is_pattern(v, lambda rank: _is_int(rank, 1))),
    "alpha_pattern": _expect("a map of finite numbers other than 0", lambda v: _is_pattern(v, _is_alpha)),
    "layers_to_transform": _expect(
        "a layer or a list of layers",
        lambda v: _is_int(v, 0) or (isinstance(v, list) and len(v) <= MAX_ENTRIES and all(_is_int(i, 0) for i in v)),
    ),
    "layers_pattern": _expect("a name or a list of names", lambda v: isinstance(v, str) or _is_texts(v)),
    "exclude_modules": _expect("a list of module names or a regular expression", lambda v: _is_text(v) or _is_texts(v)),
}
"""Fields that decide the result, and what each must be."""


def _combination_findings(raw: dict[str, Any]) -> list[Finding]:
    """PEFT refuses these, too."""
    findings = []
    layers, pattern = raw.get("layers_to_transform"), raw.get("layers_pattern")
    if isinstance(raw.get("target_modules"), str) and (layers is not None or pattern):
        text = "cannot be used when target_modules is a regular expression"
        findings.append(Finding("layers_to_transform" if layers is not None else "layers_pattern", "conflict", text))
    elif pattern and layers is None:
        findings.append(Finding("layers_pattern", "conflict", "needs layers_to_transform"))
    return findings


def _peft_config(raw: dict[str, Any]) -> PeftConfig:
    return msgspec.convert(_given(raw), PeftConfig)


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    return {field: raw[field] for field in _CHECKS if raw.get(field) is not None}
