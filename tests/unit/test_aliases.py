"""Aliases: one winner of a race, a share of users that stays the same, and a way back. On both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from stencilpress.gateway.access import SYSTEM
from stencilpress.gateway.catalog.adapters import add_version, find_target, get_adapter
from stencilpress.gateway.catalog.aliases import MAX_ALIASES, list_moves, move_alias, remove_alias, roll_back
from stencilpress.gateway.catalog.lifecycle import delete_version, record_run, set_suite
from stencilpress.gateway.catalog.records import Alias, AliasTarget, Canary, Expected, NewVersion, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.errors import (
    AliasMovedError,
    ConflictError,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    SmokeRequiredError,
)
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.route import Router, takes_canary

BASE = BaseNames.of(("Acme/Small-135M", "small-135m"))
USERS = [f"user-{i}" for i in range(2000)]


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    """A tenant with helper@1 (prod) to helper@4."""
    tenant = await create_tenant(db, "acme")
    for number in range(1, 5):
        new = NewVersion(f"{number:064x}", BASE.id, False, (8,), ("q_proj",), 1000, ("adapter_config.json",))
        await add_version(db, tenant.id, "helper", new, BASE)
    return tenant


async def state(db: Database, tenant: Tenant, alias: str = "prod") -> AliasTarget:
    adapter = await get_adapter(db, tenant.id, "helper")
    return AliasTarget(adapter.aliases[alias], adapter.canaries.get(alias))


async def test_of_twenty_that_expect_the_same_state_one_wins(db: Database, database_url: str, tenant: Tenant) -> None:
    """As from several processes: each Database has connections of its own."""
    others = [Database(database_url) for _ in range(4)]
    outcomes = await asyncio.gather(
        *(
            move_alias(others[i % 4], tenant.id, "helper", "prod", AliasTarget(2 + i % 3), expected=Expected(version=1))
            for i in range(20)
        ),
        return_exceptions=True,
    )
    await asyncio.gather(*(other.close() for other in others))
    winners = [one for one in outcomes if isinstance(one, Alias)]
    assert len(winners) == 1
    assert sum(isinstance(one, AliasMovedError) for one in outcomes) == 19
    assert await state(db, tenant) == winners[0].target
    newest = await list_moves(db, tenant.id, "helper", "prod", limit=1)
    assert [move.target for move in newest] == [winners[0].target]


async def test_a_move_id_is_an_etag_even_where_the_version_came_back(db: Database, tenant: Tenant) -> None:
    seen = (await get_adapter(db, tenant.id, "helper")).moves["prod"]
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1))
    with pytest.raises(AliasMovedError):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(3), expected=Expected(move_id=seen))
    assert (
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(3), expected=Expected(version=1))
    ).target == AliasTarget(3)


async def test_expecting_nothing_creates_an_alias_once(db: Database, tenant: Tenant) -> None:
    nothing = Expected(version=0)
    made = await move_alias(db, tenant.id, "helper", "beta", AliasTarget(2), expected=nothing)
    assert made.changed
    with pytest.raises(AliasMovedError):
        await move_alias(db, tenant.id, "helper", "beta", AliasTarget(3), expected=nothing)
    again = await move_alias(db, tenant.id, "helper", "beta", AliasTarget(2))
    assert (again.changed, again.move_id) == (False, made.move_id)


async def test_rolling_back_goes_back_one_move_at_a_time(db: Database, tenant: Tenant) -> None:
    by = {"actor": replace(SYSTEM, name="key:abc"), "reason": "better answers"}
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 10)), **by)  # type: ignore[arg-type]
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2), **by)  # type: ignore[arg-type]
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(3))
    steps = [(await roll_back(db, tenant.id, "helper", "prod")).target for _ in range(3)]
    assert steps == [AliasTarget(2), AliasTarget(1, Canary(2, 10)), AliasTarget(1)]
    assert await state(db, tenant) == AliasTarget(1)
    with pytest.raises(ConflictError, match="no earlier state"):
        await roll_back(db, tenant.id, "helper", "prod")
    history = await list_moves(db, tenant.id, "helper", "prod")
    assert [move.kind for move in history] == ["rollback"] * 3 + ["move"] * 4
    assert (history[4].actor, history[4].reason) == ("key:abc", "better answers")
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(4))
    assert (await roll_back(db, tenant.id, "helper", "prod")).target == AliasTarget(1)


async def test_rolling_back_passes_over_versions_that_are_gone(db: Database, tenant: Tenant) -> None:
    for number in (2, 3):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(number))
    await delete_version(db, tenant.id, "helper", 2)
    assert (await roll_back(db, tenant.id, "helper", "prod")).target == AliasTarget(1)


async def test_of_two_rollbacks_that_saw_the_same_state_one_wins(db: Database, tenant: Tenant) -> None:
    for number in (2, 3):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(number))
    seen = Expected(version=3)
    outcomes = await asyncio.gather(
        *(roll_back(db, tenant.id, "helper", "prod", expected=seen) for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(one).__name__ for one in outcomes) == ["Alias", "AliasMovedError"]
    assert await state(db, tenant) == AliasTarget(2)


@pytest.mark.parametrize(
    ("alias", "target", "error"),
    [
        ("3", AliasTarget(1), InvalidRequestError),
        ("beta", AliasTarget(9), NotFoundError),
        ("beta", AliasTarget(0), NotFoundError),
        ("beta", AliasTarget(2**40), NotFoundError),
        ("beta", AliasTarget(1, Canary(9, 10)), NotFoundError),
        ("beta", AliasTarget(1, Canary(2, 0)), InvalidRequestError),
        ("beta", AliasTarget(1, Canary(2, 101)), InvalidRequestError),
        ("beta", AliasTarget(1, Canary(1, 10)), InvalidRequestError),
    ],
)
async def test_what_an_alias_cannot_be(
    db: Database, tenant: Tenant, alias: str, target: AliasTarget, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await move_alias(db, tenant.id, "helper", alias, target)
    assert (await get_adapter(db, tenant.id, "helper")).aliases == {"prod": 1}


async def test_a_removed_alias_is_a_model_that_does_not_exist(db: Database, tenant: Tenant) -> None:
    await move_alias(db, tenant.id, "helper", "beta", AliasTarget(2, Canary(3, 50)))
    await remove_alias(db, tenant.id, "helper", "beta")
    assert await find_target(db, tenant.id, "helper", alias="beta") is None
    with pytest.raises(NotFoundError):
        await remove_alias(db, tenant.id, "helper", "beta")
    assert [move.kind for move in await list_moves(db, tenant.id, "helper", "beta")] == ["remove", "move"]


# --- canaries ------------------------------------------------------------------------------------------------


async def test_a_canary_gets_its_share_and_keeps_its_users(db: Database, tenant: Tenant) -> None:
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 20)))
    changes = Changes(db)
    await changes.poll()
    router = Router(db, BASE, changes)
    first = {user: (await router.resolve(tenant.id, "helper", user)).version for user in USERS}
    share = sum(version == 2 for version in first.values()) / len(USERS)
    assert abs(share - 0.20) < 0.03  # 3 % is more than three standard deviations of 2000 draws
    elsewhere = Router(db, BASE, changes)  # another gateway
    assert first == {user: (await elsewhere.resolve(tenant.id, "helper@prod", user)).version for user in USERS}
    assert (await router.resolve(tenant.id, "helper@1", USERS[0])).version == 1
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 60)))
    await changes.poll()
    grown = {user: (await router.resolve(tenant.id, "helper", user)).version for user in USERS}
    assert all(grown[user] == 2 for user, version in first.items() if version == 2), "who was in stays in"
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 100)))
    await changes.poll()
    assert {(await router.resolve(tenant.id, "helper", user)).version for user in USERS} == {2}


def test_another_canary_asks_other_users_first() -> None:
    one = {user for user in USERS if takes_canary("7/prod/2", user, 10)}
    other = {user for user in USERS if takes_canary("7/prod/3", user, 10)}
    assert len(one & other) < len(one) / 2


async def test_a_version_with_users_of_a_canary_is_not_deleted(db: Database, tenant: Tenant) -> None:
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 5)))
    for number in (1, 2):
        with pytest.raises(ConflictError, match="helper@prod points at it"):
            await delete_version(db, tenant.id, "helper", number)
    await delete_version(db, tenant.id, "helper", 3)
    with pytest.raises(ModelNotFoundError):
        await Router(db, BASE, Changes(db)).resolve(tenant.id, "helper@3")


# --- smoke prompts -------------------------------------------------------------------------------------------


async def test_prod_moves_only_to_versions_whose_prompts_passed(db: Database, tenant: Tenant) -> None:
    suite = await set_suite(db, tenant.id, "helper", [{"prompt": "Hello"}])
    assert suite is not None
    with pytest.raises(SmokeRequiredError) as caught:
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))
    assert caught.value.version == 2
    with pytest.raises(SmokeRequiredError):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 1)))
    await move_alias(db, tenant.id, "helper", "beta", AliasTarget(2))  # only prod has a gate
    await record_run(db, tenant.id, "helper", 2, suite.revision, [], passed=True)
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(1, Canary(2, 10)))
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))
    await record_run(db, tenant.id, "helper", 3, suite.revision, [], passed=True)
    await record_run(db, tenant.id, "helper", 3, suite.revision, [], passed=False)
    with pytest.raises(SmokeRequiredError):  # the last run counts
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(3))
    await roll_back(db, tenant.id, "helper", "prod")  # the way back is always open


async def test_new_prompts_ask_for_new_runs(db: Database, tenant: Tenant) -> None:
    suite = await set_suite(db, tenant.id, "helper", [{"prompt": "Hello"}])
    assert suite is not None
    await record_run(db, tenant.id, "helper", 2, suite.revision, [], passed=True)
    same = await set_suite(db, tenant.id, "helper", [{"prompt": "Hello"}])
    assert same is not None
    assert same.revision == suite.revision
    await set_suite(db, tenant.id, "helper", [{"prompt": "Bye"}])
    with pytest.raises(SmokeRequiredError):
        await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))
    assert await set_suite(db, tenant.id, "helper", []) is None
    again = await set_suite(db, tenant.id, "helper", [{"prompt": "Else"}])
    assert again is not None
    assert again.revision > suite.revision, "an old run never counts for a new suite"
    await set_suite(db, tenant.id, "helper", [])
    await move_alias(db, tenant.id, "helper", "prod", AliasTarget(2))


async def test_an_upload_does_not_pass_the_prompts_by(db: Database, tenant: Tenant) -> None:
    await set_suite(db, tenant.id, "helper", [{"prompt": "Hello"}])
    new = NewVersion(f"{9:064x}", BASE.id, False, (8,), ("q_proj",), 1000, ("adapter_config.json",))
    added = await add_version(db, tenant.id, "helper", new, BASE, promote=True)
    assert not added.promoted
    assert await state(db, tenant) == AliasTarget(1)


async def test_an_adapter_has_so_many_aliases(db: Database, tenant: Tenant) -> None:
    for number in range(MAX_ALIASES - 1):  # prod is one
        await move_alias(db, tenant.id, "helper", f"a{number}", AliasTarget(1))
    with pytest.raises(ConflictError, match=f"at most {MAX_ALIASES}"):
        await move_alias(db, tenant.id, "helper", "more", AliasTarget(1))
    await move_alias(db, tenant.id, "helper", "a0", AliasTarget(2))
    await remove_alias(db, tenant.id, "helper", "a0")
    await move_alias(db, tenant.id, "helper", "more", AliasTarget(1))
