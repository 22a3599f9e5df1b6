"""The schema goes up, down and up again on both engines, survives a kill, and refuses one it does not know."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import JSON, CheckConstraint, Connection, column, insert, inspect, text
from sqlalchemy import table as table_of

from stencilpress.gateway.access import Role, Scopes
from stencilpress.gateway.catalog.adapters import list_adapters
from stencilpress.gateway.catalog.credentials import list_keys
from stencilpress.gateway.catalog.models import AuditRow, Table, UtcDateTime
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.catalog.schema import SchemaError, check_schema, ensure_schema, migrate
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, disable_tenant, enable_tenant, list_tenants
from stencilpress.gateway.errors import UnavailableError

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


@pytest.fixture
async def empty(database_url: str) -> AsyncIterator[Database]:
    async with Database(database_url) as database:
        yield database


async def ask(db: Database, question: Callable[[Connection], T]) -> T:
    async with db.read() as session:
        return await (await session.connection()).run_sync(question)


async def tables(db: Database) -> set[str]:
    return await ask(db, lambda connection: set(inspect(connection).get_table_names()))


async def execute(db: Database, statement: str) -> None:
    async with db.write() as session:
        await session.execute(text(statement))


PROCESS = """
import asyncio, os, signal, sys
from sqlalchemy import Engine, event
from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.session import Database

seen = 0

@event.listens_for(Engine, "after_cursor_execute")
def die(connection, cursor, statement, *rest):
    global seen
    seen += statement.strip().startswith(("CREATE", "DROP"))
    if seen == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with Database(sys.argv[1]) as db:
        await migrate(db, sys.argv[3])

asyncio.run(main())
"""


async def run_migration(url: str, *, die_after: int, revision: str = "head") -> int:
    """The exit code of a process that migrates and kills itself after so many CREATEs and DROPs (-1: never)."""
    command = [sys.executable, "-c", PROCESS, url, str(die_after), revision]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=ROOT)
    return await process.wait()


async def test_up_down_up(empty: Database) -> None:
    wanted = {"alembic_version", *Table.metadata.tables}
    newest = await migrate(empty)
    assert await tables(empty) == wanted
    await create_tenant(empty, "acme")
    assert await migrate(empty, "base") == "base"
    assert await tables(empty) == {"alembic_version"}
    assert await migrate(empty) == newest
    assert await tables(empty) == wanted
    assert await list_tenants(empty) == ()
    assert (await create_tenant(empty, "acme")).name == "acme"


async def test_the_migrations_build_exactly_the_tables_of_the_code(empty: Database) -> None:
    await migrate(empty)

    def differences(connection: Connection) -> list[Any]:
        options = {"compare_type": True, "compare_server_default": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), Table.metadata))

    assert await ask(empty, differences) == []


async def test_constraints_are_those_of_the_code(empty: Database) -> None:
    """Alembic does not compare checks, so their names are compared here."""
    await migrate(empty)

    def checks(connection: Connection) -> dict[str, set[str | None]]:
        inspector = inspect(connection)
        return {
            name: {check["name"] for check in inspector.get_check_constraints(name)} for name in Table.metadata.tables
        }

    found = await ask(empty, checks)
    for name, table in Table.metadata.tables.items():
        named = {constraint.name for constraint in table.constraints if isinstance(constraint, CheckConstraint)}
        assert found[name] == named


async def test_repeating_a_migration_changes_nothing(empty: Database) -> None:
    await migrate(empty)
    await create_tenant(empty, "acme")
    await migrate(empty)
    await ensure_schema(empty)
    assert [tenant.name for tenant in await list_tenants(empty)] == ["acme"]


async def test_processes_that_start_together_migrate_one_after_the_other(database_url: str) -> None:
    codes = await asyncio.gather(*(run_migration(database_url, die_after=-1) for _ in range(4)))
    assert codes == [0, 0, 0, 0]
    async with Database(database_url) as db:
        await check_schema(db)


FIRST_ROWS = """
INSERT INTO tenants (name, max_rank, max_adapters, max_adapter_bytes, target_modules, weight, prefix_salt, created_at)
VALUES ('acme', 16, 3, 5000, '["q_proj"]', 2.5, $bytes, $now);
INSERT INTO api_keys VALUES ('abcdefghijkl', 1, $bytes, 'ci', 'wxyz', $now, NULL, NULL);
INSERT INTO adapters (tenant_id, name, created_at) VALUES (1, 'helper', $now);
INSERT INTO versions
VALUES (1, 1, $digest, 'Acme/Small', $no, '[4]', '["q_proj"]', 100, '["adapter_config.json"]', $now);
INSERT INTO aliases VALUES (1, 'prod', 1, $now)
"""
"""As the first schema's code wrote them."""


