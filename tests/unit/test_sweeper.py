"""Engines forget what is out of use: however it was deleted, and whatever was away in that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from stencilpress.engine.client import EngineClient
from stencilpress.gateway import changes as changes_module
from stencilpress.gateway import sweeper as sweeper_module
from stencilpress.gateway.catalog import digests as digests_module
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.lifecycle import delete_adapter, delete_version, restore_version
from stencilpress.gateway.catalog.records import NewVersion, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.sweeper import Sweeper
from tests.fakes.engine import FakeEngine, Options, running_engine

BASE_ID = "acme/Press-1B"
NAMES = BaseNames.of((BASE_ID,))


@dataclass
class Host:
    """A gateway's part in it, before two engines."""

    db: Database
    acme: Tenant
    zoo: Tenant
    fakes: list[FakeEngine]
    engines: Engines
    changes: Changes

    async def enrol(self, tenant: Tenant, name: str, digest: str) -> None:
        new = NewVersion(digest * 64, BASE_ID, False, (8,), ("q_proj",), 1000, ("adapter_model.safetensors",))
        await add_version(self.db, tenant.id, name, new, NAMES, promote=False)

    @property
    def held(self) -> list[str]:
        """By engine, a letter for a digest."""
        return ["".join(sorted(one[0] for one in fake.held)) for fake in self.fakes]

    def hold(self, *held: str) -> None:
        for fake, letters in zip(self.fakes, held, strict=True):
            fake.held = {letter * 64 for letter in letters}


@pytest.fixture
async def host(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    """Tenant acme has adapters a, b and c, and zoo has b's content as well; nothing was deleted yet."""
    monkeypatch.setattr(sweeper_module, "LOOK_S", 0.02)
    monkeypatch.setattr(changes_module, "POLL_S", 0.02)
    async with AsyncExitStack() as stack:
        paths = [tmp_path / f"{number}.sock" for number in range(2)]
        fakes = [stack.enter_context(running_engine(path, Options())) for path in paths]
        engines = await stack.enter_async_context(Engines([EngineClient(path) for path in paths]))
        for client in engines._clients:
            await client.wait_ready()
        acme, zoo = await create_tenant(db, "acme"), await create_tenant(db, "zoo")
        made = Host(db, acme, zoo, fakes, engines, Changes(db))
        for name in "abc":
            await made.enrol(acme, name, name)
        await made.enrol(zoo, "twin", "b")
        await stack.enter_async_context(made.changes.following())
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(45):
        while not condition():  # noqa: ASYNC110 - another thread's fields, without an event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("what", ["version", "adapter", "tenant"])
async def test_what_another_process_deletes_is_forgotten_unless_somebody_has_the_same(
    host: Host, database_url: str, what: str
) -> None:
    host.hold("ab", "abc")
    async with Sweeper(host.db, host.engines, host.changes).following(), Database(database_url) as elsewhere:
        if what == "tenant":
            await delete_tenant(elsewhere, "acme")
        for name in "ab" if what != "tenant" else "":
            if what == "version":
                await delete_version(elsewhere, host.acme.id, name, 1)
            else:
                await delete_adapter(elsewhere, host.acme.id, name)
        left = "b" if what == "tenant" else "bc"
        await until(lambda: host.held == ["b", left])
        await delete_adapter(elsewhere, host.zoo.id, "twin")
        await until(lambda: host.held == ["", left.replace("b", "")])


async def test_a_gateway_that_starts_finds_what_was_deleted_while_there_was_none(host: Host) -> None:
    host.hold("ax", "abc")
    await delete_adapter(host.db, host.acme.id, "a")
    await host.changes.poll()
    async with Sweeper(host.db, host.engines, host.changes).following():
        await until(lambda: host.held == ["", "bc"])  # nobody ever enrolled x: it was purged long ago


async def test_an_engine_that_is_away_is_swept_when_it_is_back_and_holds_up_no_other(
    host: Host, tmp_path: Path
) -> None:
    host.fakes[1].crash()
    await until(lambda: not host.engines._clients[1].ready)
    host.hold("a", "")
    async with Sweeper(host.db, host.engines, host.changes).following():
        await delete_adapter(host.db, host.acme.id, "a")
        await until(lambda: host.held == ["", ""])
        with running_engine(tmp_path / "1.sock", Options()) as back:
            back.held = {"a" * 64, "c" * 64}
            await until(lambda: back.held == {"c" * 64})


async def test_an_engine_that_hangs_is_waited_for(host: Host) -> None:
    host.hold("a", "a")
    async with Sweeper(host.db, host.engines, host.changes).following():
        with host.fakes[1].hung():
            await delete_adapter(host.db, host.acme.id, "a")
            await until(lambda: host.held[0] == "")
            assert host.held[1] == "a"
        await until(lambda: host.held[1] == "")


async def test_an_outage_or_a_fault_is_no_end(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    troubles: list[Exception] = [UnavailableError("away"), RuntimeError("a fault"), UnavailableError("away")]

    async def troubled(db: Database, held: Collection[str]) -> frozenset[str]:
        if troubles:
            raise troubles.pop()
        return await digests_module.out_of_use(db, held)

    monkeypatch.setattr(sweeper_module, "out_of_use", troubled)
    host.hold("a", "a")
    await delete_adapter(host.db, host.acme.id, "a")
    async with Sweeper(host.db, host.engines, host.changes).following():
        await until(lambda: host.held == ["", ""])
    [fault] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "was not swept" in fault.getMessage()


async def test_what_a_late_request_brings_in_again_goes_with_the_next_round(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper_module, "SWEEP_S", 0.05)
    async with Sweeper(host.db, host.engines, host.changes).following():
        host.hold("ac", "")
        await delete_adapter(host.db, host.acme.id, "a")
        await until(lambda: host.held == ["c", ""])
        host.hold("ac", "")
        await until(lambda: host.held == ["c", ""])


async def test_what_is_in_use_again_at_once_stays(host: Host) -> None:
    host.hold("ac", "ac")
    await delete_version(host.db, host.acme.id, "c", 1)
    await restore_version(host.db, host.acme.id, "c", 1)
    await delete_adapter(host.db, host.acme.id, "a")
    async with Sweeper(host.db, host.engines, host.changes).following():
        await until(lambda: host.held == ["c", "c"])


async def test_between_deletions_nobody_is_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other changes of a catalog, of which there may be many a second, cost engines nothing."""
    asked: list[int] = []
    sweeper = Sweeper(host.db, host.engines, host.changes)
    sweep = sweeper.sweep

    async def counted(engine: int) -> bool:
        asked.append(engine)
        return await sweep(engine)

    monkeypatch.setattr(sweeper, "sweep", counted)
    async with sweeper.following():
        await until(lambda: len(asked) == 2)
        for name in "defgh":
            await host.enrol(host.acme, name, name)
        await host.changes.poll()
        await asyncio.sleep(5 * sweeper_module.LOOK_S)
        await delete_adapter(host.db, host.acme.id, "a")
        await until(lambda: len(asked) == 4)
    assert sorted(asked) == [0, 0, 1, 1]
