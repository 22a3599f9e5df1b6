"""Ten thousand enrolled adapters cost an engine nothing until one is used: a real server, its catalog, its folders."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import Sampling, Submit, pack_tokens
from stencilpress.gateway.catalog.adapters import add_version, promote
from stencilpress.gateway.catalog.records import NewVersion
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.stamps import touch
from stencilpress.gateway.catalog.tenants import create_tenant, get_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.keeper import Keeper
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.route import Router
from stencilpress.gateway.sweeper import LOOK_S, Sweeper
from stencilpress.settings import DataFolder
from tests.catalogs import lay_catalog
from tests.fakes.engine import Options, running_engine
from tests.integration.conftest import Cli
from tests.integration.test_adapters_served import Press
from tests.integration.test_demo import serving
from tests.tiny import BASE_ID

ENROLLED = 10_000
SLACK_BYTES = 2 << 20
"""More than an engine's memory varies by from one moment to another, and 200 bytes for each adapter: no more than a
digest in a dict takes."""
MOMENTS = 10
CROWD = (
    """INSERT INTO adapters (tenant_id, name, created_at)
    WITH RECURSIVE numbers (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < :missing)
    SELECT tenant_id, 'crowd-' || i, created_at FROM adapters, numbers WHERE name = 'helper'""",
    """INSERT INTO versions (adapter_id, number, digest, base_id, base_asserted, ranks, target_modules, size_bytes,
        source_files, created_at)
    SELECT crowd.id, number, lower(hex(randomblob(32))), base_id, base_asserted, ranks, target_modules, size_bytes,
        source_files, versions.created_at
    FROM adapters AS crowd, adapters AS helper JOIN versions ON versions.adapter_id = helper.id
    WHERE helper.name = 'helper' AND crowd.name LIKE 'crowd-%'""",
    """INSERT INTO aliases (adapter_id, name, version, updated_at)
    SELECT id, 'prod', 1, created_at FROM adapters WHERE name LIKE 'crowd-%'""",
)


class Cost(NamedTuple):
    """What an engine's process has of its own."""

    bytes: int
    threads: int
    descriptors: int

    @classmethod
    def of(cls, process: psutil.Process) -> Cost:
        status = Path(f"/proc/{process.pid}/status").read_text()  # libraries count as its own while nobody shares them
        anonymous = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert anonymous is not None
        return cls(int(anonymous[1]) << 10, process.num_threads(), process.num_fds())

    @classmethod
    def least(cls, process: psutil.Process, press: Press) -> Cost:
        """Of several requests' times: what is held for good is held at all of them."""
        costs = []
        for _ in range(MOMENTS):
            ask(press, "helper")
            costs.append(cls.of(process))
        return min(costs)

    def check(self, before: Cost) -> None:
        """It must be what it was before, but for :data:`SLACK_BYTES`."""
        assert (self.threads, self.descriptors) == (before.threads, before.descriptors)
        assert self.bytes <= before.bytes + SLACK_BYTES


def engine_process(data: Path) -> psutil.Process:
    """Of the server on a data folder; others may run beside it."""
    (found,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if "stencilpress.engine" in process.cmdline()
        and process.environ()["STENCILPRESS_ADAPTERS_DIR"].startswith(str(data))
    ]
    return found


async def enrol_crowd(folder: DataFolder) -> dict[str, str]:
    """As many as are missing, each with rows like those of ``helper``; digests by name. Gateways learn of it."""
    with closing(sqlite3.connect(folder.database_url.removeprefix("sqlite:///"))) as catalog, catalog:
        (there,) = catalog.execute("SELECT count(*) FROM adapters").fetchone()
        for statement in CROWD:
            catalog.execute(statement, {"missing": ENROLLED - there} if ":missing" in statement else {})
        found = catalog.execute("SELECT name, digest FROM versions JOIN adapters ON id = adapter_id").fetchall()
    async with Database(folder.database_url) as db:
        tenant = await get_tenant(db, "demo")
        async with db.write() as session:
            touch(session, tenant.id)
    assert len(found) == ENROLLED
    return dict(found)


def lay_folders(folder: DataFolder, digests: dict[str, str]) -> None:
    """Each of the crowd has files like those of ``helper``, under a digest of its own."""
    for name, digest in digests.items():
        if name.startswith("crowd-"):
            (folder.adapters / digest).symlink_to(digests["helper"])


