"""Numbers and names as people read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from stencilpress.gateway.catalog.records import AliasTarget
from stencilpress.gateway.api.admin.adapter_views import CanaryView

NONE = "–"
_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """Bytes in binary units, to three digits."""
    step, rest = 0, float(count)
    while rest >= 1024 and step < len(_BYTES) - 1:
        step, rest = step + 1, rest / 1024
    return f"{_three(rest)} {_BYTES[step]}"


def number(value: float) -> str:
    """A count: whole up to ten thousand, then to three digits."""
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= limit:
            return _three(value / (1e3 if suffix == " k" else limit)) + suffix
    return _three(value) if value != int(value) else f"{int(value):,}"


def ms(value: float | None) -> str:
    """A time in milliseconds, or in seconds from one on."""
    if value is None:
        return NONE
    return f"{_three(value / 1000)} s" if value >= 1000 else f"{_three(value)} ms"


def percent(share: float | None) -> str:
    """A share between 0 and 1; nearly all is not all, and hardly any is not none."""
    if share is None:
        return NONE
    if 0.999 < share < 1:
        return "> 99.9 %"
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{_three(round(100 * share, 1))} %"


def module(name: str) -> str:
    """A projection without what all have in common: ``q`` for ``q_proj``."""
    return name.removesuffix("_proj")


def modules(names: Sequence[str]) -> str:
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


def _three(value: float) -> str:
    """To three digits, without a trailing zero or an exponent."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
