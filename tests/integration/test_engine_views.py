"""What engines show, by name: pages, tiers and live numbers; nobody sees another tenant's name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stencilpress.engine.messages import AdapterSeen, PageOwner, Pages, pack_tokens
from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.adapter_metrics import most_used
from stencilpress.gateway.catalog.adapters import add_version
from stencilpress.gateway.catalog.lifecycle import share_adapter
from stencilpress.gateway.catalog.tenants import create_tenant, get_tenant
from stencilpress.gateway.engine_reader import EngineReader
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.sampling import EngineSampler, server_name
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import BASE_NAMES, Gateway, new_version, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIRATE, TWIN, LOST = "a" * 64, "b" * 64, "f" * 64
"""``demo``'s pirate@1; its pirate@2, which ``other`` has as secret@1 too; what is in nobody's catalog."""


def seen(digest: str, tenant: int, **given: Any) -> AdapterSeen:
    usual: dict[str, Any] = {
        "tier": "hbm",
        "pages": 3,
        "host_bytes": 1000,
        "pinned": False,
        "waiting": 0,
        "active": 1,
        "hits": 3,
        "misses": 1,
        "evictions": 0,
        "reads": 1,
        "read_s": 0.01,
        "copies": 1,
        "copy_s": 0.002,
    }
    return AdapterSeen(digest=digest, tenant=tenant, **{**usual, **given})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        db = running.services.db
        other = await get_tenant(db, "other")
        await add_version(db, other.id, "secret", new_version("b"), BaseNames.of(BASE_NAMES))
        await create_tenant(db, "guest")
        running.engine.adapters = [
            seen(PIRATE, 1, pinned=True),
            seen(TWIN, 2, tier="host", pages=0, hits=0, misses=2),
            seen(LOST, 9, tier="disk", error="no such file"),
        ]
        owners = (
            PageOwner("free"),
            PageOwner("kv", "2"),
            PageOwner("adapter", PIRATE),
            PageOwner("adapter", TWIN),
            PageOwner("cached"),
            PageOwner("adapter", LOST),
        )
        running.engine.pages = Pages(0, 12, owners, pack_tokens([1, 2, 2, 3, 3, 1, 4, 1, 5, 1, 0, 4]))
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def operator(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "other", Role.OPERATOR)


async def test_engines_show_their_numbers(gateway: Gateway, operator: AdminClient) -> None:
    [engine] = (await operator("GET", "/engines"))["data"]
    assert (engine["engine"], engine["up"], engine["generation"]) == (1, True, 1)
    assert engine["seen_s"] < 30
    viewer = await admin_client(gateway, "demo", Role.ADMIN)
    for path in ("/engines", "/engines/1/pages", "/residency", "/engines/1/series"):
        assert (await viewer.raw("GET", path))[0] == 403


async def test_a_pool_is_drawn_page_by_page_with_names(gateway: Gateway, operator: AdminClient) -> None:
    pages = await operator("GET", "/engines/1/pages")
    owners = pages["owners"]
    drawn = [
        owners[index]
        for index, count in zip(pages["runs"][::2], pages["runs"][1::2], strict=True)
        for _ in range(count)
    ]
    assert len(drawn) == pages["total"] == 12
    shown = [
        (one["kind"], one["tenant"], one["adapter"], one["version"], one["pinned"], one["shared"]) for one in drawn
    ]
    assert shown == [
        *[("kv", "other", None, None, False, 0)] * 2,
        *[("adapter", "demo", "pirate", 1, True, 0)] * 3,
        ("adapter", "other", "secret", 1, False, 1),  # who used it last
        ("cached", None, None, None, False, 0),
        ("adapter", None, None, None, False, 0),
        *[("free", None, None, None, False, 0)] * 4,
    ]
    unchanged = await operator("GET", f"/engines/1/pages?since={pages['version']}")
    assert (unchanged["version"], unchanged["runs"], unchanged["owners"]) == (pages["version"], None, None)
    for number in ("2", "0", "x"):
        assert (await operator.raw("GET", f"/engines/{number}/pages"))[0] == 404


async def test_however_many_look_an_engine_is_asked_once(gateway: Gateway) -> None:
    view = EngineReader(gateway.services.engine, gateway.services.db, clock=lambda: 100.0)
    asked = gateway.engine.map_asks
    pictures = await asyncio.gather(*(view.pages(1) for _ in range(30)))
    assert gateway.engine.map_asks == asked + 1
    assert all(picture is pictures[0] for picture in pictures)


async def test_a_tenant_sees_where_its_own_adapters_are_under_its_own_names(
    gateway: Gateway, operator: AdminClient
) -> None:
    async def rows(tenant: str) -> list[tuple[str, str, int, str]]:
        client = await admin_client(gateway, tenant, Role.VIEWER)
        text = (await client.raw("GET", f"/tenants/{tenant}/residency"))[1]
        foreign = {"demo": "secret", "other": "pirate", "guest": "secret"}[tenant]
        assert foreign not in text
        found = (await client("GET", f"/tenants/{tenant}/residency"))["data"]
        return [(one["tenant"], one["adapter"], one["version"], one["tier"]) for one in found]

    assert await rows("demo") == [("demo", "pirate", 1, "hbm"), ("demo", "pirate", 2, "host")]
    assert await rows("other") == [("other", "secret", 1, "host")]
    assert await rows("guest") == []
    demo = await get_tenant(gateway.services.db, "demo")
    await share_adapter(gateway.services.db, demo.id, "pirate", "guest")
    fresh = EngineReader(gateway.services.engine, gateway.services.db)
    owners = await fresh.owners([PIRATE, TWIN])
    assert [sorted(len(one.guests) for one in owners[digest]) for digest in (PIRATE, TWIN)] == [[1], [0, 1]]


async def test_operators_see_all_tiers_with_filters_and_pages(operator: AdminClient) -> None:
    found = (await operator("GET", "/residency"))["data"]
    assert [(one["tenant"], one["adapter"], one["tier"]) for one in found] == [
        ("demo", "pirate", "hbm"),
        ("other", "secret", "host"),
        ("", "", "disk"),
    ]
    assert (found[0]["hit_rate"], found[1]["hit_rate"], found[2]["error"]) == (0.75, 0.0, "no such file")
    assert [one["adapter"] for one in (await operator("GET", "/residency?tier=host"))["data"]] == ["secret"]
    assert [one["adapter"] for one in (await operator("GET", "/residency?adapter=pi"))["data"]] == ["pirate"]
    first = await operator("GET", "/residency?limit=2")
    rest = await operator("GET", f"/residency?limit=2&after={first['next']}")
    assert first["data"] + rest["data"] == found
    assert rest["next"] is None


async def test_samples_of_engines_become_a_series(gateway: Gateway, operator: AdminClient) -> None:
    services, now = gateway.services, [1_700_000_000.0]
    view = EngineReader(services.engine, services.db, clock=lambda: now[0])  # asks anew each time
    sampler = EngineSampler(view, services.db, server_name(services.settings), clock=lambda: now[0])
    await sampler.sample()
    body = {"model": "base", "prompt": [5, 6, 7], "max_tokens": 4}
    assert (await gateway.post("/v1/completions", body))[0] == 200
    now[0] += 5
    await sampler.sample()
    now[0] += 60
    await sampler.sample()  # the third writes
    found = await operator("GET", "/engines/1/series?start=2023-11-14T22:00:00Z&end=2023-11-14T23:00:00Z")
    lines = found["lines"]
    assert (lines["prompt_tokens"], lines["completion_tokens"], lines["running"]) == ([3], [4], [0])  # an hour's
    assert lines["steps"][0] >= 1
    assert await operator("GET", "/engines/all/series?start=2023-11-14T22:00:00Z&end=2023-11-14T23:00:00Z") == found


async def test_what_an_engine_counted_is_not_counted_again_when_it_is_lost(tmp_path: Path) -> None:
    """Its last answer is a moment old, and it is gone: nobody can say any more which engine that was."""
    async with running_gateway(tmp_path) as gateway:
        services, now = gateway.services, [1_700_000_000.0]
        view = EngineReader(services.engine, services.db, clock=lambda: now[0])
        sampler = EngineSampler(view, services.db, server_name(services.settings), clock=lambda: now[0])
        body = {"model": "base", "prompt": [5, 6, 7], "max_tokens": 4}
        assert (await gateway.post("/v1/completions", body))[0] == 200
        await sampler.sample()
        now[0] += 5
        assert (await view.stats())[0].stats is not None
        gateway.engine.crash()
        while services.engine.ready:  # noqa: ASYNC110 - another thread ends it
            await asyncio.sleep(0.01)
        await sampler.sample()
        await sampler.write()
        operator = await admin_client(gateway, "other", Role.OPERATOR)
        found = await operator("GET", "/engines/1/series?start=2023-11-14T22:00:00Z&end=2023-11-14T23:00:00Z")
        assert (found["lines"]["prompt_tokens"], found["lines"]["steps"]) == ([0], [0])


async def picture(gateway: Gateway, key: str, path: str, count: int = 1) -> list[dict[str, Any]]:
    """The first pictures of a live stream."""
    found: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {key}"}
    async with gateway.http.get(f"{gateway.url}{ADMIN_PREFIX}{path}", headers=headers) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
    return found


async def test_live_pictures_are_for_operators_or_of_ones_own_tenant(gateway: Gateway, operator: AdminClient) -> None:
    viewer = await admin_client(gateway, "demo", Role.VIEWER)
    gateway.engine.pause()
    try:
        stream = asyncio.create_task(
            gateway.post("/v1/completions", {"model": "base", "prompt": "abc", "max_tokens": 4})
        )
        while not gateway.engine.submits:  # noqa: ASYNC110 - another thread's list, without an event
            await asyncio.sleep(0.01)
        [all_], [mine], [others] = await asyncio.gather(
            picture(gateway, operator.key, "/live"),
            picture(gateway, viewer.key, "/tenants/demo/live"),
            picture(gateway, operator.key, "/tenants/other/live"),
        )
    finally:
        gateway.engine.resume()
    await stream
    assert (all_["total"]["open"], all_["total"]["waiting"]) == (1, 1)
    assert [(one["tenant"], one["open"]) for one in all_["tenants"]] == [("demo", 1)]
    assert [(one["engine"], one["up"]) for one in all_["engines"]] == [(1, True)]
    assert (mine["total"]["tenant"], mine["total"]["open"], mine["tenants"], mine["engines"]) == ("demo", 1, [], [])
    assert (others["total"]["tenant"], others["total"]["open"]) == ("other", 0)
    assert (await viewer.raw("GET", "/live"))[0] == 403
    assert (await viewer.raw("GET", "/tenants/other/live"))[0] == 404


async def test_the_most_used_adapters_have_series_of_their_own(gateway: Gateway) -> None:
    """By the names of whoever used them last; one that is in no catalog has none."""

    async def scrape() -> list[str]:
        async with gateway.http.get(f"{gateway.url}/metrics") as answer:
            return [line for line in (await answer.text()).splitlines() if line.startswith("stencilpress_adapter_")]

    found = await scrape()
    pirate = '{adapter="pirate",engine="1",tenant="demo",version="1"}'
    for name, value in (("hits_total", 3.0), ("misses_total", 1.0), ("evictions_total", 0.0), ("active", 1.0)):
        assert f"stencilpress_adapter_{name}{pirate} {value}" in found
    from_disk = '{adapter="pirate",engine="1",tenant="demo",tier="disk",version="1"}'
    assert f"stencilpress_adapter_load_seconds_total{from_disk} 0.01" in found
    assert f"stencilpress_adapter_loads_total{from_disk} 1.0" in found
    assert f"stencilpress_adapter_load_seconds_total{from_disk.replace('disk', 'host')} 0.002" in found
    assert f"stencilpress_adapter_tier{from_disk.replace('disk', 'hbm')} 1.0" in found
    secret = '{adapter="secret",engine="1",tenant="other",tier="host",version="1"}'
    assert f"stencilpress_adapter_tier{secret} 1.0" in found
    assert len([line for line in found if "_adapter_tier{" in line]) == 2
    assert [one.seen.adapter.digest for one in await most_used(gateway.services.view, 1)] == [PIRATE]
    assert await most_used(gateway.services.view, 0) == ()
