"""Upkeep of two hosts on one catalog, each with a data folder of its own: what is done once, and what on each."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.leases import acquire
from stencilpress.gateway.catalog.lifecycle import delete_adapter, list_purgeable
from stencilpress.gateway.catalog.models import JobLeaseRow
from stencilpress.gateway.catalog.records import Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant, list_tenants
from stencilpress.gateway.lifecycle.cold import ColdTier, ColdTierError
from stencilpress.gateway.lifecycle.desk import AdapterDesk
from stencilpress.gateway.lifecycle.gate import IntakeGate
from stencilpress.gateway.lifecycle.upkeep import JOB, Terms, tend, tend_for_ever
from stencilpress.gateway.names import BaseNames
from tests.unit.adapters import BASE_ID, Desk, lora_tensors

BASE = BaseNames.of((BASE_ID, "tiny"))
OVER = timedelta(seconds=-1)
"""A grace that is over already."""
TERMS = Terms(every_s=0.02, grace=OVER, tenant_grace=OVER)
HOLDER = """
import asyncio, sys
from datetime import timedelta
from pathlib import Path
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.lifecycle.upkeep import Terms, tend_for_ever
from tests.unit.adapters import Desk
from tests.unit.test_upkeep import open_desk

async def main(url, folder, root):
    async with Database(url) as db:
        await tend_for_ever(open_desk(db, Desk(Path(folder)), Path(root)), Terms(0.02, timedelta(hours=1)))

