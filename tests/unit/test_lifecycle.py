"""Deleting, restoring, purging and sharing of adapters, and what versions bring along. On both databases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from stencilpress.gateway.catalog.adapters import (
    add_version,
    find_target,
    get_adapter,
    list_adapters,
    list_shared,
    set_defaults,
)
from stencilpress.gateway.catalog.aliases import move_alias, roll_back
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.lifecycle import (
    delete_adapter,
    delete_version,
    digests_in_use,
    list_purgeable,
    list_runs,
    list_shares,
    purge,
    record_run,
    restore_adapter,
    restore_version,
    set_suite,
    share_adapter,
    unshare_adapter,
)
from stencilpress.gateway.catalog.records import AddedVersion, AliasTarget, Canary, NewVersion, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.defaults import VersionDefaults
from stencilpress.gateway.errors import ConflictError, ModelNotFoundError, NotFoundError, SmokeRequiredError
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.route import Router

BASE = BaseNames.of(("Acme/Small-135M", "small-135m"))


def digest(content: int) -> str:
    return f"{content:064x}"


async def add(db: Database, tenant: Tenant, content: int, name: str = "helper") -> AddedVersion:
    new = NewVersion(digest(content), BASE.id, False, (8,), ("q_proj",), 1000, ("adapter_config.json",))
    return await add_version(db, tenant.id, name, new, BASE)


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    """A tenant with helper@1 (prod) and helper@2."""
    tenant = await create_tenant(db, "acme")
    for content in (1, 2):
        await add(db, tenant, content)
    return tenant


def later() -> datetime:
    return datetime.now(UTC) + timedelta(minutes=1)


# --- deleting ------------------------------------------------------------------------------------------------


async def test_a_deleted_version_is_gone_until_it_is_restored(db: Database, tenant: Tenant) -> None:
    await delete_version(db, tenant.id, "helper", 2)
    await delete_version(db, tenant.id, "helper", 2)
    assert await find_target(db, tenant.id, "helper", number=2) is None
    assert [one.number for one in (await get_adapter(db, tenant.id, "helper")).versions] == [1]
    with pytest.raises(NotFoundError):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))
    await restore_version(db, tenant.id, "helper", 2)
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))


async def test_the_same_content_again_brings_a_deleted_version_back(db: Database, tenant: Tenant) -> None:
    await delete_version(db, tenant.id, "helper", 2)
    added = await add(db, tenant, 2)
    assert (added.created, added.version.number, added.version.deleted_at) == (False, 2, None)
    assert await find_target(db, tenant.id, "helper", number=2) is not None


async def test_a_deleted_adapter_is_gone_with_all_of_it_and_comes_back_whole(db: Database, tenant: Tenant) -> None:
    before = await get_adapter(db, tenant.id, "helper")
    await delete_adapter(db, tenant.id, "helper")
    with pytest.raises(NotFoundError):
        await get_adapter(db, tenant.id, "helper")
    with pytest.raises(ModelNotFoundError):
        await Router(db, BASE, Changes(db)).resolve(tenant.id, "helper@1")
    with pytest.raises(ConflictError, match="was deleted"):
        await add(db, tenant, 5)
    assert await list_adapters(db, tenant.id) == ()
    assert [one.name for one in await list_adapters(db, tenant.id, deleted=True)] == ["helper"]
    await restore_adapter(db, tenant.id, "helper")
    assert await get_adapter(db, tenant.id, "helper") == before


async def test_purging_forgets_what_was_deleted_and_nothing_else(db: Database, tenant: Tenant) -> None:
    await delete_version(db, tenant.id, "helper", 2)
    await add(db, tenant, 3, "poet")
    await add(db, tenant, 4, "poet")
    await move_alias(db, tenant.id, "poet", "prod", AliasTarget(1, Canary(2, 10)))
    await set_suite(db, tenant.id, "poet", [{"prompt": "Hello"}])
    await record_run(db, tenant.id, "poet", 1, 1, [], passed=True)
    await delete_adapter(db, tenant.id, "poet")
    assert await list_purgeable(db, datetime.now(UTC) - timedelta(minutes=1)) == frozenset()
    doomed = await list_purgeable(db, later())
    assert doomed == {digest(2), digest(3), digest(4)}
    assert await purge(db, later(), doomed - {digest(4)}) == 2, "one is leased: it stays, and its adapter with it"
    assert [one.name for one in await list_adapters(db, tenant.id, deleted=True)] == ["helper", "poet"]
    assert await digests_in_use(db, doomed) == {digest(4)}
    assert await purge(db, later(), doomed) == 1
    assert [one.name for one in await list_adapters(db, tenant.id, deleted=True)] == ["helper"]
    with pytest.raises(NotFoundError):
        await restore_version(db, tenant.id, "helper", 2)
    assert (await add(db, tenant, 3, "poet")).version.number == 1, "the name is free again"


async def test_a_purged_version_never_lends_its_number_to_another_content(db: Database, tenant: Tenant) -> None:
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1))
    suite = await set_suite(db, tenant.id, "helper", [{"prompt": "Hello"}])
    assert suite is not None
    await record_run(db, tenant.id, "helper", 2, suite.revision, [], passed=True)
    await delete_version(db, tenant.id, "helper", 2)
    assert await purge(db, later(), await list_purgeable(db, later())) == 1
    assert await list_runs(db, tenant.id, "helper", 2) == ()
    assert (await add(db, tenant, 9)).version.ref == "helper@3", (
        "answers and usage rows that name helper@2 mean another"
    )
    with pytest.raises(SmokeRequiredError):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(3))
    assert (await roll_back(db, tenant.id, "helper", "prod")).target.version == 1


async def test_purging_is_in_the_audit_log(db: Database, tenant: Tenant) -> None:
    await delete_version(db, tenant.id, "helper", 2)
    await purge(db, later(), await list_purgeable(db, later()))
    await delete_adapter(db, tenant.id, "helper")
    await purge(db, later(), await list_purgeable(db, later()))
    entries = [one for one in await list_audit(db, tenant_id=tenant.id) if one.action.endswith(".purge")]
    assert [(one.actor, one.action, one.target, one.before) for one in entries] == [
        ("system", "adapter.purge", "adapter:helper", None),
        ("system", "version.purge", "version:helper@1", {"digest": digest(1)}),
        ("system", "version.purge", "version:helper@2", {"digest": digest(2)}),
    ]


async def test_what_was_restored_meanwhile_is_not_purged(db: Database, tenant: Tenant) -> None:
    await delete_version(db, tenant.id, "helper", 2)
    doomed = await list_purgeable(db, later())
    await restore_version(db, tenant.id, "helper", 2)
    assert await purge(db, later(), doomed) == 0


async def test_a_stranger_deletes_nothing(db: Database, tenant: Tenant) -> None:
    stranger = await create_tenant(db, "other")
    for attempt in (delete_adapter, restore_adapter):
        with pytest.raises(NotFoundError):
            await attempt(db, stranger.id, "helper")
    with pytest.raises(NotFoundError):
        await delete_version(db, stranger.id, "helper", 2)
    with pytest.raises(NotFoundError):
        await delete_version(db, tenant.id, "helper", 9)


# --- sharing -------------------------------------------------------------------------------------------------


async def test_a_guest_uses_a_shared_adapter_under_its_name(db: Database, tenant: Tenant) -> None:
    guest, other = await create_tenant(db, "guest"), await create_tenant(db, "other")
    shared = await share_adapter(db, tenant.id, "helper", "guest")
    assert await share_adapter(db, tenant.id, "helper", "guest") == shared
    assert await list_shares(db, tenant.id, "helper") == (shared,)
    changes = Changes(db)
    await changes.poll()
    router = Router(db, BASE, changes)
    assert (await router.resolve(guest.id, "helper")).echo == "helper@1"
    assert (await router.resolve(guest.id, "base:helper@2")).digest == digest(2)
    assert [one.name for one in await list_shared(db, guest.id)] == ["helper"]
    assert await list_adapters(db, guest.id) == ()
    with pytest.raises(ModelNotFoundError):
        await router.resolve(other.id, "helper")
    with pytest.raises(NotFoundError):  # a guest changes nothing
        await move_alias(db, guest.id, "helper", "prod", AliasTarget(2))
    await unshare_adapter(db, tenant.id, "helper", "guest")
    await changes.poll()
    with pytest.raises(ModelNotFoundError):
        await router.resolve(guest.id, "helper")


async def test_a_name_means_one_adapter_to_a_tenant(db: Database, tenant: Tenant) -> None:
    guest, lender = await create_tenant(db, "guest"), await create_tenant(db, "lender")
    await add(db, lender, 7)
    await share_adapter(db, tenant.id, "helper", "guest")
    with pytest.raises(ConflictError, match="has an adapter 'helper' already"):
        await share_adapter(db, lender.id, "helper", "guest")
    with pytest.raises(ConflictError, match="is shared with this tenant"):
        await add(db, guest, 8)
    with pytest.raises(ConflictError):
        await share_adapter(db, tenant.id, "helper", "lender")
    with pytest.raises(ConflictError, match="owns"):
        await share_adapter(db, tenant.id, "helper", "acme")
    with pytest.raises(NotFoundError):
        await share_adapter(db, tenant.id, "helper", "nobody")


async def test_a_deleted_adapter_is_gone_for_its_guests(db: Database, tenant: Tenant) -> None:
    guest = await create_tenant(db, "guest")
    await share_adapter(db, tenant.id, "helper", "guest")
    await delete_adapter(db, tenant.id, "helper")
    assert await list_shared(db, guest.id) == ()
    with pytest.raises(ModelNotFoundError):
        await Router(db, BASE, Changes(db)).resolve(guest.id, "helper")
    assert await purge(db, later(), await list_purgeable(db, later())) == 2
    assert (await add(db, guest, 8)).version.ref == "helper@1"


async def test_a_deleted_tenant_lends_nothing(db: Database, tenant: Tenant) -> None:
    guest = await create_tenant(db, "guest")
    await share_adapter(db, tenant.id, "helper", "guest")
    changes = Changes(db)
    await changes.poll()
    router = Router(db, BASE, changes)
    assert (await router.resolve(guest.id, "helper")).echo == "helper@1"
    await delete_tenant(db, "acme")
    await changes.poll()
    with pytest.raises(ModelNotFoundError):
        await router.resolve(guest.id, "helper")
    assert await list_shared(db, guest.id) == ()


# --- what a version brings along -----------------------------------------------------------------------------


async def test_defaults_are_kept_with_the_version_and_reach_the_route(db: Database, tenant: Tenant) -> None:
    defaults = VersionDefaults(system_prompt="Answer in verse.", temperature=0.2, top_k=40)
    changed = await set_defaults(db, tenant.id, "helper", 1, defaults)
    assert changed.defaults == defaults
    changes = Changes(db)
    await changes.poll()
    router = Router(db, BASE, changes)
    assert (await router.resolve(tenant.id, "helper")).defaults == defaults
    assert (await router.resolve(tenant.id, "helper@2")).defaults == VersionDefaults()
    await set_defaults(db, tenant.id, "helper", 1, VersionDefaults())
    await changes.poll()
    assert (await router.resolve(tenant.id, "helper")).defaults == VersionDefaults()
    with pytest.raises(NotFoundError):
        await set_defaults(db, tenant.id, "helper", 7, defaults)
