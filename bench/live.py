"""What live pictures cost a gateway, and what a picture of the pool costs an engine.

``python -m bench live [--seconds N] [--record]`` runs a gateway with a thousand open requests of two hundred tenants,
whose tokens keep coming, and counts the processor time of its thread without listeners, with one, and with twenty that
read over HTTP from another process. Then it draws a pool of 40,000 pages, each beside another owner's, in the parts
that an engine draws between its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.results import Result, median_result, record
from stencilpress.engine.plan import RequestKey
from stencilpress.engine.pool import Pool
from stencilpress.engine.reports import PageMap
from stencilpress.engine.worker import MAP_PAGES
from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.usage.recorder import Admitted, Meter
from tests.integration.gateway_harness import Gateway, running_gateway

TENANTS = 200
OPEN_REQUESTS = 1000
LISTENERS = (0, 1, 20)
TARGET_PERCENT = 2.0
POOL_PAGES = 40_000
ROUNDS = 30
DEVICE = f"cpu{os.cpu_count()}"
READER = """
import asyncio, sys, urllib.request
url, key, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
def read():
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                print(len(line), flush=True)
async def main():
    loop = asyncio.get_running_loop()
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(count) as threads:
        await asyncio.gather(*(loop.run_in_executor(threads, read) for _ in range(count)))
asyncio.run(main())
"""


def main(arguments: list[str]) -> int:
    """Print the share of a core by listeners and the time by part; 1 if twenty listeners cost more than the target."""
    parser = argparse.ArgumentParser(prog="python -m bench live", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    given = parser.parse_args(arguments)
    results = [*asyncio.run(_listeners(given.seconds)), *_pool()]
    for result in results:
        print(f"{result.case:44} {result.value:8.3f} {result.unit}  ({result.spread[0]} to {result.spread[1]})")
    if given.record:
        record(results, ["aiohttp", "msgspec"])
    shares = {result.case: result.value for result in results}
    return int(shares[_case(20)] - shares[_case(0)] > TARGET_PERCENT)


async def _listeners(seconds: float) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        async with running_gateway(Path(folder)) as gateway:
            for number in range(TENANTS):
                await create_tenant(gateway.services.db, f"tenant-{number}")
            key = (await issue_key(gateway.services.db, "other", role=Role.OPERATOR)).token
            meters = _open_requests(gateway)
            traffic = asyncio.create_task(_tokens(meters))
            results = []
            for count in LISTENERS:
                async with _reading(gateway, key, count):
                    results.append(await _share(count, seconds))
            traffic.cancel()
            return results


def _open_requests(gateway: Gateway) -> list[Meter]:
    accounts = gateway.services.accounting
    meters = []
    for number in range(OPEN_REQUESTS):
        tenant_id = 3 + number % TENANTS
        meter = accounts.usage.open(Admitted("req", tenant_id, "k" * 12, "", 0, 100), 0.0)
        accounts.live.began(tenant_id, meter)
        meters.append(meter)
    return meters


async def _tokens(meters: list[Meter]) -> None:
    """Some of the requests get a token ten times a second: the same work whoever listens."""
    while True:
        for meter in random.sample(meters, 50):
            meter.deliver(1)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _reading(gateway: Gateway, key: str, count: int) -> AsyncIterator[None]:
    """So many listeners in another process, each of which has had a picture."""
    if not count:
        yield
        return
    command = [sys.executable, "-c", READER, f"{gateway.url}{ADMIN_PREFIX}/live", key, str(count)]
    reader = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert reader.stdout is not None
    for _ in range(count):
        await reader.stdout.readline()
    drain = asyncio.create_task(reader.stdout.read())
    try:
        yield
    finally:
        reader.kill()
        await reader.wait()
        await drain


async def _share(listeners: int, seconds: float) -> Result:
    """Processor time of this thread, in per cent of a core, in ten parts."""
    shares = []
    for _ in range(10):
        started, used = time.perf_counter(), time.thread_time()
        await asyncio.sleep(seconds / 10)
        shares.append(100 * (time.thread_time() - used) / (time.perf_counter() - started))
    return median_result(
        shares,
        bench="live",
        case=_case(listeners),
        metric="share",
        unit="% of a core",
        system="stencilpress",
        device=DEVICE,
        settings={"open_requests": OPEN_REQUESTS, "tenants": TENANTS},
    )


def _case(listeners: int) -> str:
    return f"gateway with {listeners} listeners"


def _pool() -> list[Result]:
    pool, chance = Pool(POOL_PAGES), random.Random(3)
    keys: list[RequestKey] = [(1, number) for number in range(256)]
    while pool.free > POOL_PAGES // 20:
        pool.allocate(1, chance.choice(keys) if chance.random() < 0.7 else f"{chance.randrange(500):064x}")
    tenants = {key: key[1] % 20 for key in keys}
    begin, parts, whole = [], [], []
    for _ in range(ROUNDS):
        started = time.thread_time()
        picture = PageMap(pool, tenants)
        begin.append((time.thread_time() - started) * 1000)
        of_one, done = [], False
        while not done:
            started = time.thread_time()
            done = picture.advance(MAP_PAGES)
            of_one.append((time.thread_time() - started) * 1000)
        parts.append(max(of_one))
        whole.append(sum(of_one))
    named = {"pool picture: begin": begin, "pool picture: longest part": parts, "pool picture: all parts": whole}
    return [
        median_result(
            samples,
            bench="live",
            case=case,
            metric="time",
            unit="ms",
            system="stencilpress",
            device=DEVICE,
            settings={"pages": POOL_PAGES, "part_pages": MAP_PAGES},
        )
        for case, samples in named.items()
    ]
