"""The processes of the gateway's bench: a gateway on one core, a fake engine on the other, tenants with every limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from bench.gateway_load import Target
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.quota.plan import Quota

_CORES = sorted(os.sched_getaffinity(0))
GATEWAY_CORE, LOAD_CORE = _CORES[0], _CORES[-1]
"""Of those that this process may use: `taskset` chooses."""
WORDS = " the sea and then of a in to is for on with as by at from that it was be"
PROMPT = "Write a few sentences about the tides of the sea, step by step, for a reader who has never heard of them."
TOKENS = 64
MANY = 10**9
GENEROUS = Quota(MANY, MANY, 10**6, 10**12, 10**12)
BURSTS = {
    "concurrent_streams": Quota(concurrent_streams=100),
    "requests_per_minute": Quota(requests_per_minute=100),
    "tokens_per_minute": Quota(tokens_per_minute=10_000),
    "tokens_per_day": Quota(tokens_per_day=10_000),
    "tokens_per_month": Quota(tokens_per_month=10_000),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """A running gateway with its engine. ``keys`` is by tenant."""

    port: int
    keys: dict[str, str]
    engine_socket: Path
    prompt: list[int]
    text: str
    """What an answer says."""
    gateway: psutil.Process

    def target(self, tenant: str = "generous") -> Target:
        return Target("127.0.0.1", self.port, self.keys[tenant], "base")


@contextlib.contextmanager
def pinned(command: Sequence[str], core: int, environment: dict[str, str] | None = None, **more: Any) -> Iterator[Any]:
    command = ["taskset", "--cpu-list", str(core), *command]
    started = subprocess.Popen(command, env={**os.environ, **(environment or {})}, **more)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=20)


def wait_ready(port: int, path: str = "/readyz") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing is ready on port {port}")


@contextlib.contextmanager
def running(model_dir: Path, interval_ms: float) -> Iterator[Bench]:
    """Engine and gateway with a catalog of their own."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    words = tokenizer.encode(WORDS).ids
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stencilpress-bench-")))
        url = f"sqlite:///{folder / 'catalog.db'}"
        keys = asyncio.run(_fill(url))
        engine = [sys.executable, "-m", "bench.gateway_engine", str(folder / "engine.sock"), str(model_dir)]
        engine += ["--interval-ms", str(interval_ms), "--words", *map(str, words)]
        stack.enter_context(pinned(engine, LOAD_CORE))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
        settings = {
            "MODEL_DIR": str(model_dir),
            "DATABASE_URL": url,
            "ENGINE_SOCKET": str(folder / "engine.sock"),
            "HTTP_FD": str(listener.fileno()),
        }
        environment = {f"STENCILPRESS_{name}": value for name, value in settings.items()}
        log = stack.enter_context((folder / "gateway.log").open("w"))
        command = [sys.executable, "-m", "stencilpress.gateway"]
        gateway = stack.enter_context(
            pinned(command, GATEWAY_CORE, environment, pass_fds=(listener.fileno(),), stderr=log)
        )
        port = listener.getsockname()[1]
        wait_ready(port)
        text = tokenizer.decode([words[i % len(words)] for i in range(TOKENS)])
        yield Bench(port, keys, folder / "engine.sock", tokenizer.encode(PROMPT).ids, text, psutil.Process(gateway.pid))


async def _fill(url: str) -> dict[str, str]:
    async with Database(url) as db:
        await migrate(db)
        keys = {}
        for name, quota in {"generous": GENEROUS, **BURSTS}.items():
            tenant = name.replace("_", "-")
            await create_tenant(db, tenant, TenantLimits(quota=quota))
            keys[name] = (await issue_key(db, tenant)).token
        return keys
