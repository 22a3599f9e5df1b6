"""Purging a deleted tenant: nothing that it owned is left, nothing of others goes. On both databases."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from stencilpress.gateway.access import Actor, Role, Scopes
from stencilpress.gateway.alerts.rules import Kind, Place, RuleChange
from stencilpress.gateway.catalog.adapters import find_target, list_adapters, set_defaults
from stencilpress.gateway.catalog.alert_outbox import set_webhook
from stencilpress.gateway.catalog.alerts import set_rule
from stencilpress.gateway.catalog.aliases import move_alias
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.erasure import purge_deleted_tenants, purge_tenant
from stencilpress.gateway.catalog.lifecycle import (
    delete_adapter,
    digests_in_use,
    purge,
    record_run,
    set_suite,
    share_adapter,
)
from stencilpress.gateway.catalog.models import Table
from stencilpress.gateway.catalog.pseudonyms import ERASED, Pseudonyms, rename_entries
from stencilpress.gateway.catalog.records import AliasTarget
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.sessions import add_link
from stencilpress.gateway.catalog.tenants import (
    TOMBSTONE,
    create_tenant,
    delete_tenant,
    get_tenant,
    list_tenants,
    restore_tenant,
    tenant_row,
)
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.catalog.users import add_user
from stencilpress.gateway.defaults import VersionDefaults
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
    assert all(_without_adapters(before[name]) == _without_adapters(after[name]) != [] for name in SUMS)


def _without_adapters(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(str({**row, "adapter": ""}) for row in rows)


def _events(catalog: dict[str, list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """What an auditor needs of the log, in its order."""
    fields = ("id", "at", "actor", "role", "action", "tenant_id", "request_id")
    return sorted(tuple(row[field] for field in fields) for row in catalog["audit_log"])


async def furnish_zelda(db: Database) -> int:
    """A tenant that named everything after a person, as far as names and texts go; returns its id."""
    tenant = await create_tenant(db, "zelda-lovelace")
    admin = Actor("key:k1k1k1k1k1k1", Role.ADMIN, tenant.id)
    scopes = Scopes(models=("zelda-voice",))
    await issue_key(db, "zelda-lovelace", "of zelda", role=Role.CALLER, scopes=scopes, actor=admin)
    for adapter in ("zelda-voice", "zelda-gone"):
        await add(db, tenant, 7, adapter)
    await move_alias(db, tenant.id, "zelda-voice", "zelda-trial", AliasTarget(1), reason="zelda wants it", actor=admin)
    await set_suite(db, tenant.id, "zelda-voice", [{"messages": [{"role": "user", "content": "zelda?"}]}], actor=admin)
    await set_defaults(db, tenant.id, "zelda-voice", 1, VersionDefaults(system_prompt="You are zelda."), actor=admin)
    await set_webhook(db, tenant.id, "https://zelda.example/hook", None, actor=admin)
    await set_rule(db, Kind.HIT_RATE_LOW, Place(tenant.id, "zelda-voice"), RuleChange(threshold=0.5), actor=admin)
    await delete_adapter(db, tenant.id, "zelda-gone", actor=admin)
    await purge(db, datetime.now(UTC) + timedelta(minutes=1), frozenset({digest(7)}))
    rows = random_rows(random.Random(5), datetime.now(UTC) - timedelta(hours=3), 9000, 60)
    names = {"pirate": "zelda-voice", "poet": "zelda-gone", "": ""}
    rows = [replace(row, tenant_id=tenant.id, adapter=names[row.adapter]) for row in rows]
    await insert_usage(db, rows[:-5])
    while await roll_up(db):
        pass
    await insert_usage(db, rows[-5:])
    return tenant.id


async def test_no_name_that_it_gave_is_left_and_every_event_is(db: Database) -> None:
    lender = await create_tenant(db, "lender")
    await add(db, lender, 1)
    zelda = await furnish_zelda(db)
    for guest in ("zelda-lovelace", (await create_tenant(db, "third")).name):
        await share_adapter(db, lender.id, "helper", guest)
    await delete_tenant(db, "zelda-lovelace")
    before = await contents(db)
    erased = await purge_tenant(db, "zelda-lovelace")
    after = await contents(db)
    assert "zelda" in str(before)
    assert "zelda" not in str(after)

    assert _events(after)[:-1] == _events(before)
    log = {row["action"]: row for row in after["audit_log"] if row["tenant_id"] == zelda}
    voice = log["adapter.smoke"]["target"].removeprefix("adapter:")
    assert voice.startswith(ERASED)
    assert log["version.defaults"]["target"] == f"version:{voice}@1"
    assert log["key.create"]["after"]["models"] == [voice]
    assert log["key.create"]["after"]["role"] == "caller"
    assert log["alert_rule.set"]["target"] == f"alert_rule:{voice}/hit_rate_low"
    assert log["alert_rule.set"]["after"] == {"threshold": 0.5}
    assert log["adapter.delete"]["target"] != f"adapter:{voice}"
    assert {log[action]["target"] for action in ("tenant.create", "tenant.delete")} == {f"tenant:{erased.tombstone}"}
    shares = [row["after"]["with"] for row in after["audit_log"] if row["action"] == "adapter.share"]
    assert sorted(shares) == sorted([erased.tombstone, "third"])
    for table in SUMS:
        assert _without_adapters(before[table]) == _without_adapters(after[table]) != []
    assert {row["adapter"] for row in after["usage_rollups"]} == {"", voice, log["adapter.delete"]["target"][8:]}
    while await roll_up(db):  # those that were in no sum yet
        pass
    assert "zelda" not in str(await contents(db))


async def test_what_its_people_did_for_others_has_their_ids(db: Database) -> None:
    lender, home = await create_tenant(db, "lender"), await create_tenant(db, "home")
    user = await add_user(db, "home", EMAIL, Role.OPERATOR)
    operator = Actor(f"user:{EMAIL}", Role.OPERATOR, home.id, source=ADDRESS)
    await add(db, lender, 1)
    await move_alias(db, lender.id, "helper", "trial", AliasTarget(1), actor=operator)
    await delete_tenant(db, "home")
    await purge_tenant(db, "home")
    after = await contents(db)
    assert EMAIL not in str(after)
    assert ADDRESS not in str(after)
    assert f"user:{user.public_id}" in {row["actor"] for row in after["alias_moves"]}


async def test_a_purge_that_was_cut_off_gives_the_same_pseudonyms(db: Database) -> None:
    zelda = await furnish_zelda(db)
    await delete_tenant(db, "zelda-lovelace")
    async with db.write() as session:
        row = await tenant_row(session, "zelda-lovelace", deleted=True)
        names = Pseudonyms(row)
        await rename_entries(session, zelda, names, 0)
    entries = {entry.id: entry for entry in await list_audit(db, tenant_id=zelda, limit=100)}
    await purge_tenant(db, "zelda-lovelace")
    again = {entry.id: entry for entry in await list_audit(db, tenant_id=zelda, limit=100)}
    assert [again[one].target for one in entries] == [entry.target for entry in entries.values()]
    assert [again[one].after for one in entries] == [entry.after for entry in entries.values()]
    assert names.of("zelda-voice") in str(again)


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
