"""How many threads the forward uses on a CPU, how they wait, and whether neighbours leave them their cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set
from pathlib import Path

from stencilpress.engine.settings import EngineSettings

SPIN_COUNT = 3000
"""Rounds that a thread spins before it sleeps, some 10 us: longer than most gaps inside a step, shorter than harm."""
LOOK_INTERVAL_S = 0.25
STALE_S = 2.0
QUIET_CORES = 0.25
"""Cores that others may use on the side while the forward still counts as alone."""

_PROC_STAT = Path("/proc/stat")
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


class Neighbours:
    """Whether other processes, or the host, take time of our processors; looked at a few times a second.

    ``busy_s`` gives the seconds that all of them have been busy since some start, ``own_s`` those of this process.
    Where the system does not say, the answer is never quiet.
    """

    def __init__(
        self,
        busy_s: Callable[[], float | None] | None = None,
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy_s = busy_s or _BusySeconds(allowed_cpus())
        self._own_s = own_s
        self._clock = clock
        self._looked_at = float("-inf")
        self._others_s = 0.0
        self._quiet = False

    def quiet(self) -> bool:
        """Whether others used less than :data:`QUIET_CORES` lately. After a pause it is False until looked at anew."""
        now = self._clock()
        elapsed_s = now - self._looked_at
        if elapsed_s < LOOK_INTERVAL_S:
            return self._quiet
        busy_s = self._busy_s()
        others_s = 0.0 if busy_s is None else busy_s - self._own_s()
        known = busy_s is not None and elapsed_s < STALE_S
        self._quiet = known and others_s - self._others_s < QUIET_CORES * elapsed_s
        self._looked_at, self._others_s = now, others_s
        return self._quiet


class _BusySeconds:
    """Seconds that some processors were not idle, from ``/proc/stat``, time stolen by the host included."""

    def __init__(self, cpus: Set[int]) -> None:
        self._names = frozenset(f"cpu{cpu}" for cpu in cpus)
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")

    def __call__(self) -> float | None:
        lines = [line.split() for line in _read(_PROC_STAT).splitlines()]
        # user nice system idle iowait irq softirq steal
        ticks = [sum(map(int, (*f[1:4], *f[6:9]))) for f in lines if f and f[0] in self._names]
        return sum(ticks) / self._ticks_per_s if any(ticks) else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
