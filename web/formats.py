"""How figures are written on the pages: filters of the templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE = "–"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """With thousands apart; a dash for what is not known."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def limit(value: float | None) -> str:
    return "no limit" if value is None else number(value)


def size(value: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    if value is None:
        return NONE
    step = 0
    while value >= 1000 and step < len(_BYTES) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.3g} {_BYTES[step]}"


def milliseconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def percent(share: float | None) -> str:
    """Of a share from 0 to 1."""
    return NONE if share is None else f"{100 * share:.3g} %"


def given(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a tag without those that are switched off."""
    return {name: value for name, value in attributes.items() if value is not False}


FILTERS = {"given": given, "number": number, "limit": limit, "bytes": size, "ms": milliseconds, "percent": percent}
