"""A tenant's plan: which values it may have, and how it lies in the tenants table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.errors import InvalidRequestError

MAX_COUNT = 2**31 - 1
MAX_BYTES = 2**63 - 1
RANGES: Mapping[str, tuple[float, float]] = {
    "max_rank": (1, MAX_COUNT),
    "max_adapters": (0, MAX_COUNT),
    "max_adapter_bytes": (1, MAX_BYTES),
    "weight": (0.001, 1000.0),
    "max_versions": (1, MAX_COUNT),
    "stored_bytes": (0, MAX_BYTES),
    "max_tokens": (1, MAX_COUNT),
    "default_max_tokens": (1, MAX_COUNT),
}
OPTIONAL = frozenset({"target_modules", "max_tokens", "default_max_tokens"})
"""Fields that may be None."""
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections that adapters of the bases served here can adapt; a test holds it against ``ModelSpec``."""


def changed(limits: TenantLimits, changes: Mapping[str, Any]) -> TenantLimits:
    """``limits`` with some fields replaced, checked. Raises :class:`InvalidRequestError` naming the field."""
    unknown = set(changes) - {field.name for field in fields(TenantLimits)}
    if unknown:
        name = min(unknown)
        raise InvalidRequestError(f"{name}: tenants have no such limit", param=name)
    return checked(replace(limits, **changes))


def checked(limits: TenantLimits) -> TenantLimits:
    """``limits`` as they may be stored. Raises :class:`InvalidRequestError` naming the field and its range."""
    for field, (low, high) in RANGES.items():
        value = getattr(limits, field)
        if value is None and field in OPTIONAL:
            continue
        if value is None or not low <= value <= high:
            raise InvalidRequestError(f"{field}: must be between {low} and {high}, got {value}", param=field)
    longest, default = limits.max_tokens, limits.default_max_tokens
    if longest is not None and default is not None and default > longest:
        text = f"{default} is more than the tenant's max_tokens {longest}"
        raise InvalidRequestError(f"default_max_tokens: {text}", param="default_max_tokens")
    if limits.target_modules is None:
        return limits
    return replace(limits, target_modules=_checked_modules(limits.target_modules))


def to_limits(row: TenantRow) -> TenantLimits:
    values = {field.name: getattr(row, field.name) for field in fields(TenantLimits)}
    modules = row.target_modules
    return TenantLimits(**{**values, "target_modules": None if modules is None else tuple(modules)})


def to_columns(limits: TenantLimits) -> dict[str, Any]:
    """The columns of a row that hold ``limits``."""
    values = {field.name: getattr(limits, field.name) for field in fields(TenantLimits)}
    modules = limits.target_modules
    return {**values, "target_modules": None if modules is None else list(modules)}


def _checked_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """Without repetition. Raises :class:`InvalidRequestError` for a name that no base has: it would allow nothing."""
    for name in modules:
        if name not in TARGET_MODULES:
            close = difflib.get_close_matches(name, TARGET_MODULES, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            text = f"{name[:64]!r} is not one of {', '.join(TARGET_MODULES)}{hint}"
            raise InvalidRequestError(f"target_modules: {text}", param="target_modules")
    if not modules:
        raise InvalidRequestError("target_modules: is empty; leave it out to allow all", param="target_modules")
    return tuple(dict.fromkeys(modules))
