"""The guard of a canary in a form: percent and minutes for people, shares and seconds for the operation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stencilpress.gateway.api.admin.adapter_views import CanaryGuardView

WINDOWS_S = (300, 600, 1800, 3600, 21_600)
PROPOSED = CanaryGuardView(max_error_share=0.05, max_ttft_ratio=1.5)
"""For a canary that begins."""
EXPECTED = {
    "max_error_share": "expected 0 to 100",
    "max_ttft_ratio": "expected 1 to 100",
    "min_requests": "expected 1 to 1,000,000",
    "window_s": "expected one of those offered",
}
"""What each field may be, in the form's own units."""

Fields = dict[str, str]


def fields_of(guard: CanaryGuardView | None) -> Fields:
    """What the form shows; ``guarded`` is "" without a guard."""
    shown = guard or PROPOSED
    return {
        "guarded": "1" if guard is not None else "",
        "max_error_share": "" if shown.max_error_share is None else f"{100 * shown.max_error_share:.6g}",
        "max_ttft_ratio": "" if shown.max_ttft_ratio is None else f"{shown.max_ttft_ratio:.6g}",
        "min_requests": str(shown.min_requests),
        "window_s": str(shown.window_s),
    }


def typed_fields(form: Mapping[str, str]) -> Fields:
    """What a form holds, to show it again."""
    return {name: form.get(name, "").strip() for name in ("guarded", *EXPECTED)}


def guard_of(fields: Fields) -> dict[str, Any] | None:
    """What the operation takes; a text that is no number is left to it to refuse."""
    if not fields["guarded"]:
        return None
    given = {name: fields[name] for name in EXPECTED if fields[name]}
    if "max_error_share" in given:
        given["max_error_share"] = _share(given["max_error_share"])
    return given


def problems_of(errors: Mapping[str, str]) -> dict[str, str]:
    """By the form's fields, what is wrong with a guard; "" is the guard as a whole."""
    found = {}
    for param, text in errors.items():
        prefix, _, name = param.partition("canary.guard")
        if prefix == "" and param.startswith("canary.guard"):
            field = name.removeprefix(".")
            found[field] = EXPECTED.get(field, text)
    return found


def in_words(guard: CanaryGuardView) -> str:
    """When a canary is taken back."""
    limits = []
    if guard.max_error_share is not None:
        limits.append(f"more than {100 * guard.max_error_share:.6g} % of its requests fail")
    if guard.max_ttft_ratio is not None:
        limits.append(f"its first-token p95 is over {guard.max_ttft_ratio:.6g} times the other's")
    return " or ".join(limits)


def window(seconds: int) -> str:
    """A window as its choice says it."""
    return f"{seconds // 3600} h" if seconds >= 3600 else f"{seconds // 60} min"


def _share(text: str) -> str:
    try:
        return repr(float(text) / 100)
    except ValueError:
        return text