async def fill_first_schema(db: Database) -> None:
    await migrate(db, "0001")
    raw = f"decode('{'ab' * 32}', 'hex')" if db.is_postgresql else f"x'{'ab' * 32}'"
    no = "false" if db.is_postgresql else "0"
    digest, now = f"'{'0' * 64}'", "'2026-01-02 03:04:05.000000+00:00'"
    for statement in Template(FIRST_ROWS).substitute(bytes=raw, no=no, digest=digest, now=now).split(";"):
        async with db.write() as session:
            await (await session.connection()).exec_driver_sql(statement)


async def check_rows_of_first_schema(db: Database) -> None:
    """They are there, with the defaults of what came later."""
    [acme] = await list_tenants(db)
    assert acme.limits == TenantLimits(16, 3, 5000, ("q_proj",), 2.5)
    assert (acme.prefix_salt, acme.in_force) == (bytes.fromhex("ab" * 32), True)
    [key] = await list_keys(db, "acme")
    assert (key.public_id, key.role, key.scopes, key.last_four) == ("abcdefghijkl", Role.CALLER, Scopes(), "wxyz")
    [adapter] = await list_adapters(db, acme.id)
    assert (adapter.name, adapter.aliases, adapter.versions[0].ranks) == ("helper", {"prod": 1}, (4,))


async def test_what_the_first_schema_held_goes_up_down_and_up(empty: Database) -> None:
    await fill_first_schema(empty)
    await migrate(empty)
    await check_rows_of_first_schema(empty)
    await disable_tenant(empty, "acme")
    await enable_tenant(empty, "acme")
    await migrate(empty, "0001")
    await migrate(empty)
    await check_rows_of_first_schema(empty)
    assert (await create_tenant(empty, "later")).id == 2


CONTENTS = """
INSERT INTO tenants (name, max_rank, max_adapters, max_adapter_bytes, weight, prefix_salt, created_at)
VALUES ('one', 16, 3, 5000, 1, $bytes, $now), ('two', 16, 3, 5000, 1, $bytes, $now);
INSERT INTO adapters (tenant_id, name, created_at) VALUES (1, 'a', $now), (2, 'b', $now), (1, 'c', $now)
"""
BEFORE = table_of(
    "versions",
    column("adapter_id"),
    column("number"),
    column("digest"),
    column("base_id"),
    column("base_asserted"),
    column("ranks", JSON),
    column("target_modules", JSON),
    column("size_bytes"),
    column("source_files", JSON),
    column("created_at", UtcDateTime),
)
REST = {"base_id": "B", "base_asserted": False, "ranks": [4], "target_modules": [], "size_bytes": 1, "source_files": []}
NOBODY = {"actor": "", "role": "", "target": "", "source": "", "request_id": ""}
ADDED = {"alone": [(1, 1)], "both": [(2, 2), (1, 1)], "twice": [(1, 1), (1, 3)], "purged": [(1, 1)], "erased": [(2, 2)]}
"""By content the tenant and the adapter of each of its versions, the first one first. What they are called says what
became of the ones before them."""


async def add_versions_of_before(db: Database) -> None:
    """As they were added, one an hour, with their entries in the audit log."""
    raw = "decode('ab', 'hex')" if db.is_postgresql else "x'ab'"
    for statement in Template(CONTENTS).substitute(bytes=raw, now="'2026-01-02 03:04:05.000000+00:00'").split(";"):
        await execute(db, statement)
    numbers: Counter[int] = Counter()
    for content, (digest, versions) in enumerate(ADDED.items()):
        for hour, (tenant, adapter) in enumerate(versions):
            numbers[adapter] += 1
            values = {"adapter_id": adapter, "number": numbers[adapter], "digest": f"{digest:0<64}"}
            at = datetime(2026, 2, content + 1, hour, tzinfo=UTC)
            async with db.write() as session:
                await session.execute(BEFORE.insert().values(**values, **REST, created_at=at))
            await add_entry(db, "version.add", tenant, "after", digest)
    await add_entry(db, "version.purge", 2, "before", "purged")
    await add_entry(db, "version.add", 1, "after", "erased")  # of a tenant that has no versions any more


