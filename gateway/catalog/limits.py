"""A tenant's plan: which values it may have, and how it lies in the tenants table.

A plan is *flat* where it is stored, shown and changed: the quota's fields stand beside the others.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from stencilpress.gateway.catalog.models import TenantRow
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.quota.plan import Quota

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
    "requests_per_minute": (1, MAX_COUNT),
    "tokens_per_minute": (1, MAX_BYTES),
    "concurrent_streams": (1, MAX_COUNT),
    "tokens_per_day": (1, MAX_BYTES),
    "tokens_per_month": (1, MAX_BYTES),
}
OPTIONAL = frozenset(
    {
        "target_modules",
        "max_tokens",
        "default_max_tokens",
        "requests_per_minute",
        "tokens_per_minute",
        "concurrent_streams",
        "tokens_per_day",
        "tokens_per_month",
    }
)
"""Fields that may be None: no limit."""
MAX_TIME_ZONE_CHARS = 64
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections that adapters of the bases served here can adapt; a test holds it against ``ModelSpec``."""


_QUOTA_NAMES = {"shadow": "quota_shadow"}
"""What a field of the quota is called in a flat plan, where its own name would say too little."""
_QUOTA = {_QUOTA_NAMES.get(field.name, field.name): field.name for field in fields(Quota)}
_PLAIN = tuple(field.name for field in fields(TenantLimits) if field.name != "quota")
FIELDS = (*_PLAIN, *_QUOTA)
"""Of a flat plan."""


def flat(limits: TenantLimits) -> dict[str, Any]:
    """A plan as it is stored, shown and changed."""
    modules = limits.target_modules
    return {
        **{name: getattr(limits, name) for name in _PLAIN},
        "target_modules": None if modules is None else list(modules),
        **{name: getattr(limits.quota, field) for name, field in _QUOTA.items()},
    }


def to_limits(row: TenantRow) -> TenantLimits:
    return _of_flat({name: getattr(row, name) for name in FIELDS})


def changed(limits: TenantLimits, changes: Mapping[str, Any]) -> TenantLimits:
    """``limits`` with some fields of the flat plan replaced, checked.

    Raises :class:`InvalidRequestError` naming the field.
    """
    unknown = set(changes) - set(FIELDS)
    if unknown:
        name = min(unknown)
        raise InvalidRequestError(f"{name}: tenants have no such limit", param=name)
    return checked(_of_flat({**flat(limits), **changes}))


def checked(limits: TenantLimits) -> TenantLimits:
    """``limits`` as they may be stored. Raises :class:`InvalidRequestError` naming the field and its range."""
    values = flat(limits)
    for field, (low, high) in RANGES.items():
        value = values[field]
        if value is None and field in OPTIONAL:
            continue
        if value is None or not low <= value <= high:
            raise InvalidRequestError(f"{field}: must be between {low} and {high}, got {value}", param=field)
    longest, default = limits.max_tokens, limits.default_max_tokens
    if longest is not None and default is not None and default > longest:
        text = f"{default} is more than the tenant's max_tokens {longest}"
        raise InvalidRequestError(f"default_max_tokens: {text}", param="default_max_tokens")
    _check_time_zone(limits.quota.time_zone)
    if limits.target_modules is None:
        return limits
    return replace(limits, target_modules=_checked_modules(limits.target_modules))


def check_flat(values: Mapping[str, Any]) -> None:
    """Whether a row of tenants has a plan that may be stored. Raises :class:`InvalidRequestError` naming the field."""
    checked(_of_flat(values))


def _of_flat(values: Mapping[str, Any]) -> TenantLimits:
    modules = values["target_modules"]
    plain = {name: values[name] for name in _PLAIN}
    quota = Quota(**{field: values[name] for name, field in _QUOTA.items()})
    return TenantLimits(**{**plain, "target_modules": None if modules is None else tuple(modules)}, quota=quota)


def _check_time_zone(name: str) -> None:
    try:
        if len(name) > MAX_TIME_ZONE_CHARS:
            raise ValueError
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        text = f"{name[:MAX_TIME_ZONE_CHARS]!r} is no time zone such as Europe/Vienna"
        raise InvalidRequestError(f"time_zone: {text}", param="time_zone") from None


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
