"""The end comes in time, whatever it waits for.

Nothing that was acknowledged hangs on an orderly end: rows of usage are in the spool, and what is leased expires. So a
shutdown that waits for a catalog, a store, a receiver or a thread beyond its time says for what, and the process ends.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

TELL_S = 0.7
"""From the end of the drain until it is said what is waited for: before the supervisor's patience ends."""
LEAVE_S = 2.2
"""From the end of the drain to that of the process: with the default drain, within the 5 s that a stop may take."""
MOST_TASKS = 20
"""That a line of the log names; the first is that of the shutdown itself, as a rule."""

logger = logging.getLogger(__name__)


class Ending:
    """Ends this process with ``status`` if its shutdown does not, from a thread: no loop needs to turn for it."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._begun = False

    def begin(self, drain_s: float) -> None:
        """The shutdown begins, of the loop that runs here. A second time changes nothing: no deadline moves."""
        if not self._begun:
            self._begun = True
            arguments = (asyncio.get_running_loop(), drain_s)
            threading.Thread(target=self._watch, args=arguments, name="ending", daemon=True).start()

    def _watch(self, loop: asyncio.AbstractEventLoop, drain_s: float) -> None:
        time.sleep(drain_s + TELL_S)
        logger.warning("the shutdown takes its time; it waits for %s", waits(loop))
        time.sleep(LEAVE_S - TELL_S)
        logger.error("the shutdown does not end; leaving it at that. It waited for %s", waits(loop))
        os._exit(self._status)


def waits(loop: asyncio.AbstractEventLoop) -> str:
    """Where the tasks of a loop stand, and which threads the interpreter would wait for. For any thread to call."""
    tasks = [f"{task.get_name()} in {_place(task.get_coro())}" for task in asyncio.all_tasks(loop)]
    here = {threading.main_thread(), threading.current_thread()}
    threads = [f"thread {one.name}" for one in threading.enumerate() if not one.daemon and one not in here]
    return ", ".join([*sorted(tasks)[:MOST_TASKS], *sorted(threads)]) or "nothing that is known"


def _place(awaitable: Any, most: int = 4) -> str:
    """The innermost functions that an awaitable stands in, the outer ones first."""
    names: list[str] = []
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "ag_frame", None)
        if frame is not None:
            names.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}")
        awaitable = _inner(awaitable)
    return " > ".join(names[-most:])


def _inner(awaitable: Any) -> Any:
    """What an awaitable waits for; None for what is no Python of ours, such as a future."""
    if inspect.iscoroutine(awaitable):
        return awaitable.cr_await
    if inspect.isasyncgen(awaitable):
        return awaitable.ag_await
    # What drives an asynchronous generator has no attribute for it.
    return next(filter(inspect.isasyncgen, gc.get_referents(awaitable)), None)
