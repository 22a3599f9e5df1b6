"""What lies in ``/dev/shm``, where nothing of ours may stay behind."""

from __future__ import annotations

import os

_OF_OTHERS = ("PostgreSQL.", ".org.chromium.")


def shared_memory_names() -> set[str]:
    """But for what tests in other processes make and remove meanwhile: PostgreSQL's files, a browser's, and folders."""
    with os.scandir("/dev/shm") as entries:  # noqa: S108 - the place is the point
        return {entry.name for entry in entries if not entry.is_dir() and not entry.name.startswith(_OF_OTHERS)}
