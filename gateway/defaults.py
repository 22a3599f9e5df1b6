"""What a version of an adapter brings along for requests that leave it out: a system prompt and sampling."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_SYSTEM_PROMPT_CHARS = 32_768

_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class VersionDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Each field stands in for the request's field of the same name. ``system_prompt`` is put in front of a chat
    that has no system message."""

    system_prompt: Annotated[str, Meta(min_length=1, max_length=MAX_SYSTEM_PROMPT_CHARS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None

    @property
    def sampling(self) -> dict[str, float | int]:
        """The fields of a request that are set here."""
        if self is NO_DEFAULTS:
            return {}
        fields: dict[str, float | int] = msgspec.to_builtins(self)
        fields.pop("system_prompt", None)
        return fields


NO_DEFAULTS = VersionDefaults()
