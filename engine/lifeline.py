"""A pipe whose write end only the supervisor holds: when it closes, this process must not live on."""

from __future__ import annotations

import os
import threading

EXIT_STATUS = 1


def hold(fd: int) -> None:
    """End this process at once when the pipe with read end ``fd`` closes, however the supervisor ended.

    A thread blocks in read(2), so it acts while the main thread computes. Nothing is cleaned up: the exit must not
    depend on the state of this process. Raises ``OSError`` if ``fd`` is no open descriptor. To cover a child
    process, pass it ``fd`` and call this there.
    """
    os.fstat(fd)
    threading.Thread(target=_exit_at_end, args=(fd,), name="lifeline", daemon=True).start()


def _exit_at_end(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os._exit(EXIT_STATUS)