asyncio.run(main(*sys.argv[1:]))
"""


class AwayTier(ColdTier):
    """A store that does not answer."""

    async def digests(self, *, whole: bool = True) -> frozenset[str]:  # noqa: ARG002 - as its base has it
        raise ColdTierError("away")


@pytest.fixture
def folders(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    return await create_tenant(db, "acme")


@pytest.fixture
async def home(db: Database, folders: Desk, tmp_path: Path) -> AdapterDesk:
    return open_desk(db, folders, tmp_path / "home" / "v1")


@pytest.fixture
async def away(db: Database, database_url: str, folders: Desk, tmp_path: Path) -> AsyncIterator[AdapterDesk]:
    """Of another host: connections and a data folder of its own."""
    async with Database(database_url) as other:
        yield open_desk(other, folders, tmp_path / "away" / "v1")


def open_desk(db: Database, folders: Desk, root: Path, cold: ColdTier | None = None) -> AdapterDesk:
    return AdapterDesk.open(db, root, folders.model_dir, BASE, dtype="auto", max_rank=64, gate=IntakeGate(), cold=cold)


async def add(tenant: Tenant, folders: Desk, home: AdapterDesk, *others: AdapterDesk, seed: int = 1) -> str:
    """An adapter ``helper`` whose blob every host has; returns the digest."""
    folders.weights(lora_tensors(folders.spec, seed=seed))
    digest = (await home.enrolment.add_folder(folders.folder, "helper", tenant.id, tenant.limits)).version.digest
    for other in others:
        shutil.copytree(home.blobs.folder(digest), other.blobs.folder(digest))
    return digest


def copies(desk: AdapterDesk) -> set[str]:
    return set(desk.blobs.digests())


async def purges(db: Database) -> list[str]:
    return [one.target for one in await list_audit(db, action="version.purge")]


async def holder_of(db: Database) -> str | None:
    async with db.read() as session:
        return await session.scalar(select(JobLeaseRow.holder).where(JobLeaseRow.name == JOB))


async def first_holder(db: Database, runs: Callable[[], bool]) -> str:
    """Whoever takes the lease, which is asked for while something runs."""
    while (holder := await holder_of(db)) is None:
        assert runs(), "it ended by itself"
        await asyncio.sleep(0.02)
    return holder


async def test_one_host_purges_and_each_forgets_its_own_copies(
    db: Database, home: AdapterDesk, away: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    digest = await add(tenant, folders, home, away)
    await tend(home, TERMS, "home")
    await delete_adapter(db, tenant.id, "helper")
    await tend(away, TERMS, "away")
    assert await list_purgeable(db, datetime.now(UTC)) == {digest}, "the lease is the other's"
    assert copies(away) == {digest}
    await tend(home, TERMS, "home")
    assert await purges(db) == ["version:helper@1"]
    assert (copies(home), copies(away)) == (set(), {digest})
    await tend(away, TERMS, "away")
    assert copies(away) == set()
    assert await purges(db) == ["version:helper@1"]
    assert await holder_of(db) == "home"


async def test_a_host_keeps_its_copy_until_the_last_request_on_it_has_ended(
    db: Database, home: AdapterDesk, away: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    digest = await add(tenant, folders, home, away)
    await delete_adapter(db, tenant.id, "helper")
    async with away.using(digest, tenant.id):
        await tend(home, TERMS, "home")
        await tend(away, TERMS, "away")
        assert (copies(home), copies(away)) == (set(), {digest})
    await tend(away, TERMS, "away")
    assert copies(away) == set()


async def test_processes_of_one_host_do_all_of_it_between_them(
    db: Database, home: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    await add(tenant, folders, home)
    await delete_adapter(db, tenant.id, "helper")
    for _ in range(2):  # garbage may be looked for just before it is
        await asyncio.gather(*(tend(home, TERMS, f"process {number}") for number in range(3)))
    assert copies(home) == set()
    assert await purges(db) == ["version:helper@1"]


async def test_one_process_alone_needs_one_round(
    db: Database, home: AdapterDesk, folders: Desk, tenant: Tenant
) -> None:
    await add(tenant, folders, home)
    await delete_tenant(db, tenant.name)
    await tend(home, TERMS, "only")
    assert copies(home) == set()
    assert [one.name for one in await list_tenants(db, deleted=True) if not one.name.startswith("purged:")] == []


async def test_another_host_takes_over_from_one_that_was_killed_when_its_lease_is_over(
    db: Database, database_url: str, away: AdapterDesk, folders: Desk, tenant: Tenant, tmp_path: Path
) -> None:
    digest = await add(tenant, folders, away)
    with holding(database_url, tmp_path / "killed") as killed:
        dead = await first_holder(db, lambda: killed.poll() is None)
        killed.kill()
        assert killed.wait() == -9
    await delete_adapter(db, tenant.id, "helper")
    await tend(away, TERMS, "away")
    assert await list_purgeable(db, datetime.now(UTC)) == {digest}, "nobody knows yet"
    assert await holder_of(db) == dead
    await let_expire(db)
    await tend(away, TERMS, "away")
    assert await purges(db) == ["version:helper@1"]
    assert copies(away) == set()
    assert await holder_of(db) == "away"


async def test_an_orderly_end_gives_the_lease_back(db: Database, home: AdapterDesk) -> None:
    task = asyncio.create_task(tend_for_ever(home, TERMS))
    await first_holder(db, lambda: not task.done())
    assert not await acquire(db, JOB, "next", 30)
    task.cancel()
    await asyncio.wait([task])
    assert await acquire(db, JOB, "next", 30)


async def test_a_cold_store_that_is_away_holds_up_neither_purges_nor_the_folder(
    db: Database, folders: Desk, tenant: Tenant, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("obstore")
    desk = open_desk(db, folders, tmp_path / "v1", AwayTier(f"file://{tmp_path / 'cold'}"))
    await add(tenant, folders, desk)
    await delete_adapter(db, tenant.id, "helper")
    await tend(desk, TERMS, "home")
    assert await purges(db) == ["version:helper@1"]
    assert copies(desk) == set()
    assert caplog.messages.count("upkeep of adapters was put off: away") == 2


@contextmanager
def holding(url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that tends what it finds, with a grace that keeps all, until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, url, str(folder), str(folder / "v1")])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def let_expire(db: Database) -> None:
    """What time does to a lease that nobody prolongs."""
    async with db.write() as session:
        past = datetime.now(UTC) - timedelta(seconds=1)
        await session.execute(update(JobLeaseRow).where(JobLeaseRow.name == JOB).values(expires_at=past))
