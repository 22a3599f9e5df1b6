"""What a gateway's process holds over minutes of streams that come, go and are left. A case of ``bench gateway``."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from pathlib import Path

from bench.gateway_load import Connection, Target, connect

STREAMS = 100
SAMPLE_S = 2.0
WARM_UP = 0.15
"""Of the time: pools, caches and the first files grow until then."""
LEAVES = 0.2
"""The share of clients that close their connection in mid-stream."""

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def held_mib(pid: int) -> float:
    """Proportional set size: what would be free if the process ended."""
    found = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    assert found
    return int(found[1]) / 1024


async def watch_memory(
    target: Target, request: bytes, pid: int, seconds: float
) -> tuple[list[float], list[float], int]:
    """Times and sizes in MiB after the warm-up, and how many answers were asked for."""
    end, asked = time.monotonic() + seconds, 0

    async def client() -> None:
        nonlocal asked
        connection: Connection | None = None
        while time.monotonic() < end:
            [connection] = [connection] if connection else await connect(target, 1)
            asked += 1
            try:
                async with asyncio.timeout(random.uniform(0.01, 1.2) if random.random() < LEAVES else None):
                    await connection.ask(request)
            except TimeoutError:
                connection.close()
                connection = None
            await asyncio.sleep(random.uniform(0, 0.1))
        if connection:
            connection.close()

    clients = [asyncio.create_task(client()) for _ in range(STREAMS)]
    times: list[float] = []
    sizes: list[float] = []
    await asyncio.sleep(WARM_UP * seconds)
    while time.monotonic() < end:
        times.append(time.monotonic())
        sizes.append(held_mib(pid))
        await asyncio.sleep(SAMPLE_S)
    await asyncio.gather(*clients)
    return times, sizes, asked


def growth_mib_h(times: list[float], sizes: list[float]) -> float:
    """MiB an hour, by least squares."""
    return 3600 * statistics.linear_regression(times, sizes).slope
