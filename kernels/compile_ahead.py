"""Compile the Triton kernels of launches without launching them, several at a time.

A kernel is otherwise compiled when it is first launched, one after the other: a minute and a half for all that an 8B
Llama's engine may need, on one of sixteen cores. Engines that start together need the same kernels: they take turns, so
the first compiles and the others read what it left in Triton's cache.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import triton
from triton.runtime.jit import JITFunction

MOST_THREADS = 16
TURN_FILE = "compiling"
"""In the folder of Triton's cache; whose turn it is holds a lock on it."""
TURN_LIMIT_S = 300.0
"""Whoever has waited for so long compiles all the same: the other may have been stopped."""
LOOK_S = 0.05

_contexts = 0


def only_compiling() -> bool:
    """Whether launches compute nothing now."""
    return _contexts > 0


@contextmanager
def compiling_only() -> Iterator[None]:
    """Inside, launches compute nothing: what they write stays as it was. All are compiled when the context ends.

    Waits until no other process that shares the cache is in such a context. Contexts cannot be nested.
    """
    global _contexts
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(kernel, *args, **{**kwargs, "warmup": True})

    JITFunction.run = compile_only
    _contexts += 1
    try:
        with (
            _turn(Path(triton.knobs.cache.dir)),
            ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as executor,
            triton.AsyncCompileMode(executor),
        ):
            yield
    finally:
        JITFunction.run = launch
        _contexts -= 1


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TURN_FILE).open("w") as file:
        _wait_for_turn(file)
        yield


def _wait_for_turn(file: IO[str]) -> None:
    """The kernel gives the lock back when the file is closed, also by a process that was killed."""
    deadline = time.monotonic() + TURN_LIMIT_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
        else:
            return