def ask(press: Press, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    answer = press.ask_again("POST", "/v1/chat/completions", body)
    assert answer["model"] == f"{model}@1"
    return str(answer["choices"][0]["message"]["content"])


def holdings(press: Press, adapters: int) -> dict[str, Any]:
    """The engine's numbers as soon as so many adapters are in its memory: it must have heard of no other."""

    def come(engine: dict[str, Any]) -> bool:
        seen = press.ask_again("GET", "/admin/api/v1/residency")["data"]  # of an engine's whole life
        return bool(engine["up"] and engine["adapters_hbm"] == engine["adapters_host"] == len(seen) == adapters)

    numbers: dict[str, Any] = press.until(come)
    return numbers


@pytest.mark.timeout(180)
def test_enrolled_adapters_cost_an_engine_nothing_until_one_is_used(
    cli: Cli, data: Path, base_folder: Path, adapters: Path
) -> None:
    with serving(base_folder) as lines:
        url = re.search(r"http://[\d.:]+", lines[-1])
        assert url is not None
        press = Press(url[0], cli("key", "create", "demo", "--role", "operator").stdout.strip())
        cli("adapter", "add", adapters / "helper", "--tenant", "demo", "--name", "helper")
        said = ask(press, "helper")
        Cost.least(engine_process(data), press)  # the first requests bring in what any engine has for good
        one, with_few = holdings(press, 1), Cost.least(engine_process(data), press)

        lay_folders(DataFolder(data), asyncio.run(enrol_crowd(DataFolder(data))))
        names = {model["id"] for model in press.ask_again("GET", "/v1/models")["data"]}
        assert sum(name.startswith("crowd-") for name in names) == ENROLLED - 1
        assert ask(press, "helper") == said
        assert holdings(press, 1)["pages_adapter"] == one["pages_adapter"]
        Cost.least(engine_process(data), press).check(with_few)

        engine_process(data).kill()  # the next one starts, and is connected to, with all of them enrolled
        press.until(lambda engine: engine["up"] and engine["generation"] == one["generation"] + 1)
        none = holdings(press, 0)
        assert (none["pages_free"], none["adapter_host_bytes"]) == (none["pages_total"], 0)
        assert ask(press, "helper") == said
        assert holdings(press, 1)["adapter_host_bytes"] == one["adapter_host_bytes"]
        Cost.least(engine_process(data), press).check(with_few)


async def test_a_gateway_tells_its_engine_of_no_adapter_but_the_one_that_is_asked_for(tmp_path: Path) -> None:
    """All that follows the catalog runs, as in a gateway's process, over a fake engine that counts what it hears."""
    folder = DataFolder(tmp_path)
    folder.prepare()
    lay_catalog(folder.path / "catalog.db")
    base = BaseNames.of((BASE_ID,))
    async with AsyncExitStack() as stack:
        db = await stack.enter_async_context(Database(folder.database_url))
        demo = await create_tenant(db, "demo")
        new = NewVersion("a" * 64, BASE_ID, False, (8,), ("q_proj",), 1000, ("adapter_model.safetensors",))
        await add_version(db, demo.id, "helper", new, base)
        await enrol_crowd(folder)
        fake = stack.enter_context(running_engine(tmp_path / "engine.sock", Options(base_id=BASE_ID)))
        engines = await stack.enter_async_context(Engines([EngineClient(tmp_path / "engine.sock")]))
        await engines.wait_ready()
        changes = Changes(db)
        await stack.enter_async_context(changes.following())
        await stack.enter_async_context(Keeper(db, engines, changes, base).following())
        await stack.enter_async_context(Sweeper(db, engines, changes).following())
        seen = changes.seen
        await promote(db, demo.id, "crowd-7", 1, "canary")
        while changes.seen == seen or not fake.heard["AskHeld"]:  # noqa: ASYNC110 - another thread's counts
            await asyncio.sleep(0.02)
        await asyncio.sleep(3 * LOOK_S)  # what follows the catalog has looked again
        assert set(fake.heard) <= {"AskStats", "AskHeld"}
        assert fake.heard["AskHeld"] == 1
        route = await Router(db, base, changes).resolve(demo.id, "crowd-7")
        async for _ in await engines.submit(Submit(0, pack_tokens([1]), route.digest, 1, Sampling())):
            pass
        assert [submit.adapter for submit in fake.submits] == [route.digest]
        assert set(fake.heard) <= {"AskStats", "AskHeld", "Submit"}
