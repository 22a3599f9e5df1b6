"""What is said of adapters, in words. Pure; numbers are written by :mod:`stencilpress.web.formats`."""

from __future__ import annotations

from collections.abc import Sequence

from stencilpress.gateway.api.admin.adapter_views import CanaryView
from stencilpress.gateway.catalog.limits import TARGET_MODULES
from stencilpress.gateway.catalog.records import AliasTarget


def module(name: str) -> str:
    """A projection without what all have in common: ``q`` for ``q_proj``."""
    return name.removesuffix("_proj")


def modules(names: Sequence[str]) -> str:
    """Projections in short; all of the usual ones together have a name of their own."""
    if set(names) == set(TARGET_MODULES):
        return "all linear"
    return " ".join(map(module, names))


def ranks(values: Sequence[int]) -> str:
    """Distinct ranks; many are shown as a range."""
    if len(values) > 3:
        return f"{min(values)}–{max(values)}"
    return ", ".join(map(str, values))


def target(version: int | None, canary: CanaryView | None) -> str:
    """Where an alias points, in words."""
    if version is None:
        return "nothing"
    return f"@{version}" if canary is None else f"@{version}, {canary.percent} % of users @{canary.version}"


def rollback(to: AliasTarget) -> str:
    """The same of a state in an alias's history."""
    canary = None if to.canary is None else CanaryView(to.canary.version, to.canary.percent)
    return target(to.version, canary)


def who(actor: str) -> str:
    """An actor of the audit log without its kind, where that is clear: ``ada@example.com``, ``key ab12…``."""
    kind, _, name = actor.partition(":")
    return {"user": name, "key": f"key {name}", "cli": f"{name} (command)"}.get(kind, actor)


def count(amount: int, word: str) -> str:
    return f"{amount:,} {word}{'' if amount == 1 else 's'}"
