"""Clients that leave and processes that are killed, by the thousand: no slot leaks, and every token is accounted for.

``python -m bench soak --requests 10000 --kills 300 --quotas embedded`` (or ``valkey``, with three gateways that share
one). Real gateways under the real supervisor before fake engines. Not a measure of speed: its result is whether the
books balance, and it ends with status 1 if they do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import psutil
from sqlalchemy import select

from bench.soak_load import PROMPT, Seen, ask
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import change_tenant, create_tenant
from stencilpress.gateway.catalog.usage_models import UsageRequestRow
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.quota.engine import LEASE_MS
from stencilpress.gateway.quota.plan import Quota
from stencilpress.gateway.usage.recorder import Recorder
from tests.integration.gateway_harness import build_model
from tests.valkey import running_valkey

Quotas = Literal["embedded", "valkey"]

CLIENTS = 48
SLOTS = 64
"""Concurrent streams that must be free at the end, no more and no fewer."""
MANY = 10**9
STORM = Quota(MANY, MANY, 10**6, MANY, MANY)
STEP_MS = 5
IN_FLIGHT_TOKENS = (64 << 10) // 150
"""Tokens that a killed or deserted gateway may have written into the sockets' buffers, unseen by the client."""
KILL_PAUSE_S = 0.5
UP_LIMIT_S = 180.0


@dataclass(slots=True)
class Books:
    """What came of a soak. ``faults`` is empty if all is well."""

    seen: list[Seen]
    kills: Counter[str]
    rows: Sequence[Any] = ()
    slots: int = -1
    """Streams that were admitted at the end when more than :data:`SLOTS` were asked for."""
    faults: list[str] = field(default_factory=list)
    whole: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that a client was told and tokens of the row, of each request that came to its end."""
    cut: list[tuple[int, int]] = field(default_factory=list)
    """Tokens that a client saw and tokens of the row, of each whose client left or whose process was killed."""

    def balance(self) -> None:
        """Compare what clients saw with the rows."""
        by_request: dict[str, list[Any]] = {}
        for row in self.rows:
            by_request.setdefault(row.request_id, []).append(row)
        for one in self.seen:
            found = by_request.pop(one.request_id, []) if one.request_id else []
            if one.end not in ("refused", "unknown") and len(found) != 1:
                self.faults.append(f"{len(found)} rows of {one}")
            elif found:
                self.faults += _difference(one, found[0])
                tokens = found[0].completion_tokens
                (self.whole if one.end == "done" else self.cut).append((one.tokens, tokens))
        unknown = sum(not one.request_id for one in self.seen)
        if len(by_request) > unknown or any(len(rows) > 1 for rows in by_request.values()):
            self.faults.append(f"{len(by_request)} rows are of nobody's requests, of {unknown} without an answer")
        if self.slots != SLOTS:
            self.faults.append(f"{self.slots} of {SLOTS} slots are free at the end")

    def summary(self) -> dict[str, Any]:
        """Numbers for people."""
        return {
            "requests": len(self.seen),
            "ends": dict(Counter(one.end for one in self.seen)),
            "kills": dict(self.kills),
            "rows": dict(Counter(row.status for row in self.rows)),
            "whole": {"tokens_told": sum(a for a, _ in self.whole), "of_rows": sum(b for _, b in self.whole)},
            "cut": {
                "tokens_seen": sum(a for a, _ in self.cut),
                "of_rows": sum(b for _, b in self.cut),
                "most_unseen_of_one": max((b - a for a, b in self.cut), default=0),
            },
            "slots_free": f"{self.slots} of {SLOTS}",
            "faults": len(self.faults),
        }


def _difference(seen: Seen, row: Any) -> list[str]:
    """What is wrong between a request as its client saw it and its row."""
    tokens, prompt = row.completion_tokens, len(PROMPT)
    right = {
        # killed between the last byte and the end of the row, a whole answer counts as lost
        "done": row.status in ("completed", "lost")
        and tokens == seen.told == seen.tokens
        and row.prompt_tokens == prompt,
        "failed": row.status == "failed" and tokens == seen.tokens and row.prompt_tokens == prompt,
        "refused": row.status == "failed" and tokens == row.prompt_tokens == 0,
        "left": seen.tokens <= tokens <= min(seen.tokens + IN_FLIGHT_TOKENS, seen.asked),
        "broken": seen.tokens <= tokens <= min(seen.tokens + IN_FLIGHT_TOKENS, seen.asked),
        "unknown": True,
    }
    if right[seen.end]:
        return []
    return [f"{seen} has the row {row.status} {row.error_code} {row.prompt_tokens} + {tokens}"]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and the key of its one tenant."""

    url: str
    key: str
    supervisor: psutil.Process

    def processes(self, module: str) -> list[psutil.Process]:
        """Those of a kind that are up."""
        found = []
        for process in self.supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


KINDS = {"gateway": "stencilpress.gateway", "engine": "tests.fakes.engine"}


