"""Triton's decorator decides when a kernel's module is imported: here it must choose the interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _language_patched_once() -> None:
    """The interpreter replaces Triton's language at a launch, and again at each call of a function within the kernel.

    The latter finds all replaced, and took half of these tests' time: it goes through every member of the language.
    """
    if "triton" not in sys.modules:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return  # another version's interpreter, as fast as it is

    def once(function: Any) -> Any:
        replaced = not tl.core.is_builtin(tl.load) and not tl.core.is_builtin(tl.core.load)
        return scope() if replaced else patch(function)

    interpreter._patch_lang = once


@pytest.fixture(scope="session", autouse=True)
def _one_thread_a_worker() -> None:
    """Workers share the cores: torch's threads of one would spin while those of the other compute."""
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
