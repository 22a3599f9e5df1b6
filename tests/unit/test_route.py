"""What ``model`` may say, and that foreign names are names that do not exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stencilpress.gateway.catalog.adapters import add_version, promote
from stencilpress.gateway.catalog.records import NewVersion, Tenant
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.errors import ApiError, InvalidRequestError, ModelNotFoundError
from stencilpress.gateway.names import (
    BaseNames,
    ModelRef,
    check_adapter_name,
    check_alias_name,
    check_tenant_name,
    parse_model,
    parse_version_ref,
)
from stencilpress.gateway.route import Route, Router

BASE = BaseNames.of(("Acme/Small-135M", "small-135m"))


def version(number: int, base_id: str = BASE.id) -> NewVersion:
    return NewVersion(f"{number:064x}", base_id, False, (8,), ("q_proj",), 1000, ("adapter_config.json",))


@pytest.fixture
async def tenant(db: Database) -> Tenant:
    """A tenant with helper@1, helper@2 and helper@3; prod at 1, canary at 3."""
    tenant = await create_tenant(db, "acme")
    for number in (1, 2, 3):
        await add_version(db, tenant.id, "helper", version(number), BASE)
    await promote(db, tenant.id, "helper", 3, "canary")
    return tenant


@pytest.mark.parametrize("model", ["Acme/Small-135M", "small-135m", "Small-135M", "base"])
async def test_each_name_of_the_base_is_the_base_alone(db: Database, tenant: Tenant, model: str) -> None:
    assert await Router(db, BASE, Changes(db)).resolve(tenant.id, model) == Route("", "Acme/Small-135M")


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ("helper", 1),
        ("helper@2", 2),
        ("helper@prod", 1),
        ("helper@canary", 3),
        ("base:helper", 1),
        ("small-135m:helper@2", 2),
        ("Acme/Small-135M:helper@canary", 3),
    ],
)
async def test_a_name_a_version_and_an_alias_resolve_to_a_version(
    db: Database, tenant: Tenant, model: str, number: int
) -> None:
    expected = Route(f"{number:064x}", f"helper@{number}", "helper", number)
    assert await Router(db, BASE, Changes(db)).resolve(tenant.id, model) == expected


STRANGE = [
    "nobody",
    "Helper",
    "HELPER@1",
    "helper@4",
    "helper@03",
    "helper@0",
    "helper@-1",
    "helper@",
    "helper@PROD",
    "helper@stable",
    "helper@1@1",
    "helper@٣",
    "helper@99999999999999999999",
    "helper\n",
    "helper\0",
    " helper",
    "",
    ":",
    ":helper",
    "base:",
    "base:base:helper",
    "other:helper",
    "SMALL-135M",
    "small-135m:base",
    "../helper",
    "%2e%2e",
    "helper' OR '1'='1",
    "helper'; DROP TABLE adapters; --",
    "helper%",
    "help_r",
    "a" * 64,
    "h" * 1_000_000,
]


async def test_everything_else_is_a_model_that_does_not_exist(db: Database, tenant: Tenant) -> None:
    router = Router(db, BASE, Changes(db))
    for model in STRANGE:
        with pytest.raises(ModelNotFoundError) as caught:
            await router.resolve(tenant.id, model)
        assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
        assert len(caught.value.message) < 400
    assert (await router.resolve(tenant.id, "helper")).version == 1


async def test_a_foreign_adapter_and_an_unknown_one_look_the_same(db: Database, tenant: Tenant) -> None:
    stranger = await create_tenant(db, "other")
    router = Router(db, BASE, Changes(db))

    async def refusal(model: str) -> dict[str, object]:
        with pytest.raises(ApiError) as caught:
            await router.resolve(stranger.id, model)
        return {**caught.value.fields(), "status": caught.value.status, "message": caught.value.message}

    await router.resolve(tenant.id, "helper@2")  # in the cache now, for its owner
    foreign, unknown = await refusal("helper@2"), await refusal("absent@2")
    assert str(foreign).replace("helper", "absent") == str(unknown)
    await add_version(db, stranger.id, "helper", version(9), BASE)
    assert (await router.resolve(stranger.id, "helper")).digest == f"{9:064x}"
    assert (await router.resolve(tenant.id, "helper")).digest == f"{1:064x}"


async def test_a_version_of_another_base_is_not_served(db: Database, tenant: Tenant) -> None:
    await add_version(db, tenant.id, "foreign", version(7, base_id="Acme/Large-8B"), BASE)
    with pytest.raises(ModelNotFoundError):
        await Router(db, BASE, Changes(db)).resolve(tenant.id, "foreign")


async def test_an_alias_moves_while_a_pinned_version_stays(db: Database, tenant: Tenant) -> None:
    changes = Changes(db)
    await changes.poll()
    router = Router(db, BASE, changes)
    assert (await router.resolve(tenant.id, "helper")).version == 1
    await promote(db, tenant.id, "helper", 2)
    assert (await router.resolve(tenant.id, "helper")).version == 1, "known answers cost no SQL"
    await changes.poll()
    assert (await router.resolve(tenant.id, "helper")).version == 2
    await promote(db, tenant.id, "helper", 1)
    await changes.poll()
    assert (await router.resolve(tenant.id, "helper")).version == 1
    assert (await router.resolve(tenant.id, "helper@2")).version == 2


async def test_a_new_adapter_is_found_at_once(db: Database, tenant: Tenant) -> None:
    changes = Changes(db)
    await changes.poll()
    router = Router(db, BASE, changes)
    with pytest.raises(ModelNotFoundError):
        await router.resolve(tenant.id, "fresh")
    await add_version(db, tenant.id, "fresh", version(5), BASE)
    assert (await router.resolve(tenant.id, "fresh")).echo == "fresh@1"


NAMES = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,62}\Z")
ALIASES = st.from_regex(r"\A[a-z][a-z0-9._-]{0,62}\Z")


@given(NAMES, st.integers(1, 999_999_999), ALIASES, st.sampled_from(["", *(f"{name}:" for name in BASE.names)]))
def test_what_is_written_is_what_is_read(name: str, number: int, alias: str, prefix: str) -> None:
    if name not in BASE.names:
        assert parse_model(f"{prefix}{name}", BASE) == ModelRef(name)
    assert parse_model(f"{prefix}{name}@{number}", BASE) == ModelRef(name, version=number)
    assert parse_model(f"{prefix}{name}@{alias}", BASE) == ModelRef(name, alias=alias)
    assert parse_version_ref(f"{name}@{number}") == (name, number)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        ref = parse_model(text, BASE)
    except ModelNotFoundError:
        return
    assert not ref.adapter or check_adapter_name(ref.adapter) == ref.adapter
    assert check_alias_name(ref.alias) == ref.alias


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a/b", "a:b", "a@b", "a b", "a\n", "ä", "a" * 64, "<img>"])
def test_malformed_names_are_refused_with_the_rule(name: str) -> None:
    for check in (check_tenant_name, check_adapter_name, check_alias_name):
        with pytest.raises(InvalidRequestError, match="1 to 63 of a-z 0-9"):
            check(name)


def test_an_alias_is_never_a_number() -> None:
    with pytest.raises(InvalidRequestError):
        check_alias_name("3")
    assert check_adapter_name("3") == "3"


@pytest.mark.parametrize("name", ["base", "small-135m"])
def test_an_adapter_never_has_the_bases_name(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_adapter_name(name, BASE)
    assert caught.value.param == "name"


def test_an_adapter_is_not_named_like_the_base_in_another_case() -> None:
    with pytest.raises(InvalidRequestError):
        check_adapter_name("gpt-x", BaseNames.of(("Lab/GPT-X",)))


@pytest.mark.parametrize("text", ["helper", "helper@", "helper@prod", "helper@0", "@3", "a@3@4", "helper@3 "])
def test_a_version_reference_needs_name_and_number(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="name@number"):
        parse_version_ref(text)