@contextlib.asynccontextmanager
async def serving(folder: Path, gateways: int, settings: dict[str, str]) -> AsyncIterator[Server]:
    """The processes, with a catalog of their own; stopped in good order."""
    url = f"sqlite:///{folder / 'catalog.db'}"
    async with Database(url) as db:
        await migrate(db)
        await create_tenant(db, "demo", TenantLimits(quota=STORM))
        key = (await issue_key(db, "demo")).token
    settings = {"MODEL_DIR": str(build_model(folder / "model")), "DATABASE_URL": url, **settings}
    environment = {**os.environ, **{f"STENCILPRESS_{name}": value for name, value in settings.items()}}
    engine = f"env -u STENCILPRESS_MODEL_DIR {sys.executable} -m tests.fakes.engine --step-delay-ms {STEP_MS}"
    command = [sys.executable, "-m", "tests.fakes.serve", str(folder / "data"), "--real-gateway"]
    command += ["--gateways", str(gateways), "--engines", "2", "--last-backoff-s", "0.2", "--engine-command", engine]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    try:
        word, address = (await process.stdout.readline()).decode().split()
        assert word == "ready"
        yield Server(address, key, psutil.Process(process.pid))
    finally:
        process.terminate()
        await process.wait()


async def storm(server: Server, requests: int, kills: int, chance: random.Random) -> Books:
    """All requests, and all kills while they run."""
    books = Books([], Counter())
    killing = asyncio.create_task(_kill(server, kills, books.kills, chance))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as http:

        async def client() -> None:
            while len(books.seen) < requests or not killing.done():
                books.seen.append(await ask(http, server.url, server.key, chance))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
    await killing
    return books


async def _kill(server: Server, kills: int, done: Counter[str], chance: random.Random) -> None:
    """SIGKILL to a gateway or an engine, over and over; each is up again before the next of its kind goes."""
    counts = {kind: len(server.processes(module)) for kind, module in KINDS.items()}
    for _ in range(kills):
        await _ready(server)
        await asyncio.sleep(chance.uniform(0, 2 * KILL_PAUSE_S))
        kind = chance.choice(list(KINDS))
        deadline = time.monotonic() + UP_LIMIT_S
        while len(up := server.processes(KINDS[kind])) < counts[kind]:
            assert time.monotonic() < deadline, f"no new {kind}"
            await asyncio.sleep(0.05)
        chance.choice(up).kill()
        done[kind] += 1


async def free_slots(server: Server, folder: Path) -> set[str]:
    """The streams that are admitted at once under a limit of :data:`SLOTS`, by request id."""
    async with Database(f"sqlite:///{folder / 'catalog.db'}") as db:
        await change_tenant(db, "demo", {"concurrent_streams": SLOTS})
    await asyncio.sleep(2)  # every gateway has noticed
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {server.key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        opened = [await http.post(f"{server.url}/v1/completions", json=body, headers=headers) for _ in range(SLOTS + 8)]
        assert {one.status for one in opened} <= {200, 429}
        for one in opened:
            one.close()
        return {one.headers["x-request-id"] for one in opened if one.status == 200}


async def soak(folder: Path, requests: int, kills: int, quotas: Quotas, seed: int) -> Books:
    """The whole of it in an empty folder."""
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:
        settings, gateways = {}, 1
        if quotas == "valkey":
            settings["QUOTA_STORE"], gateways = stack.enter_context(running_valkey()).connection_url, 3
        async with serving(folder, gateways, settings) as server:
            books = await storm(server, requests, kills, chance)
            if quotas == "valkey":
                await asyncio.sleep(LEASE_MS / 1000 + 1)  # what killed gateways held
            await _ready(server)
            last = await free_slots(server, folder)
            books.slots = len(last)
    async with Database(f"sqlite:///{folder / 'catalog.db'}") as db:
        recorder = Recorder(db, folder / "data" / "v1" / "run" / "usage", 1 << 20)
        await recorder.recover()
        recorder.close()
        async with db.read() as session:
            rows = (await session.execute(select(UsageRequestRow.__table__))).all()
    books.rows = [row for row in rows if row.request_id not in last]
    books.balance()
    return books


async def _ready(server: Server) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(UP_LIMIT_S):
        while not await _is_ready(http, server):  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.1)


async def _is_ready(http: aiohttp.ClientSession, server: Server) -> bool:
    with contextlib.suppress(aiohttp.ClientError, ConnectionError):
        async with http.get(f"{server.url}/readyz") as answer:
            return answer.status == 200
    return False


def main(arguments: list[str]) -> int:
    """Run it and print what came of it; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--quotas", choices=("embedded", "valkey"), default="embedded")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="stencilpress-soak-") as folder:
        books = asyncio.run(soak(Path(folder), given.requests, given.kills, given.quotas, given.seed))
    print(json.dumps(books.summary(), indent=1))
    for fault in books.faults[:20]:
        print(fault, file=sys.stderr)
    return int(bool(books.faults))
