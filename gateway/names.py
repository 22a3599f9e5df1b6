"""The grammar of names: tenants, adapters, aliases, and what a request's ``model`` may say. Pure.

Names are compared exactly, case included. ``@`` and ``:`` are separators and occur in no name of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stencilpress.gateway.errors import InvalidRequestError, ModelNotFoundError

MAX_NAME_CHARS = 63
DEFAULT_ALIAS = "prod"
ANY_BASE = "base"
"""Names the served base whatever its id is, so that a client need not know it."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,62}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_NAME_RULE = "1 to 63 of a-z 0-9 . _ -, starting with a letter or digit"
_ALIAS_RULE = "1 to 63 of a-z 0-9 . _ -, starting with a letter"


@dataclass(frozen=True, slots=True)
class BaseNames:
    """How requests may call the served base: its id, its aliases, the id's last part, and ``base``."""

    id: str
    names: frozenset[str]

    @classmethod
    def of(cls, ids: Sequence[str]) -> BaseNames:
        """From the id followed by its aliases, as ``engine.spec.base_ids`` gives them."""
        return cls(ids[0], frozenset((*ids, ids[0].rpartition("/")[2], ANY_BASE)))

    def reserves(self, name: str) -> bool:
        """Whether an adapter of this name could be taken for the base. Case is ignored here alone."""
        return name.casefold() in {own.casefold() for own in self.names}


@dataclass(frozen=True, slots=True)
class ModelRef:
    """What a ``model`` text means. ``adapter`` is "" for the base alone; ``version`` 0 asks for ``alias``."""

    adapter: str = ""
    version: int = 0
    alias: str = DEFAULT_ALIAS


def is_name(text: str) -> bool:
    """Whether a tenant or adapter could have this name; a database is never asked for one that nothing can have."""
    return _NAME.fullmatch(text) is not None


def check_tenant_name(name: str) -> str:
    """Return ``name``; raises :class:`InvalidRequestError` if it is not one."""
    return _checked("tenant", name, _NAME, _NAME_RULE)


def check_adapter_name(name: str, base: BaseNames | None = None) -> str:
    """Return ``name``; raises :class:`InvalidRequestError` if it is malformed or could be taken for the base."""
    _checked("name", name, _NAME, _NAME_RULE)
    if name == ANY_BASE or (base is not None and base.reserves(name)):
        raise InvalidRequestError(f"name: {name!r} is the base model's name", param="name")
    return name


def check_alias_name(name: str) -> str:
    """Return ``name``; raises :class:`InvalidRequestError` if it is not an alias (a number alone is a version)."""
    return _checked("alias", name, _ALIAS, _ALIAS_RULE)


def parse_version_ref(text: str) -> tuple[str, int]:
    """``name@3`` as its two parts. Raises :class:`InvalidRequestError`."""
    name, _, number = text.partition("@")
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(number):
        raise InvalidRequestError(
            f"version: expected name@number such as helper@3, got {_shown(text)}", param="version"
        )
    return name, int(number)


def parse_model(text: str, base: BaseNames) -> ModelRef:
    """Read a request's ``model``: a base name, or ``[base:]name[@version|@alias]``.

    Raises :class:`ModelNotFoundError` for anything else: a malformed name is a model that does not exist.
    """
    if text in base.names:
        return ModelRef()
    prefix, separator, rest = text.rpartition(":")
    if separator and prefix not in base.names:
        raise ModelNotFoundError(text)
    name, separator, selector = rest.partition("@")
    if not _NAME.fullmatch(name):
        raise ModelNotFoundError(text)
    if not separator:
        return ModelRef(name)
    if _VERSION.fullmatch(selector):
        return ModelRef(name, version=int(selector))
    if _ALIAS.fullmatch(selector):
        return ModelRef(name, alias=selector)
    raise ModelNotFoundError(text)


def _checked(field: str, name: str, pattern: re.Pattern[str], rule: str) -> str:
    if not pattern.fullmatch(name):
        raise InvalidRequestError(f"{field}: {_shown(name)} is not allowed; use {rule}", param=field)
    return name


def _shown(name: str) -> str:
    return repr(name if len(name) <= MAX_NAME_CHARS else name[:MAX_NAME_CHARS] + "…")
