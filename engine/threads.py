"""How many threads the forward uses on a CPU, and how they wait."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

from stencilpress.engine.settings import EngineSettings

SPIN_COUNT = 3000
"""Rounds that a thread spins before it sleeps, some 10 us: longer than most gaps inside a step, shorter than harm."""

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def configure_threads(settings: EngineSettings) -> int:
    """Set the OpenMP variables that torch reads when it is loaded, and return the number of threads.

    Call it before torch is imported. Threads spin for a moment and then sleep: sleeping at once costs a step of many
    short operations a third of its speed, and OpenMP's default, spinning on, costs more than half beside one busy
    neighbour (the gateway is one), because spinners take the core that others need. Variables that are set already
    are left alone.
    """
    threads = settings.threads or usable_cores()
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    return int(os.environ["OMP_NUM_THREADS"])


def usable_cores() -> int:
    """Physical cores that this process may run on, at most what the container's CPU quota allows."""
    allowed = allowed_cpus()
    cores = {_read(Path(_TOPOLOGY.format(cpu))) or str(cpu) for cpu in allowed}
    quota, _, period = _read(_CGROUP_QUOTA).partition(" ")
    limit = int(quota) // int(period) if quota.isdigit() and period.isdigit() else len(cores)
    return max(1, min(len(cores), limit))


def allowed_cpus() -> Set[int]:
    """Logical processors that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
