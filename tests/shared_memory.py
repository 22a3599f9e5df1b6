"""What lies in ``/dev/shm``, where nothing of ours may stay behind."""

from __future__ import annotations

import os


def shared_memory_names() -> set[str]:
    """Of everybody but PostgreSQL servers, which tests in other processes start and stop meanwhile."""
    names = os.listdir("/dev/shm")  # noqa: PTH208, S108 - names only; the place is the point
    return {name for name in names if not name.startswith("PostgreSQL.")}
