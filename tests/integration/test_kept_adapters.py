"""Pinned and preloaded adapters: chosen by an operator or named by a setting, told to engines, through every change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from stencilpress.engine.messages import MAX_KEPT, Keep
from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog import kept as kept_module
from stencilpress.gateway.catalog.adapters import add_version, promote
from stencilpress.gateway.catalog.aliases import move_alias
from stencilpress.gateway.catalog.kept import kept_versions, set_kept
from stencilpress.gateway.catalog.records import AliasTarget, Canary
from stencilpress.gateway.catalog.tenants import disable_tenant, enable_tenant, get_tenant
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.keeper import KeptName, kept_names
from stencilpress.gateway.names import BaseNames
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import BASE_ID, BASE_NAMES, Gateway, new_version, running_gateway

PIRATE = "/tenants/demo/adapters/pirate"
ONE, TWO = "a" * 64, "b" * 64


def said(gateway: Gateway) -> tuple[set[str], set[str]]:
    """What the engine was told last to pin and to preload."""
    keep: Keep = gateway.engine.keeps[-1]
    return set(keep.pinned), set(keep.preloaded)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(45):
        while not condition():  # noqa: ASYNC110 - another thread's list, without an event
            await asyncio.sleep(0.02)


async def test_a_pin_is_told_to_the_engine_and_follows_its_alias(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        db, demo = gateway.services.db, await get_tenant(gateway.services.db, "demo")
        operator = await admin_client(gateway, "other", Role.OPERATOR)
        assert (await operator("GET", PIRATE))["kept"] is None
        assert gateway.engine.keeps == []
        assert (await operator("PUT", f"{PIRATE}/pin"))["kept"] == "pin"
        assert said(gateway) == ({ONE}, set())
        assert (await operator("POST", f"{PIRATE}/preload"))["kept"] == "pin", "a pinned one stays pinned"
        await promote(db, demo.id, "pirate", 2)
        await until(lambda: said(gateway) == ({TWO}, set()))
        await move_alias(db, demo.id, "pirate", "prod", AliasTarget(2, Canary(1, 10)))
        await until(lambda: said(gateway) == ({ONE, TWO}, set()))
        await disable_tenant(db, "demo")
        await until(lambda: said(gateway) == (set(), set()))
        await enable_tenant(db, "demo")
        await until(lambda: said(gateway) == ({ONE, TWO}, set()))
        assert (await operator("DELETE", f"{PIRATE}/pin"))["kept"] is None
        assert said(gateway) == (set(), set())
        entries = (await operator("GET", "/tenants/demo/audit?target=adapter:pirate"))["data"]
        assert [(one["action"], one["after"]) for one in entries] == [
            ("adapter.keep", {"kept": None}),
            ("adapter.keep", {"kept": "pin"}),
        ]


async def test_a_preload_asked_again_is_said_again_and_deleting_ends_it(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        operator = await admin_client(gateway, "other", Role.OPERATOR)
        for _ in range(2):
            assert (await operator("POST", f"{PIRATE}/preload"))["kept"] == "preload"
        assert [set(keep.preloaded) for keep in gateway.engine.keeps] == [{ONE}, {ONE}]
        await operator("DELETE", PIRATE)
        await until(lambda: said(gateway) == (set(), set()))


async def test_only_an_operator_keeps_adapters(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        admin = await admin_client(gateway, "demo", Role.ADMIN)
        for method, path in (("PUT", "/pin"), ("DELETE", "/pin"), ("POST", "/preload")):
            assert (await admin.raw(method, PIRATE + path))[0] == 403
        operator = await admin_client(gateway, "other", Role.OPERATOR)
        assert (await operator.raw("PUT", "/tenants/demo/adapters/nobody/pin"))[0] == 404
        assert gateway.engine.keeps == []


async def test_another_gateway_and_the_next_start_know_what_is_pinned(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        demo = await get_tenant(gateway.services.db, "demo")
        await set_kept(gateway.services.db, demo.id, "pirate", "pin")  # by another process
        await until(lambda: bool(gateway.engine.keeps))
        assert said(gateway) == ({ONE}, set())
        keeper = gateway.services.keeper
        gateway.engine.keeps.clear()
        keeper._said = (frozenset(), frozenset())  # as at a start
        async with keeper.following():
            assert said(gateway) == ({ONE}, set())


async def test_settings_name_adapters_by_alias_and_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    preload = "demo/pirate@1, demo/later,nobody/pirate"
    async with running_gateway(tmp_path, pin="demo/pirate@beta", preload=preload) as gateway:
        db, demo = gateway.services.db, await get_tenant(gateway.services.db, "demo")
        assert said(gateway) == (set(), {ONE})
        assert max(caplog.messages).startswith("nobody/pirate is to be kept")
        await move_alias(db, demo.id, "pirate", "beta", AliasTarget(2))
        await until(lambda: said(gateway) == ({TWO}, {ONE}))
        await move_alias(db, demo.id, "pirate", "beta", AliasTarget(1))
        await until(lambda: said(gateway) == ({ONE}, set()))
        await add_version(db, demo.id, "later", new_version("c"), BaseNames.of(BASE_NAMES))
        await until(lambda: said(gateway) == ({ONE}, {"c" * 64}))


def test_a_setting_that_names_nothing_possible_is_refused() -> None:
    assert kept_names("a/b, c/d@prod,", "PIN") == (KeptName("a", "b"), KeptName("c", "d@prod"))
    for text in ("pirate", "demo/", "/pirate", "demo/Pirate", "demo/a@", "demo/base", "demo/a/b"):
        with pytest.raises(SettingsError, match="PIN: expected tenant/adapter"):
            kept_names(text, "PIN")


async def test_no_more_are_kept_than_an_engine_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_KEPT > 1
    monkeypatch.setattr(kept_module, "MAX_KEPT", 1)
    async with running_gateway(tmp_path) as gateway:
        db, demo = gateway.services.db, await get_tenant(gateway.services.db, "demo")
        await add_version(db, demo.id, "helper", new_version("c"), BaseNames.of(BASE_NAMES))
        await set_kept(db, demo.id, "pirate", "pin")
        with pytest.raises(InvalidRequestError, match="of at most 1"):
            await set_kept(db, demo.id, "helper", "pin")
        await set_kept(db, demo.id, "helper", "preload")
        assert [(one.digest, one.kept) for one in await kept_versions(db, BASE_ID)] == [
            (ONE, "pin"),
            ("c" * 64, "preload"),
        ]
        assert await kept_versions(db, "another/base") == ()
        client = AdminClient(gateway, gateway.key)
        assert (await client.raw("GET", "/tenants/demo/adapters"))[0] == 403
