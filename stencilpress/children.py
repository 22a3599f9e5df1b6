"""The processes of the supervisor: started, started again when they end, killed when they hang, ended in time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stencilpress.engine.heartbeat import Pulse

BAD_SETTINGS = 2
"""Exit code with which a process says that starting it again cannot help."""
FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 10.0
QUIET_S = 60.0
"""A process that lived this long starts again without delay."""
PULSE_INTERVAL_S = 0.5
PULSES_MISSED = 3
"""Looks in a row that find an engine overdue before it counts as hung: when a whole container has been paused, its
processes go on in any order."""

logger = logging.getLogger(__name__)


class ServeError(Exception):
    """Why the server cannot start, in words for the operator."""


@dataclass(eq=False)
class Child:
    """A process that is started again whenever it ends. ``process`` is the last one, running or not.

    With a ``pulse`` it is killed when that is overdue.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    fds: tuple[int, ...]
    pulse: Pulse | None = None
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone."""
        self.starts += 1
        if self.pulse is not None:
            self.pulse.reset()
        environment = {**self.environment, "STENCILPRESS_GENERATION": str(self.starts)}
        self.process = subprocess.Popen(
            self.command, env=environment, pass_fds=self.fds, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def terminate(self) -> None:
        """Ask the process to end. It has not been reaped, so its number is still its own."""
        if self.process is not None and self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process and all it started."""
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for the process; what it started ends with it. Returns its exit code, negative for a signal."""
        if self.process is None:
            return 0
        if self.process.returncode is None:
            await _exited(self.process.pid)
            self.kill()
        return self.process.wait()

    async def keep_running(self) -> None:
        """Start, and start again with back-off, until cancelled. Raises :class:`ServeError` for bad settings."""
        loop = asyncio.get_running_loop()
        backoff_s = FIRST_BACKOFF_S
        while True:
            started_at = loop.time()
            end = await self._run_once()
            if loop.time() - started_at > QUIET_S:
                backoff_s = FIRST_BACKOFF_S
            logger.error("the %s ended with %s; starting it again in %.1f s", self.name, end, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def keep_alive(self) -> None:
        """Kill the process whenever it hangs, until cancelled; :meth:`keep_running` starts it again."""
        missed = 0
        while self.pulse is not None:
            await asyncio.sleep(PULSE_INTERVAL_S)
            missed = missed + 1 if self.pulse.overdue() else 0
            if missed == PULSES_MISSED:
                logger.error("the %s hangs: its loop has not turned in time; killing it", self.name)
                self.pulse.reset()
                self.kill()

    async def _run_once(self) -> str:
        try:
            self.start()
        except OSError as error:  # no memory or process number to be had now
            return str(error)
        status = await self.ended()
        if status == BAD_SETTINGS and self.starts == 1:
            raise ServeError(f"the {self.name} refused its settings; its message is above")
        return f"exit code {status}" if status >= 0 else signal.Signals(-status).name


async def end(children: Sequence[Child], deadline: float) -> None:
    """SIGTERM, and SIGKILL to those that are still there at the deadline, of the running loop's clock."""
    if not children:
        return
    waits = [asyncio.ensure_future(child.ended()) for child in children]
    for child in children:
        child.terminate()
    await asyncio.wait(waits, timeout=deadline - asyncio.get_running_loop().time())
    for child, wait in zip(children, waits, strict=True):
        if not wait.done():
            logger.warning("the %s has not ended in time; killing it", child.name)
        child.kill()
    await asyncio.wait(waits)


async def _exited(pid: int) -> None:
    """Wait until a child is a zombie, without reaping it."""
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
