"""Purging a deleted tenant: nothing that it owned is left, nothing of others goes. On both databases."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from stencilpress.gateway.access import Actor, Role
from stencilpress.gateway.catalog.adapters import find_target, list_adapters
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.erasure import purge_deleted_tenants, purge_tenant
from stencilpress.gateway.catalog.lifecycle import digests_in_use, record_run, set_suite, share_adapter
from stencilpress.gateway.catalog.models import Table
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.sessions import add_link
from stencilpress.gateway.catalog.tenants import (
    TOMBSTONE,
    create_tenant,
    delete_tenant,
    get_tenant,
    list_tenants,
    restore_tenant,
)
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.catalog.users import add_user
from stencilpress.gateway.errors import ConflictError, NotFoundError
from stencilpress.gateway.keys import issue_key
from tests.unit.test_lifecycle import add, digest
from tests.unit.usage_rows import random_rows

EMAIL = "ada@acme.example"
ADDRESS = "203.0.113.7"
SUMS = ("usage_rollups", "usage_version_rollups", "usage_tenant_rollups", "usage_ranks")


async def contents(db: Database) -> dict[str, list[dict[str, Any]]]:
    """The whole catalog."""
    async with db.read() as session:
        return {
            name: [dict(row._mapping) for row in await session.execute(select(table))]
            for name, table in Table.metadata.tables.items()
        }


async def furnish(db: Database, name: str) -> int:
    """A tenant with something of nearly everything; returns its id."""
    tenant = await create_tenant(db, name)
    email, source = (EMAIL, ADDRESS) if name == "acme" else (f"someone@{name}.example", "198.51.100.1")
    person = Actor(f"user:{email}", Role.ADMIN, tenant.id, source=source)
    user = await add_user(db, name, email, Role.ADMIN)
    await add_link(db, "reset", name, user, bytes([tenant.id]) * 32, timedelta(days=1), actor=person)
    await issue_key(db, name, "a key", actor=person)
    await add(db, tenant, 1)
    await add(db, tenant, 100 + tenant.id)
    await set_suite(db, tenant.id, "helper", [{"messages": []}], actor=person)
    await record_run(db, tenant.id, "helper", 1, 1, [], passed=True)
    rows = random_rows(random.Random(tenant.id), datetime.now(UTC) - timedelta(hours=1), 600, 3)
    await insert_usage(db, [replace(row, tenant_id=tenant.id) for row in rows])
    return tenant.id


async def test_nothing_is_left_of_a_purged_tenant_and_all_of_the_others(db: Database) -> None:
    acme, other = await furnish(db, "acme"), await furnish(db, "other")
    await share_adapter(db, other, "helper", (await create_tenant(db, "guest")).name)
    while await roll_up(db):
        pass
    before = await contents(db)
    await delete_tenant(db, "acme")
    erased = await purge_tenant(db, "acme")
    assert (erased.adapters, erased.versions, erased.keys, erased.users, erased.requests) == (1, 2, 1, 1, 3)
    assert erased.digests == {digest(1), digest(100 + acme)}
    assert await digests_in_use(db, frozenset({digest(1), digest(100 + acme)})) == {digest(1)}  # the other has it too

    after = await contents(db)
    kept = {*SUMS, "tenants", "audit_log", "catalog_stamps", "quota_refusals"}
    owned = {name: [row for row in rows if row.get("tenant_id") == acme] for name, rows in after.items()}
    assert {name for name, rows in owned.items() if rows} <= kept
    assert EMAIL not in str(after)
    assert ADDRESS not in str(after)
    for name, rows in before.items():
        theirs = [row for row in rows if row.get("tenant_id") == other]
        assert [row for row in after[name] if row.get("tenant_id") == other] == theirs
    assert (len(after["adapters"]), len(after["versions"]), len(after["smoke_runs"])) == (1, 2, 1)
    assert all(before[name] == after[name] != [] for name in SUMS)


async def test_its_name_is_free_its_number_is_not_and_the_log_stays(db: Database) -> None:
    acme = await furnish(db, "acme")
    entries = len(await list_audit(db, tenant_id=acme))
    await delete_tenant(db, "acme")
    erased = await purge_tenant(db, "acme", actor=Actor("key:abc", Role.OPERATOR, None))
    log = await list_audit(db, tenant_id=acme)
    assert len(log) == entries + 2
    assert (log[0].action, log[0].actor, log[0].tenant) == ("tenant.purge", "key:abc", erased.tombstone)
    assert all(entry.actor != f"user:{EMAIL}" for entry in log)
    assert erased.tombstone.startswith(TOMBSTONE)
    for name in ("acme", erased.tombstone):
        with pytest.raises(NotFoundError):
            await get_tenant(db, name, deleted=True)
        with pytest.raises(NotFoundError):
            await restore_tenant(db, name)
        with pytest.raises(NotFoundError):
            await purge_tenant(db, name)
    assert await list_tenants(db, deleted=True) == ()
    again = await create_tenant(db, "acme")
    assert again.id != acme
    assert await list_adapters(db, again.id) == ()
    assert await find_target(db, again.id, "helper") is None


async def test_only_a_deleted_tenant_is_purged_and_only_after_its_time(db: Database) -> None:
    await furnish(db, "acme")
    with pytest.raises(ConflictError, match="not deleted"):
        await purge_tenant(db, "acme")
    await delete_tenant(db, "acme")
    assert await purge_deleted_tenants(db, datetime.now(UTC) - timedelta(days=1)) == []
    await restore_tenant(db, "acme")
    assert await purge_deleted_tenants(db, datetime.now(UTC)) == []
    await delete_tenant(db, "acme")
    assert [one.tenant for one in await purge_deleted_tenants(db, datetime.now(UTC))] == ["acme"]
    assert await purge_deleted_tenants(db, datetime.now(UTC)) == []
