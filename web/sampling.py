"""The fields of a request that decide how tokens are drawn, as forms ask for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec

from stencilpress.gateway.api.schemas import ChatRequest

MOST_SAID = 1_000_000
"""A larger bound tells nobody anything."""


@dataclass(frozen=True, slots=True)
class Control:
    """A field of a request that pages have an input for. ``default`` is the server's, shown where none is set."""

    name: str
    label: str
    default: str = ""
    hint: str = ""
    step: float | None = None
    """Of a slider; None has none."""

    @property
    def range(self) -> Mapping[str, float | int | str]:
        """What the API takes: its ``kind`` (``int``, ``float``), and ``least``, ``most`` or ``above`` as far as set."""
        return _ranges().get(self.name, {})

    @property
    def bounds(self) -> str:
        """The range in words, or the hint where it has no end that matters."""
        least, most = self.range.get("least"), self.range.get("most")
        if least is None or most is None or float(most) > MOST_SAID:
            return self.hint
        return f"{least:g} to {most:g}".replace("-", "−")


CONTROLS = (
    Control("temperature", "Temperature", "1", "0 takes the most likely token", 0.05),
    Control("top_p", "Top p", "1", "", 0.01),
    Control("top_k", "Top k", "0", "0 is off"),
    Control("min_p", "Min p", "0", "", 0.01),
    Control("max_tokens", "Max tokens", "", "Empty is what the plan and the context leave"),
    Control("seed", "Seed", "random", "The same seed gives the same text again"),
    Control("presence_penalty", "Presence penalty", "0", "", 0.1),
    Control("frequency_penalty", "Frequency penalty", "0", "", 0.1),
    Control("repetition_penalty", "Repetition penalty", "1"),
)


@cache
def _ranges() -> dict[str, dict[str, float | int | str]]:
    kind = cast(msgspec.inspect.StructType, msgspec.inspect.type_info(ChatRequest))
    return {field.name: _range(field.type) for field in kind.fields}


def _range(kind: Any) -> dict[str, float | int | str]:
    inspect = msgspec.inspect
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for part in parts:
        if isinstance(part, inspect.IntType | inspect.FloatType):
            bounds = {"least": part.ge, "most": part.le, "above": part.gt}
            named = {name: bound for name, bound in bounds.items() if bound is not None}
            return {"kind": "int" if isinstance(part, inspect.IntType) else "float", **named}
    return {}
