"""Compile the Triton kernels of launches without launching them, several at a time.

A kernel is otherwise compiled when it is first launched, one after the other: a minute and a half for all that an 8B
Llama's engine may need, on one of sixteen cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

MOST_THREADS = 16

_contexts = 0


def only_compiling() -> bool:
    """Whether launches compute nothing now."""
    return _contexts > 0


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, launches compute nothing: what they write stays as it was. All are compiled when the context ends."""
    global _contexts
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(kernel, *args, **{**kwargs, "warmup": True})

    JITFunction.run = compile_only
    _contexts += 1
    try:
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as executor, triton.AsyncCompileMode(executor):
            yield
    finally:
        JITFunction.run = launch
        _contexts -= 1