async def add_entry(db: Database, action: str, tenant: int, column: str, digest: str = "") -> None:
    entry = {"tenant_id": tenant, "action": action, column: {"digest": f"{digest:0<64}", "size_bytes": 1}}
    async with db.write() as session:
        await session.execute(insert(AuditRow).values(at=datetime.now(UTC), **entry, **NOBODY))


async def own_blobs(db: Database) -> set[tuple[str, int]]:
    """The contents whose blob is said to be a version's own, with the version's adapter."""
    query = (
        "SELECT digest, versions.adapter_id FROM version_files JOIN versions"
        " ON versions.adapter_id = version_files.adapter_id AND number = version WHERE config IS NULL"
    )
    async with db.read() as session:
        return {(digest.rstrip("0"), adapter) for digest, adapter in await session.execute(text(query))}


async def test_versions_of_before_have_their_blobs_files_only_if_they_came_first(empty: Database) -> None:
    await migrate(empty, "0012")
    await add_versions_of_before(empty)
    await migrate(empty)
    assert await own_blobs(empty) == {("alone", 1), ("both", 2), ("twice", 1)}
    await migrate(empty, "0012")
    await add_entry(empty, "catalog.import", 1, "after")
    await migrate(empty)
    assert await own_blobs(empty) == {("alone", 1)}, "times of what was imported are those of elsewhere"


@pytest.mark.parametrize("after_statements", [1, 2, 4])
async def test_a_killed_upgrade_keeps_what_is_there_and_a_second_one_succeeds(
    empty: Database, database_url: str, after_statements: int
) -> None:
    await fill_first_schema(empty)
    before = await tables(empty)
    assert await run_migration(database_url, die_after=after_statements) == -signal.SIGKILL
    assert await tables(empty) == before
    await migrate(empty)
    await check_schema(empty)
    await check_rows_of_first_schema(empty)


@pytest.mark.parametrize("after_statements", [1, 3, 7])
async def test_a_killed_upgrade_leaves_nothing_and_a_second_one_succeeds(
    empty: Database, database_url: str, after_statements: int
) -> None:
    assert await run_migration(database_url, die_after=after_statements) == -signal.SIGKILL
    assert await tables(empty) == set()
    await migrate(empty)
    await check_schema(empty)


async def test_a_killed_downgrade_leaves_the_schema_in_use(empty: Database, database_url: str) -> None:
    await migrate(empty)
    await create_tenant(empty, "acme")
    assert await run_migration(database_url, die_after=3, revision="base") == -signal.SIGKILL
    await check_schema(empty)
    assert [tenant.name for tenant in await list_tenants(empty)] == ["acme"]


async def test_a_newer_schema_is_refused_and_left_alone(empty: Database) -> None:
    await migrate(empty)
    await execute(empty, "UPDATE alembic_version SET version_num = '9999'")
    for refuse in (migrate, check_schema, ensure_schema):
        with pytest.raises(SchemaError, match=r"schema 9999, newer than this version .* upgrade stencilpress"):
            await refuse(empty)
    assert len(await tables(empty)) == len(Table.metadata.tables) + 1


async def test_an_older_schema_is_refused_with_the_remedy_and_an_empty_database_is_filled(empty: Database) -> None:
    with pytest.raises(SchemaError, match="run `stencilpress migrate`"):
        await check_schema(empty)
    await ensure_schema(empty)
    await check_schema(empty)


async def test_an_unknown_revision_is_refused_with_the_known_ones(empty: Database) -> None:
    with pytest.raises(SchemaError, match="'0002x' is unknown; known: base, 0001"):
        await migrate(empty, "0002x")


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_migration_behind_a_busy_table_gives_up(empty: Database) -> None:
    await migrate(empty)
    async with empty.write() as session:
        await session.execute(text("LOCK TABLE versions IN ACCESS SHARE MODE"))
        with pytest.raises(UnavailableError):
            await migrate(empty, "base")
    await check_schema(empty)
