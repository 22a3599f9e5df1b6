"""The audit log by who, what and to what: the same entries as a filter by hand, read along indexes. Both databases."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import event, text

from stencilpress.gateway.access import Actor, Role
from stencilpress.gateway.catalog.audit import Target, audit, list_audit
from stencilpress.gateway.catalog.records import AuditEntry
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant

ACTORS = ("user:a@acme.example", "user:b@acme.example", "key:abcdefghijkl")
ACTIONS = ("alias.move", "alias.remove", "adapter.share", "adapter.unshare", "aliased.x", "key.change")
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"actor": ACTORS[1]},
    {"actor": "user:a@acme"},
    {"action": "alias."},
    {"action": "alias"},
    {"action": "alias.move"},
    {"action": "alias_"},
    {"action": "%"},
    {"action": "tenant.create"},
    {"actor": ACTORS[2], "action": "a"},
    {"actor": ACTORS[0], "action": "key.", "target": "adapter:a3"},
)


@pytest.fixture
async def log(db: Database) -> list[AuditEntry]:
    """Entries of two tenants, newest first."""
    chance = random.Random(8)
    tenants = [await create_tenant(db, name) for name in ("acme", "other")]
    for _ in range(300):
        async with db.write() as session:
            target = Target("adapter", f"a{chance.randrange(5)}", chance.choice(tenants).id)
            audit(session, Actor(chance.choice(ACTORS), Role.ADMIN, None), chance.choice(ACTIONS), target, None, {})
    return list(await list_audit(db, limit=1000))


def by_hand(log: list[AuditEntry], tenant: str | None, given: dict[str, Any]) -> list[AuditEntry]:
    return [
        one
        for one in log
        if tenant in (None, one.tenant)
        and one.actor == given.get("actor", one.actor)
        and one.target == given.get("target", one.target)
        and one.action.startswith(given.get("action", ""))
    ]


async def test_filters_and_pages(db: Database, log: list[AuditEntry]) -> None:
    async with db.read() as session:
        ids = {row.name: row.id for row in await session.execute(text("SELECT id, name FROM tenants"))}
    for given in FILTERS:
        for tenant in (None, "acme"):
            wanted = by_hand(log, tenant, given)
            found: list[AuditEntry] = []
            while page := await list_audit(
                db, tenant_id=ids.get(tenant), before_id=found[-1].id if found else None, limit=40, **given
            ):
                found += page
            assert found == wanted, (given, tenant)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("given", FILTERS[1:], ids=str)
@pytest.mark.parametrize("tenant_id", [None, 1])
async def test_no_filter_reads_the_whole_log(db: Database, given: dict[str, Any], tenant_id: int | None) -> None:
    """SQLite tells its plan, which is the same however few rows there are."""
    await create_tenant(db, "acme")
    asked: list[tuple[str, Any]] = []
    async with db.read() as session:
        engine = session.get_bind().engine
    event.listen(engine, "before_cursor_execute", lambda _c, _k, sql, values, *_: asked.append((sql, values)))
    await list_audit(db, tenant_id=tenant_id, operators=False, **given)
    selects = [(sql, values) for sql, values in asked if "audit_log" in sql]
    assert selects
    async with db.read() as session:
        connection = await session.connection()
        for sql, values in selects:
            plan = [row.detail for row in await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)]
            assert not [step for step in plan if step.startswith("SCAN audit_log") and "INDEX" not in step], plan
