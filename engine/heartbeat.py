"""A sign of life in shared memory: until when the loop of a process may stay away.

The supervisor makes the memory, one word, and passes its descriptor. An engine writes a deadline each time its loop
turns, a gateway once a second; once that is over, the process hangs. Until the first one, while a model is loaded and
compiled, it has all the time it needs. Deadlines are of ``CLOCK_MONOTONIC``, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

CPU_LIMIT_S = 60.0
"""A step of a large model takes this long on few cores."""
CUDA_LIMIT_S = 30.0
LEAST_LIMIT_S = 4.0
"""An idle loop turns once a second, or later on a busy machine."""
FIRST_STEP_LIMIT_S = 600.0
"""The first step may compile what was not compiled while loading."""
SLOWEST_TURNS = 4
"""The limit grows to so many times the slowest turn: a device that is slow by nature does not hang."""

_WORD_BYTES = 8


class Heartbeat:
    """The end of the process that is watched. ``fd`` is from :class:`Pulse`; with -1 nobody looks."""

    def __init__(self, fd: int, limit_s: float, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises ``OSError`` or ``ValueError`` if ``fd`` is no such memory."""
        memory = mmap.mmap(fd, _WORD_BYTES)
        if fd >= 0:
            os.close(fd)
        self._word = memoryview(memory).cast("Q")
        self._clock = clock
        self._limit_ns = int(max(limit_s, LEAST_LIMIT_S) * 1e9)
        self._last_ns = clock()
        self._deadline_ns = self._last_ns
        self._expects = False

    def beat(self) -> None:
        """The loop turns."""
        now = self._clock()
        if now <= self._deadline_ns and not self._expects:
            self._limit_ns = max(self._limit_ns, SLOWEST_TURNS * (now - self._last_ns))
        self._last_ns, self._expects = now, False
        self._write(now + self._limit_ns)

    def expect(self, limit_s: float) -> None:
        """What comes now may take this long, and says nothing about later turns."""
        self._expects = True
        self._write(self._clock() + int(limit_s * 1e9))

    def _write(self, deadline_ns: int) -> None:
        self._deadline_ns = deadline_ns
        self._word[0] = deadline_ns


class Pulse:
    """The supervisor's end. Pass ``fd`` to the process as ``STENCILPRESS_HEARTBEAT_FD``."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.fd = os.memfd_create("stencilpress-heartbeat")
        os.ftruncate(self.fd, _WORD_BYTES)
        self._memory = mmap.mmap(self.fd, _WORD_BYTES)
        self._word = memoryview(self._memory).cast("Q")
        self._clock = clock

    def overdue(self) -> bool:
        """Whether the process hangs: its loop was to turn before now."""
        return 0 < self._word[0] < self._clock()

    def reset(self) -> None:
        """A new process begins: it has all the time until its first beat."""
        self._word[0] = 0

    def close(self) -> None:
        self._word.release()
        self._memory.close()
        os.close(self.fd)
