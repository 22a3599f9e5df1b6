"""The catalog goes out to a file and comes in again, between both kinds of database, whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select, update

from stencilpress.gateway.access import Role, Scopes
from stencilpress.gateway.alerts.rules import Kind, Place, RuleChange
from stencilpress.gateway.catalog.adapters import add_version, list_adapters, promote, set_defaults
from stencilpress.gateway.catalog.alert_outbox import get_webhook, set_webhook
from stencilpress.gateway.catalog.alerts import read_rules, set_rule
from stencilpress.gateway.catalog.aliases import list_moves, move_alias, roll_back
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.credentials import list_keys
from stencilpress.gateway.catalog.lifecycle import get_suite, list_shares, set_suite, share_adapter
from stencilpress.gateway.catalog.models import AdapterRow, Table, VersionFilesRow
from stencilpress.gateway.catalog.records import AliasTarget, Canary, NewVersion, TenantLimits, VersionFiles
from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, disable_tenant, get_tenant, list_tenants
from stencilpress.gateway.catalog.transfer import EXPORTED, NOT_EXPORTED, Imported, export_catalog, import_catalog
from stencilpress.gateway.catalog.users import add_user, list_users, set_password
from stencilpress.gateway.catalog.version_files import find_files
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.defaults import VersionDefaults
from stencilpress.gateway.errors import ConflictError, InvalidRequestError
from stencilpress.gateway.keys import KeyRing, issue_key
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.quota.plan import Quota

BASE = BaseNames.of(("Acme/Small-135M",))


OWN = VersionFiles(b'{"r": 8}\xc3\xa9', b"\x00\xff deflated")


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Database]:
    """A catalog whose ids differ from those of an empty one."""
    async with Database(f"sqlite:///{tmp_path / 'source.db'}") as db:
        await migrate(db)
        for number in range(3):
            await create_tenant(db, f"filler-{number}")
        quota = Quota(requests_per_minute=7, tokens_per_month=2**40, time_zone="Europe/Vienna", shadow=True)
        limits = TenantLimits(16, 3, 5000, ("q_proj",), 2.5, max_tokens=100, quota=quota)
        acme = await create_tenant(db, "acme", limits)
        for content in (1, 2):
            files = ("adapter_config.json",)
            new = NewVersion(f"{content:064x}", BASE.id, False, (4, 8), ("q_proj",), 1000, files, OWN)
            await add_version(db, acme.id, "helper", new, BASE)
        await promote(db, acme.id, "helper", 2, "canary")
        await move_alias(db, acme.id, "helper", "prod", AliasTarget(1, Canary(2, 25)))
        await set_defaults(db, acme.id, "helper", 2, VersionDefaults(system_prompt="Be brief."))
        await share_adapter(db, acme.id, "helper", "filler-1")
        await set_suite(db, acme.id, "helper", [{"prompt": "hi"}])
        await set_rule(db, Kind.FIRST_TOKEN_SLOW, Place(acme.id, "helper"), RuleChange(threshold=800))
        await set_rule(db, Kind.QUOTA_NEAR, Place(), RuleChange(threshold=0.7))
        await set_webhook(db, acme.id, "https://hooks.example/", "a secret of the receiver")
        await disable_tenant(db, "filler-2")
        person = await add_user(db, "acme", "ada@example.com", Role.ADMIN)
        await set_password(db, person.public_id, "$argon2id$")
        yield db


async def exported(db: Database) -> list[bytes]:
    return [line async for line in export_catalog(db)]


async def lines(file: Sequence[bytes]) -> AsyncIterator[bytes]:
    for line in file:
        yield line


def test_every_table_is_exported_or_left_out_on_purpose() -> None:
    assert set(EXPORTED) | set(NOT_EXPORTED) == set(Table.metadata.tables)
    assert not set(EXPORTED) & set(NOT_EXPORTED)


async def test_a_catalog_comes_back_as_it_was(source: Database, db: Database) -> None:
    token = (await issue_key(source, "acme", "ci", role=Role.ADMIN, scopes=Scopes(("helper",)))).token
    mine = await create_tenant(db, "mine")
    await add_version(db, mine.id, "first", NewVersion("f" * 64, BASE.id, False, (4,), ("q_proj",), 1, ()), BASE)
    done = await import_catalog(db, lines(await exported(source)))
    counts = {
        "tenants": 4,
        "users": 1,
        "api_keys": 1,
        "adapters": 1,
        "versions": 2,
        "version_files": 2,
        "alias_moves": 3,
        "aliases": 2,
        "canaries": 1,
    }
    digests = [f"{content:064x}" for content in (1, 2)]
    rest = {"users": 1, "adapter_shares": 1, "smoke_suites": 1, "alert_rules": 2, "alert_webhooks": 1}
    assert done == Imported({**counts, **rest}, [], digests)
    assert await list_keys(db, "acme") == await list_keys(source, "acme")
    [person], [original_person] = await list_users(db), await list_users(source)
    assert person == dataclasses.replace(original_person, tenant_id=person.tenant_id)
    for name in ("acme", "filler-2"):
        ours, theirs = await get_tenant(db, name), await get_tenant(source, name)
        assert (ours.limits, ours.prefix_salt, ours.created_at) == (
            theirs.limits,
            theirs.prefix_salt,
            theirs.created_at,
        )
        assert ours.disabled_at == theirs.disabled_at
    acme, before = await get_tenant(db, "acme"), await get_tenant(source, "acme")
    [copy], [original] = await list_adapters(db, acme.id), await list_adapters(source, before.id)
    assert dataclasses.replace(copy, moves={}) == dataclasses.replace(original, moves={})
    assert (await KeyRing(db, Changes(db)).authenticate(token)).tenant_id == acme.id
    assert (await list_audit(db))[0].action == "catalog.import"
    fresh = await create_tenant(db, "later")
    assert fresh.id > acme.id, "the database goes on counting behind what was imported"
    await check_what_belongs_to_the_adapter(source, before.id, db, acme.id)


async def check_what_belongs_to_the_adapter(source: Database, theirs: int, db: Database, ours: int) -> None:
    """Shares, smoke prompts, and a history that leads back as it did: numbers of moves differ and fit each other."""
    assert await list_shares(db, ours, "helper") == await list_shares(source, theirs, "helper")
    assert await get_suite(db, ours, "helper") == await get_suite(source, theirs, "helper")
    moves, before = await list_moves(db, ours, "helper"), await list_moves(source, theirs, "helper")
    assert [dataclasses.replace(move, id=0) for move in moves] == [dataclasses.replace(move, id=0) for move in before]
    assert [await find_files(db, ours, "helper", number) for number in (1, 2)] == [OWN, OWN]
    back = await roll_back(db, ours, "helper", "prod")
    assert back.target == AliasTarget(1)
    assert await get_webhook(db, ours) == await get_webhook(source, theirs)
    rules = await read_rules(db)
    assert rules.change(Kind.FIRST_TOKEN_SLOW, Place(ours, "helper")) == RuleChange(threshold=800)
    assert rules.change(Kind.QUOTA_NEAR, Place()) == RuleChange(threshold=0.7)


async def test_what_exists_refuses_the_file_or_is_left_alone(source: Database, db: Database) -> None:
    mine = await create_tenant(db, "acme", TenantLimits(max_rank=8))
    file = await exported(source)
    with pytest.raises(ConflictError):
        await import_catalog(db, lines(file))
    assert [tenant.name for tenant in await list_tenants(db)] == ["acme"]
    done = await import_catalog(db, lines(file), skip_existing=True)
    kept = {"tenants": 3, "alert_rules": 1}
    assert (done.skipped, done.rows, done.digests) == (["acme"], kept, []), "nor what it has, shares included"
    again = await import_catalog(db, lines(file), skip_existing=True)
    assert again.rows == {}, "a rule of all gives way to one that is here as well"
    assert await get_tenant(db, "acme") == mine
    assert await list_adapters(db, mine.id) == ()


async def test_a_blob_that_was_ones_own_there_need_not_be_here(source: Database, db: Database) -> None:
    """Of two contents from before files were kept with versions, one is here already, of another tenant."""
    async with source.write() as session:
        await session.execute(update(VersionFilesRow).values(config=None, weights_header=None))
    mine = await create_tenant(db, "mine")
    here = NewVersion(f"{2:064x}", BASE.id, False, (4,), ("q_proj",), 1, ())
    await add_version(db, mine.id, "first", here, BASE)
    async with db.write() as session:
        [own] = await session.scalars(select(AdapterRow.id))
        session.add(VersionFilesRow(adapter_id=own, version=1))
    await import_catalog(db, lines(await exported(source)))
    acme = await get_tenant(db, "acme")
    assert [await find_files(db, acme.id, "helper", number) for number in (1, 2)] == ["in blob", None]
    assert await find_files(db, mine.id, "first", 1) == "in blob"


def changed(line: bytes, **row: Any) -> bytes:
    value = msgspec.json.decode(line)
    value["row"] = {name: item for name, item in {**value["row"], **row}.items() if item != "absent"}
    return msgspec.json.encode(value) + b"\n"


def _with_digest(line: bytes, digest: str) -> bytes:
    return changed(line, digest=digest) if b'"versions"' in line else line


async def test_a_file_that_is_not_whole_or_not_ours_changes_nothing(source: Database, db: Database) -> None:
    head, first, *rest, end = await exported(source)
    rest_of_tenants = [line for line in rest if b'"tenants"' in line]
    other_schema = head.replace(b'"schema":"', b'"schema":"9')
    refused: dict[str, list[bytes]] = {
        "one of its kind": [b"\xff\xfe\n"],
        "is of the format": [head.replace(b"stencilpress", b"something"), first, end],
        "export it again": [other_schema, first, *rest, end],
        "ends early": [head, first, *rest],
        "rows instead of": [head, first, end],
        "goes on after": [head, first, *rest, end, first],
        "no row for": [head, *[line for line in rest if line not in rest_of_tenants], end],
        "other columns": [head, changed(first, weight="absent"), *rest, end],
        "a wrong value": [head, changed(first, max_rank="many"), *rest, end],
        "wrong value: max_rank: must be between": [head, changed(first, max_rank=0), *rest, end],
        "'Mars/Olympus' is no time zone": [head, changed(first, time_zone="Mars/Olympus"), *rest, end],
        "digest: is none": [head, first, *[_with_digest(line, "../../etc") for line in rest], end],
        "rows of 'audit_log'": [head, first.replace(b'"tenants"', b'"audit_log"'), *rest, end],
    }
    for told, file in refused.items():
        with pytest.raises(InvalidRequestError, match=told):
            await import_catalog(db, lines(file))
    with pytest.raises(InvalidRequestError):
        await import_catalog(db, lines([]))
    assert await list_tenants(db) == ()
    assert await list_audit(db) == ()
