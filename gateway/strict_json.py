"""JSON from an upload: UTF-8, no duplicate key at any depth, no NaN or Infinity. Anything else is refused."""

from __future__ import annotations

import json
from typing import Any

from stencilpress.engine.image import AdapterError, Finding

_SHOWN_CHARS = 80


def parse(data: bytes, field: str) -> dict[str, Any]:
    """The object in ``data``. Raises :class:`AdapterError`, whose findings carry ``field``."""
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            seen: set[str] = set()
            duplicates.extend(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return value

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        text = "is nested too deeply" if isinstance(error, RecursionError) else f"is not valid JSON: {error}"
        raise AdapterError([Finding(field, "bad_json", text)]) from None
    if not isinstance(value, dict):
        raise AdapterError([Finding(field, "bad_json", "is not a JSON object")])
    if duplicates:
        raise AdapterError(Finding(field, "duplicate_key", f"has the key {shown(key)} twice") for key in duplicates)
    return value


def shown(value: object) -> str:
    """A value of the upload as it may stand in a message: quoted and short."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
