"""Tenants, versions and aliases on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import InvalidRequestError as LazyLoadRefused

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.catalog import session
from stencilpress.gateway.catalog.adapters import (
    add_version,
    find_version,
    get_adapter,
    list_adapters,
    promote,
)
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.limits import TARGET_MODULES
from stencilpress.gateway.catalog.models import AdapterRow
from stencilpress.gateway.catalog.records import AddedVersion, NewVersion, Tenant, TenantLimits, VersionFiles
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import (
    change_tenant,
    create_tenant,
    delete_tenant,
    disable_tenant,
    get_tenant,
    list_tenants,
    restore_tenant,
)
from stencilpress.gateway.catalog.version_files import find_files
from stencilpress.gateway.errors import ConflictError, InvalidRequestError, NotFoundError, UnavailableError
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.quota.plan import Quota
from tests.unit.adapters import tiny_spec

BASE = BaseNames.of(("Acme/Small-135M", "small-135m"))


def version(content: int, **changes: Any) -> NewVersion:
    files = ("adapter_config.json", "adapter_model.safetensors")
    made = NewVersion(f"{content:064x}", BASE.id, False, (4, 8), ("q_proj", "v_proj"), 1000, files)
    return dataclasses.replace(made, **changes)


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    return await create_tenant(db, "acme")


async def add(db: Database, tenant: Tenant, content: int, name: str = "helper", **options: Any) -> AddedVersion:
    return await add_version(db, tenant.id, name, version(content), BASE, **options)


async def test_a_tenant_is_created_found_listed_and_disabled(db: Database) -> None:
    limits = TenantLimits(16, 3, 5000, ("q_proj",), 2.5)
    made = await create_tenant(db, "acme", limits)
    other = await create_tenant(db, "a-second")
    assert await get_tenant(db, "acme") == made
    assert made.limits == limits
    assert datetime.now(UTC) - made.created_at < timedelta(minutes=1)
    assert await list_tenants(db) == (other, made)
    assert len(made.prefix_salt) == 32
    assert made.prefix_salt != other.prefix_salt
    disabled = await disable_tenant(db, "acme")
    assert disabled.disabled_at is not None
    assert await disable_tenant(db, "acme") == disabled == await get_tenant(db, "acme")


async def test_tenant_names_are_unique_and_case_matters(db: Database, tenant: Tenant) -> None:
    with pytest.raises(ConflictError):
        await create_tenant(db, "acme")
    for name in (
        "Acme",
        "acme ",
        "\ud800",
        "acme%",
        "' OR '1'='1",
        "acme'; DROP TABLE tenants; --",
        "acme\0",
        "",
        "x" * 10_000,
    ):
        with pytest.raises(NotFoundError):
            await get_tenant(db, name)
        with pytest.raises(InvalidRequestError):
            await create_tenant(db, name)
    assert await list_tenants(db) == (tenant,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_rank", 0),
        ("max_rank", 2**40),
        ("max_adapters", -1),
        ("max_adapter_bytes", 0),
        ("max_adapter_bytes", 2**63),
        ("weight", 0.0),
        ("weight", float("nan")),
        ("weight", float("inf")),
    ],
)
async def test_limits_out_of_range_are_refused_by_name(db: Database, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field}: must be between") as caught:
        await create_tenant(db, "acme", dataclasses.replace(TenantLimits(), **{field: value}))
    assert caught.value.param == field


async def test_the_first_version_is_prod_and_later_ones_wait_for_a_promotion(db: Database, tenant: Tenant) -> None:
    first, second = await add(db, tenant, 1), await add(db, tenant, 2)
    assert (first.created, first.promoted, second.promoted) == (True, True, False)
    assert (first.version.ref, second.version.ref) == ("helper@1", "helper@2")
    await promote(db, tenant.id, "helper", 2, "canary")
    adapter = await get_adapter(db, tenant.id, "helper")
    assert adapter.aliases == {"canary": 2, "prod": 1}
    assert adapter.versions == (first.version, second.version)
    assert await promote(db, tenant.id, "helper", 2) == second.version
    assert await find_version(db, tenant.id, "helper") == second.version
    assert await find_version(db, tenant.id, "helper", number=1) == first.version
    assert await find_version(db, tenant.id, "helper", alias="canary") == second.version


async def test_promotion_can_be_forced_or_held_back(db: Database, tenant: Tenant) -> None:
    held = await add(db, tenant, 1, promote=False)
    assert not held.promoted
    assert await find_version(db, tenant.id, "helper") is None
    assert (await add(db, tenant, 2, promote=True)).promoted
    again = await add(db, tenant, 1, promote=True)
    assert (again.created, again.promoted, again.version.number) == (False, True, 1)
    assert (await get_adapter(db, tenant.id, "helper")).aliases == {"prod": 1}


async def test_what_intake_found_comes_back_unchanged(db: Database, tenant: Tenant) -> None:
    files = VersionFiles(config=b'{"r": 64}', weights_header=b'{"__metadata__":{"by":"acme"}}')
    asked = version(1, base_asserted=True, size_bytes=2**40, ranks=(1, 3, 64), target_modules=("k_proj", "o_proj"))
    found = dataclasses.replace(asked, files=files)
    limits = TenantLimits(max_adapter_bytes=2**41)
    large = await create_tenant(db, "large", limits)
    added = await add_version(db, large.id, "helper", found, BASE)
    stored = await find_version(db, large.id, "helper", number=1)
    assert stored == added.version
    assert stored is not None
    assert await find_files(db, large.id, "helper", 1) == files
    for field in dataclasses.fields(NewVersion):
        if field.name != "files":
            assert getattr(stored, field.name) == getattr(found, field.name)
    assert stored.created_at.utcoffset() == timedelta(0)


async def test_twenty_uploads_at_once_take_twenty_numbers(db: Database, tenant: Tenant) -> None:
    added = await asyncio.gather(*(add(db, tenant, content) for content in range(1, 21)))
    assert sorted(one.version.number for one in added) == list(range(1, 21))
    assert sum(one.promoted for one in added) == 1
    versions = (await get_adapter(db, tenant.id, "helper")).versions
    assert {one.version.digest: one.version.number for one in added} == {v.digest: v.number for v in versions}


async def test_twenty_uploads_of_one_content_are_one_version(db: Database, tenant: Tenant) -> None:
    added = await asyncio.gather(*(add(db, tenant, 7) for _ in range(20)))
    assert {one.version.number for one in added} == {1}
    assert sum(one.created for one in added) == 1
    assert len((await get_adapter(db, tenant.id, "helper")).versions) == 1


async def test_uploads_of_several_processes_do_not_collide(db: Database, database_url: str, tenant: Tenant) -> None:
    """Each Database has connections of its own, as each process has."""
    others = [Database(database_url) for _ in range(4)]
    added = await asyncio.gather(*(add(others[i % 4], tenant, i + 1) for i in range(20)))
    await asyncio.gather(*(other.close() for other in others))
    assert sorted(one.version.number for one in added) == list(range(1, 21))


async def test_the_same_content_under_another_name_or_tenant_is_another_version(db: Database, tenant: Tenant) -> None:
    other = await create_tenant(db, "other")
    refs = [
        (await add(db, tenant, 1)).version.ref,
        (await add(db, tenant, 1, "second")).version.ref,
        (await add(db, other, 1)).version.ref,
    ]
    assert refs == ["helper@1", "second@1", "helper@1"]
    assert [adapter.name for adapter in await list_adapters(db, tenant.id)] == ["helper", "second"]
    assert [adapter.name for adapter in await list_adapters(db, other.id)] == ["helper"]


async def test_an_adapter_limit_holds_in_a_burst(db: Database) -> None:
    small = await create_tenant(db, "small", TenantLimits(max_adapters=3))
    outcomes = await asyncio.gather(*(add(db, small, 1, f"a{i}") for i in range(12)), return_exceptions=True)
    refused = [one for one in outcomes if isinstance(one, InvalidRequestError)]
    assert len(refused) == 9
    assert {(one.param, one.code) for one in refused} == {("max_adapters", "limit_exceeded")}
    assert "3" in refused[0].message
    kept = await list_adapters(db, small.id)
    assert len(kept) == 3
    assert (await add(db, small, 2, kept[0].name)).version.number == 2, "a new version is no new adapter"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"ranks": (8, 32)}, "r: rank 32 is above the tenant's max_rank 16"),
        ({"size_bytes": 5001}, "size_bytes: 5001 bytes are more than the tenant's max_adapter_bytes 5000"),
        ({"target_modules": ("q_proj", "up_proj")}, "target_modules: up_proj are not among the tenant's: q_proj"),
    ],
)
async def test_a_version_over_a_limit_leaves_nothing(db: Database, found: dict[str, Any], message: str) -> None:
    small = await create_tenant(db, "small", TenantLimits(16, 5, 5000, ("q_proj",)))
    fitting = version(1, ranks=(16,), size_bytes=5000, target_modules=("q_proj",))
    with pytest.raises(InvalidRequestError) as caught:
        await add_version(db, small.id, "helper", dataclasses.replace(fitting, **found), BASE)
    assert caught.value.message == message
    assert await list_adapters(db, small.id) == ()
    assert (await add_version(db, small.id, "helper", fitting, BASE)).created


async def test_a_disabled_tenant_takes_no_versions(db: Database, tenant: Tenant) -> None:
    await disable_tenant(db, "acme")
    with pytest.raises(ConflictError, match="disabled"):
        await add(db, tenant, 1)


@pytest.mark.parametrize("name", ["base", "small-135m", "Helper", "../x", "a'--", "a\0b", "a" * 64])
async def test_a_refused_name_leaves_nothing(db: Database, tenant: Tenant, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        await add(db, tenant, 1, name)
    assert await list_adapters(db, tenant.id) == ()


async def test_promotion_finds_only_own_versions(db: Database, tenant: Tenant) -> None:
    await add(db, tenant, 1)
    other = await create_tenant(db, "other")
    attempts = [(tenant.id, "helper", 2), (tenant.id, "nobody", 1), (other.id, "helper", 1), (999, "helper", 1)]
    for owner, name, number in attempts:
        with pytest.raises(NotFoundError, match="does not exist"):
            await promote(db, owner, name, number)
    with pytest.raises(InvalidRequestError):
        await promote(db, tenant.id, "helper", 1, "3")
    with pytest.raises(NotFoundError):
        await get_adapter(db, other.id, "helper")


async def test_twenty_promotions_at_once_all_succeed(db: Database, tenant: Tenant) -> None:
    for content in range(1, 5):
        await add(db, tenant, content)
    numbers = [1 + i % 4 for i in range(20)]
    await asyncio.gather(*(promote(db, tenant.id, "helper", number, "canary") for number in numbers))
    assert (await get_adapter(db, tenant.id, "helper")).aliases["canary"] in numbers


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "' OR '1'='1", "helper%", "Helper", "x" * 1_000_000])
async def test_a_name_that_nothing_can_have_is_not_found(db: Database, tenant: Tenant, name: str) -> None:
    await add(db, tenant, 1)
    assert await find_version(db, tenant.id, name, number=1) is None
    for search in (get_adapter(db, tenant.id, name), promote(db, tenant.id, name, 1), get_tenant(db, name)):
        with pytest.raises(NotFoundError):
            await search


async def test_the_schema_itself_refuses_impossible_rows(db: Database, tenant: Tenant) -> None:
    await add(db, tenant, 1)
    await add(db, tenant, 2, "second")
    now = datetime.now(UTC)
    impossible = [
        "INSERT INTO aliases (adapter_id, name, version, updated_at) VALUES (1, 'x', 9, :now)",
        "UPDATE versions SET digest = 'short'",
        "UPDATE versions SET number = 0 WHERE adapter_id = 2",
        "UPDATE adapters SET name = name || '" + "a" * 64 + "' WHERE id = 1",
        "UPDATE adapters SET name = 'second' WHERE id = 1",
        "DELETE FROM adapters WHERE id = 1",
        "DELETE FROM tenants",
        "UPDATE tenants SET weight = 0",
    ]
    for statement in impossible:
        with pytest.raises((IntegrityError, UnavailableError)):  # PostgreSQL reports the long name as a data error
            async with db.write() as session:
                await session.execute(text(statement), {"now": now} if ":now" in statement else {})
    assert len(await list_adapters(db, tenant.id)) == 2


async def test_a_failed_block_changes_nothing(db: Database, tenant: Tenant) -> None:
    async def rename_and_fail() -> None:
        async with db.write() as session:
            await session.execute(text("UPDATE tenants SET name = 'renamed'"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await rename_and_fail()
    assert await get_tenant(db, "acme") == tenant


async def test_nothing_is_loaded_behind_ones_back(db: Database, tenant: Tenant) -> None:
    await add(db, tenant, 1)
    async with db.read() as session:
        row = await session.get_one(AdapterRow, 1)
        with pytest.raises(LazyLoadRefused, match="raise_on_sql"):
            row.versions  # noqa: B018


async def test_readers_go_on_while_a_writer_holds_its_transaction(db: Database, tenant: Tenant) -> None:
    async with db.write() as session:
        await session.execute(text("UPDATE tenants SET name = 'renamed'"))
        assert await get_tenant(db, "acme") == tenant


async def test_a_read_sees_one_moment(db: Database, tenant: Tenant) -> None:
    async with db.read() as session:
        before = await session.scalar(text("SELECT count(*) FROM adapters"))
        await add(db, tenant, 1)
        assert await session.scalar(text("SELECT count(*) FROM adapters")) == before == 0
    assert len(await list_adapters(db, tenant.id)) == 1


@pytest.mark.parametrize("url", ["", "mysql://localhost/x", "catalog.db", "http://user:hush@host/"])
def test_a_database_of_another_kind_is_refused_by_name(url: str) -> None:
    with pytest.raises(SettingsError, match="STENCILPRESS_DATABASE_URL") as caught:
        Database(url)
    assert "hush" not in str(caught.value)


async def test_a_missing_database_is_an_outage_without_details() -> None:
    async with Database("postgresql://user:hush@127.0.0.1:1/none") as away:
        with pytest.raises(UnavailableError) as caught:
            await list_tenants(away)
    assert "hush" not in caught.value.message
    assert "127.0.0.1" not in caught.value.message


async def test_a_lock_that_does_not_come_free_is_an_outage(
    database_url: str, db: Database, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "BUSY_TIMEOUT_MS", 100)
    async with Database(database_url) as impatient, db.write() as holding:
        await holding.execute(text("UPDATE tenants SET max_rank = 9"))
        with pytest.raises(UnavailableError):
            await change_tenant(impatient, "acme", {"max_rank": 8})
    assert (await get_tenant(db, "acme")).limits.max_rank == 9


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_statement_that_takes_too_long_is_an_outage(
    database_url: str, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "STATEMENT_TIMEOUT_MS", 100)
    async with Database(database_url) as impatient, impatient.read() as reading:
        with pytest.raises(DBAPIError, match="statement timeout"):
            await reading.execute(text("SELECT pg_sleep(30)"))


async def test_a_plan_bounds_versions_and_bytes(db: Database) -> None:
    small = await create_tenant(db, "small", TenantLimits(max_versions=2, stored_bytes=2500))
    for content in (1, 2):
        await add(db, small, content)
    with pytest.raises(InvalidRequestError, match="2 versions and the tenant's max_versions is 2") as caught:
        await add(db, small, 3)
    assert (caught.value.param, caught.value.code) == ("max_versions", "limit_exceeded")
    with pytest.raises(InvalidRequestError, match="on top of 2000 stored are more than the tenant's stored_bytes 2500"):
        await add(db, small, 3, "another")
    assert not (await add(db, small, 2)).created, "what is there already is no new version"
    await change_tenant(db, "small", {"stored_bytes": 3000})
    assert (await add(db, small, 3, "another")).created


async def test_a_quota_is_stored_as_it_is(db: Database) -> None:
    quota = Quota(1, 2**40, 3, 2**50, 2**60, "America/New_York", shadow=True)
    made = await create_tenant(db, "acme", TenantLimits(quota=quota))
    assert (await get_tenant(db, "acme")).limits == made.limits == TenantLimits(quota=quota)
    changed = await change_tenant(db, "acme", {"tokens_per_day": None, "quota_shadow": False})
    assert changed.limits.quota == dataclasses.replace(quota, tokens_per_day=None, shadow=False)
    with pytest.raises(InvalidRequestError, match="tenants have no such limit"):
        await change_tenant(db, "acme", {"shadow": True})


def test_the_known_target_modules_are_those_of_the_bases() -> None:
    names = {projection.name for group in tiny_spec().groups for projection in group.projections}
    assert set(TARGET_MODULES) == names


async def test_a_deleted_tenant_takes_no_versions_and_frees_nothing(db: Database, tenant: Tenant) -> None:
    await add(db, tenant, 1)
    await delete_tenant(db, "acme")
    with pytest.raises(NotFoundError):
        await add(db, tenant, 2)
    await restore_tenant(db, "acme")
    assert (await add(db, tenant, 2)).version.number == 2


async def test_tenants_are_sorted_by_bytes_whatever_the_servers_locale(db: Database) -> None:
    """A page continues at a name, so the order of the database must be the one that comparing names gives."""
    names = ["a-b", "a.b", "a_b", "ab", "a0", "0a", "b"]
    for name in names:
        await create_tenant(db, name)
    assert [tenant.name for tenant in await list_tenants(db)] == sorted(names)
    assert [tenant.name for tenant in await list_tenants(db, after="a.b", limit=2)] == sorted(names)[3:5]
    assert [tenant.name for tenant in await list_tenants(db, prefix="a")] == sorted(names)[1:-1]


async def test_a_value_that_no_column_holds_is_the_askers_fault(db: Database) -> None:
    """Not the database's: nobody should try it again, and no log should call for an operator."""
    for number in (2**70, -(2**70)):
        with pytest.raises(InvalidRequestError, match="too large"):
            await list_audit(db, before_id=number)
    with pytest.raises(InvalidRequestError) if db.is_postgresql else nullcontext():
        assert await list_audit(db, target="a\0b") == ()
    assert await list_audit(db) == (), "the connection is as good as before"
