"""What lists and pages of adapters read from the catalog, on both databases."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from stencilpress.gateway.access import Actor, Role
from stencilpress.gateway.catalog.adapter_lists import list_all_adapters, list_named, list_served
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.aliases import move_alias, roll_back, rollback_target
from stencilpress.gateway.catalog.audit import actors_of
from stencilpress.gateway.catalog.lifecycle import (
    delete_adapter,
    delete_version,
    last_runs,
    record_run,
    set_suite,
    share_adapter,
)
from stencilpress.gateway.catalog.records import AliasTarget, Canary, NewVersion
from stencilpress.gateway.catalog.series import (
    Subject,
    activity_of_names,
    activity_of_versions,
    choose_axis,
    total,
    usage_series,
)
from stencilpress.gateway.catalog.serving import serving_versions
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.names import BaseNames
from tests.unit.usage_rows import random_rows

BASE = BaseNames.of(("acme/tiny",))
ADA = Actor("user:ada@example.com", Role.ADMIN)
NOON = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


async def add(db: Database, tenant_id: int, name: str, digest: str, promote: bool | None = None) -> None:
    new = NewVersion(digest * 64, BASE.id, False, (8,), ("q_proj",), 1000, ("adapter_model.safetensors",))
    await add_version(db, tenant_id, name, new, BASE, promote=promote, actor=ADA)


async def two_tenants(db: Database) -> tuple[int, int]:
    return (await create_tenant(db, "acme")).id, (await create_tenant(db, "bolt")).id


async def test_lists_are_of_one_tenant_or_by_names(db: Database) -> None:
    acme, bolt = await two_tenants(db)
    for tenant_id, name in ((acme, "pirate"), (acme, "poet"), (bolt, "pirate"), (bolt, "chef")):
        await add(db, tenant_id, name, "a")
    await delete_adapter(db, bolt, "chef")
    assert [one.name for one in await list_all_adapters(db, tenant_id=bolt, sort="name")] == ["pirate"]
    assert [one.name for one in await list_all_adapters(db, tenant_id=bolt, deleted=True)] == ["chef", "pirate"]
    names = [("bolt", "pirate"), ("acme", "poet"), ("bolt", "chef"), ("nobody", "x"), ("acme", "pirate")]
    found = await list_named(db, names)
    assert [(one.tenant_id, one.tenant, one.name) for one in found] == [
        (bolt, "bolt", "pirate"),
        (acme, "acme", "poet"),
        (acme, "acme", "pirate"),
    ]
    assert await list_named(db, []) == ()


async def test_what_a_tenants_requests_may_name_is_its_own_and_what_is_shared_with_it(db: Database) -> None:
    """Only what serves a version for this base: no adapter without `prod`, of another base, or deleted."""
    acme, bolt = await two_tenants(db)
    for name, digest in (("poet", "a"), ("pirate", "b"), ("gone", "c")):
        await add(db, acme, name, digest)
    await add(db, acme, "poet", "d", promote=True)
    await add(db, acme, "idle", "e", promote=False)
    await delete_adapter(db, acme, "gone")
    foreign = NewVersion("f" * 64, "acme/other", False, (8,), ("q_proj",), 1000, ("adapter_model.safetensors",))
    await add_version(db, acme, "foreign", foreign, BaseNames.of(("acme/other",)))
    await add(db, bolt, "zoo", "a")
    for name in ("poet", "idle"):
        await share_adapter(db, acme, name, "bolt")
    assert [(one.name, one.version, one.shared) for one in await list_served(db, acme, BASE.id)] == [
        ("pirate", 1, False),
        ("poet", 2, False),
    ]
    found = await list_served(db, bolt, BASE.id)
    assert [(one.name, one.version, one.shared) for one in found] == [("zoo", 1, False), ("poet", 2, True)]
    assert abs((found[0].created_at - datetime.now(UTC)).total_seconds()) < 60
    await delete_tenant(db, "acme")
    assert [one.name for one in await list_served(db, bolt, BASE.id)] == ["zoo"]


async def test_prod_serves_a_version_and_a_canary(db: Database) -> None:
    acme, _ = await two_tenants(db)
    await add(db, acme, "pirate", "a")
    await add(db, acme, "pirate", "b")
    await add(db, acme, "idle", "c", promote=False)
    await move_alias(db, acme, "pirate", "prod", AliasTarget(1, Canary(2, 10)))
    await move_alias(db, acme, "pirate", "staging", AliasTarget(2))
    ids = {one.name: one.id for one in await list_all_adapters(db)}
    serving = await serving_versions(db, list(ids.values()))
    assert serving.keys() == {ids["pirate"]}
    shown = serving[ids["pirate"]]
    assert (shown.number, shown.digest, shown.canary) == (1, "a" * 64, Canary(2, 10))
    assert await serving_versions(db, []) == {}


async def test_a_rollback_goes_where_it_was_said_to_go(db: Database) -> None:
    acme, _ = await two_tenants(db)
    for digest in "abc":
        await add(db, acme, "pirate", digest)
    assert await rollback_target(db, acme, "pirate", "prod") is None
    assert await rollback_target(db, acme, "pirate", "nothing") is None
    for number in (2, 3):
        await move_alias(db, acme, "pirate", "prod", AliasTarget(number))
    assert await rollback_target(db, acme, "pirate", "prod") == AliasTarget(2)
    await delete_version(db, acme, "pirate", 2)
    assert await rollback_target(db, acme, "pirate", "prod") == AliasTarget(1), "what is gone is passed over"
    assert (await roll_back(db, acme, "pirate", "prod")).target == AliasTarget(1)
    assert await rollback_target(db, acme, "pirate", "prod") is None


async def test_who_added_a_version_and_how_its_last_run_went(db: Database) -> None:
    acme, bolt = await two_tenants(db)
    for digest in "ab":
        await add(db, acme, "pirate", digest)
    targets = [f"version:pirate@{number}" for number in (1, 2, 3)]
    assert await actors_of(db, acme, "version.add", targets) == dict.fromkeys(targets[:2], ADA.name)
    assert await actors_of(db, bolt, "version.add", targets) == {}
    suite = await set_suite(db, acme, "pirate", [{"messages": []}])
    assert suite is not None
    for passed in (True, False):
        await record_run(db, acme, "pirate", 2, suite.revision, [], passed=passed)
    runs = await last_runs(db, acme, "pirate")
    assert {number: run.passed for number, run in runs.items()} == {2: False}


async def test_the_activity_of_several_is_that_of_each(db: Database) -> None:
    await two_tenants(db)
    await create_tenant(db, "core")
    rows = random_rows(random.Random(7), NOON - timedelta(hours=20), 20 * 3600, 200)
    await insert_usage(db, rows)
    while await roll_up(db):
        pass
    axis = choose_axis(NOON - timedelta(hours=24), NOON, points=25)
    names = [(1, "pirate"), (2, "pirate"), (2, "poet"), (3, "nothing")]
    found = await activity_of_names(db, names, axis)
    assert list(found) == names
    for tenant_id, name in names:
        steps = await usage_series(db, Subject(tenant_id, name), axis)
        assert found[tenant_id, name].requests == [one.requests for one in steps]
        one, whole = found[tenant_id, name].total, total(steps)
        assert one.duration_ms == pytest.approx(whole.duration_ms)
        assert replace(one, duration_ms=whole.duration_ms) == whole
    assert await activity_of_names(db, [], axis) == {}
    versions = await activity_of_versions(db, 2, "pirate", [1, 2, 9], axis)
    expected = [
        sum((row.tenant_id, row.adapter, row.version) == (2, "pirate", number) for row in rows) for number in (1, 2, 9)
    ]
    assert [versions[number].total.requests for number in (1, 2, 9)] == expected
