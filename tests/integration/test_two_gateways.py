"""Two real gateway processes on one port, before a fake engine whose streams last as long as a test wants."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.catalog.refusals import refusal_series
from stencilpress.gateway.catalog.series import choose_axis
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.quota.plan import Quota
from tests.catalogs import lay_catalog
from tests.integration.gateway_harness import build_model

STREAMS = 12


@dataclass(frozen=True)
class Server:
    """A running server; ``gateways`` are its gateway processes by number."""

    url: str
    key: str
    process: psutil.Process

    def gateways(self) -> dict[str, psutil.Process]:
        found = self.process.children(recursive=True)
        return {p.environ()["STENCILPRESS_GATEWAY"]: p for p in found if "stencilpress.gateway" in p.cmdline()}


@asynccontextmanager
async def two_gateways(folder: Path, engine: str = "", **settings: str) -> AsyncIterator[Server]:
    """Started by the real supervisor; ended by SIGTERM, cleanly."""
    url = lay_catalog(folder / "catalog.db")
    async with Database(url) as db:
        await create_tenant(db, "demo")
        key = (await issue_key(db, "demo")).token
    settings = {**settings, "model_dir": str(build_model(folder / "model")), "database_url": url}
    environment = {**os.environ, **{f"STENCILPRESS_{name.upper()}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "tests.fakes.serve", str(folder / "data"), "--gateways", "2", "--real-gateway"]
    fake = f"env -u STENCILPRESS_MODEL_DIR {sys.executable} -m tests.fakes.engine {engine}"  # the model is a tokenizer
    process = await asyncio.create_subprocess_exec(
        *command, "--engine-command", fake, env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        word, address = (await process.stdout.readline()).decode().split()
        assert word == "ready"
        yield Server(address, key, psutil.Process(process.pid))
    finally:
        process.terminate()
        assert await process.wait() == 0


async def series(http: aiohttp.ClientSession, server: Server, name: str) -> dict[str, float]:
    """A metric by gateway."""
    async with http.get(f"{server.url}/metrics") as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    return {s.labels["gateway"]: s.value for family in families for s in family.samples if s.name == name}


async def test_a_killed_gateway_takes_its_own_streams_and_no_others(tmp_path: Path) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        two_gateways(tmp_path, "--step-delay-ms 20 --max-model-len 100000") as server,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        body = {"model": "base", "prompt": "abc", "max_tokens": 50_000, "stream": True}
        headers = {"Authorization": f"Bearer {server.key}"}
        streams = []
        for _ in range(STREAMS):
            streams.append(await http.post(f"{server.url}/v1/completions", json=body, headers=headers))
            await streams[-1].content.readline()
        opened = await series(http, server, "stencilpress_answers_open")
        assert sum(opened.values()) == STREAMS
        victim = max(opened, key=opened.__getitem__)
        server.gateways()[victim].kill()
        outcomes = [await survives(stream) for stream in streams]
        assert outcomes.count(False) == opened[victim]
        async with asyncio.timeout(45):
            while await series(http, server, "stencilpress_gateway_up") != {"1": 1, "2": 1}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        left = await series(http, server, "stencilpress_answers_open")
        assert left == {**opened, victim: 0}
        for stream in streams:
            stream.close()


async def test_a_gateway_that_is_stopped_alone_leaves_new_connections_to_the_others(tmp_path: Path) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        two_gateways(tmp_path, "--step-delay-ms 20 --max-model-len 100000", drain_s="30") as server,
        aiohttp.ClientSession(connector=connector) as http,
    ):
        body = {"model": "base", "prompt": "abc", "max_tokens": 50_000, "stream": True}
        headers = {"Authorization": f"Bearer {server.key}"}
        streams = []
        opened: dict[str, float] = {}
        while not all(opened.get(number) for number in ("1", "2")):  # both have one
            streams.append(await http.post(f"{server.url}/v1/completions", json=body, headers=headers))
            await streams[-1].content.readline()
            opened = await series(http, server, "stencilpress_answers_open")
        async with http.get(f"{server.url}/readyz") as ready:
            assert "STENCILPRESS_QUOTA_STORE" in (await ready.json())["warnings"][0]
        victim = server.gateways()["1"]
        victim.terminate()
        async with asyncio.timeout(45):
            while any([await refused(http, server) for _ in range(10)]):  # noqa: ASYNC110 - the signal takes a moment
                await asyncio.sleep(0.05)
        assert not any([await refused(http, server) for _ in range(50)])
        assert victim.is_running()  # its stream goes on
        assert [await survives(stream) for stream in streams] == [True] * len(streams)
        for stream in streams:
            stream.close()
        await asyncio.to_thread(psutil.wait_procs, [victim], 10)
        assert not victim.is_running()


async def test_live_pictures_are_of_both_and_an_orderly_end_writes_what_was_counted(tmp_path: Path) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        two_gateways(tmp_path, "--step-delay-ms 20 --max-model-len 100000") as server,
        aiohttp.ClientSession(connector=connector) as http,
        Database(f"sqlite:///{tmp_path / 'catalog.db'}") as db,
    ):
        await create_tenant(db, "tight", TenantLimits(quota=Quota(tokens_per_minute=1)))
        operator = (await issue_key(db, "demo", role=Role.OPERATOR)).token
        tight = (await issue_key(db, "tight")).token
        body = {"model": "base", "prompt": "abc", "max_tokens": 50_000, "stream": True}
        headers = {"Authorization": f"Bearer {server.key}"}
        streams = []
        opened: dict[str, float] = {}
        while not all(opened.get(number) for number in ("1", "2")):  # both have one
            streams.append(await http.post(f"{server.url}/v1/completions", json=body, headers=headers))
            await streams[-1].content.readline()
            opened = await series(http, server, "stencilpress_answers_open")
        picture = await first_picture(http, server, operator)
        assert (picture["gateways_up"], picture["total"]["open"]) == (2, len(streams))
        async with http.post(
            f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {tight}"}
        ) as answer:
            assert answer.status == 429
        for stream in streams:
            stream.close()
    async with Database(f"sqlite:///{tmp_path / 'catalog.db'}") as db:
        now = datetime.now(UTC)
        axis = choose_axis(now - timedelta(hours=1), now)
        refusals = await refusal_series(db, 2, axis)
        assert sum(one.refused for one in refusals["tokens_per_minute"]) == 1
        async with db.read() as session:
            samples = (await session.execute(text("SELECT engine, period FROM engine_samples"))).all()
        assert {tuple(row) for row in samples} == {(1, "minute"), (1, "hour")}


async def first_picture(http: aiohttp.ClientSession, server: Server, key: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with http.get(f"{server.url}/admin/api/v1/live", headers=headers) as answer:
        async for line in answer.content:
            if line.startswith(b"data: "):
                picture: dict[str, Any] = json.loads(line[6:])
                return picture
    raise AssertionError("the stream ended without a picture")


async def refused(http: aiohttp.ClientSession, server: Server) -> bool:
    async with http.get(f"{server.url}/readyz") as answer:
        return answer.status != 200


async def survives(stream: aiohttp.ClientResponse) -> bool:
    """Whether a hundred more lines come."""
    try:
        for _ in range(100):
            if not await stream.content.readline():
                return False
    except aiohttp.ClientError:
        return False
    return True
