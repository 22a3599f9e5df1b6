"""The dashboards and the memory map over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.tenants import create_tenant, get_tenant
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.usage.record import new_key
from tests.integration.console_harness import Answer, Browser, running_console, signed_in
from tests.integration.gateway_harness import Gateway
from tests.usage import usage_row


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path) as running:
        yield running


async def use(gateway: Gateway, tenant: str, adapter: str, minutes_ago: list[int], ttft_ms: float = 100.0) -> None:
    """Requests of a tenant that have been rolled up."""
    owner = await get_tenant(gateway.services.db, tenant)
    rows = [
        usage_row(
            datetime.now(UTC) - timedelta(minutes=minutes),
            key=new_key(),
            tenant_id=owner.id,
            adapter=adapter,
            version=1 if adapter else 0,
            cached_tokens=2,
            completion_tokens=20,
            ttft_ms=ttft_ms,
            duration_ms=500.0,
        )
        for minutes in minutes_ago
    ]
    await insert_usage(gateway.services.db, rows)
    await roll_up(gateway.services.db)


def chart(page: Answer, figure: str) -> dict[str, Any]:
    """What a figure was drawn from."""
    found = re.search(
        rf'id="{figure}" data-chart>.*?<script type="application/json">(.*?)</script>', page.text, re.DOTALL
    )
    assert found, figure
    drawn: dict[str, Any] = json.loads(found[1])
    return drawn


async def test_an_operator_sees_all_tenants_and_others_their_own(gateway: Gateway) -> None:
    await create_tenant(gateway.services.db, "acme")
    await use(gateway, "demo", "pirate", [3, 4, 5])
    await use(gateway, "acme", "secret-plan", [6, 7])
    operator, viewer = await signed_in(gateway, Role.OPERATOR), await signed_in(gateway, Role.VIEWER)
    page = await operator.get("/console/")
    assert "secret-plan" in page.words
    requests = chart(page, "traffic")
    assert sum(requests["series"][0]["values"]) * 60 == pytest.approx(5, rel=0.01)
    own = await viewer.follow("/console/")
    assert "pirate" in own.words
    assert "secret-plan" not in own.words
    assert sum(chart(own, "traffic")["series"][0]["values"]) * 60 == pytest.approx(3, rel=0.01)
    foreign, absent = [await viewer.get(f"/console/t/{name}/", status=404) for name in ("acme", "nobody")]
    assert foreign.words == absent.words
    await viewer.get("/console/memory", status=403)


async def test_one_adapter_and_the_time_before(gateway: Gateway) -> None:
    await use(gateway, "demo", "pirate", [3, 4, 5], ttft_ms=200.0)
    await use(gateway, "demo", "terse", [3], ttft_ms=900.0)
    await use(gateway, "demo", "pirate", [65, 66], ttft_ms=100.0)
    browser = await signed_in(gateway, Role.ADMIN)
    page = await browser.get("/console/t/demo/?adapter=pirate&compare=1")
    lines = {one["label"]: one["values"] for one in chart(page, "ttft")["series"]}
    assert max(filter(None, lines["p99"])) == pytest.approx(200, rel=0.05)
    assert max(filter(None, lines["p99 before"])) == pytest.approx(100, rel=0.05)
    assert "+50 %" in page.words


async def test_the_script_gets_the_same_charts_as_the_page(gateway: Gateway) -> None:
    await use(gateway, "demo", "", [2])
    browser = await signed_in(gateway, Role.VIEWER)
    page = await browser.get("/console/t/demo/?range=6h")
    answer = json.loads((await browser.get("/console/t/demo/?range=6h&format=json")).text)
    told = answer["charts"]["tokens"]
    assert [one["label"] for one in told["series"]] == [one["label"] for one in chart(page, "tokens")["series"]]
    assert told["x"] == chart(page, "tokens")["x"]
    assert answer["facts"]["requests"] == "1"


async def test_the_charts_of_engines_come_after_the_page_and_to_operators_alone(gateway: Gateway) -> None:
    operator, viewer = await signed_in(gateway, Role.OPERATOR), await signed_in(gateway, Role.VIEWER)
    page = await operator.get("/console/?range=24h")
    assert "data-engines" in page.text
    answer = json.loads((await operator.get("/console/?range=24h&format=engines")).text)
    assert {"pool", "adapters-per-step", "loads"} <= answer["charts"].keys()
    assert len(answer["charts"]["pool"]["x"]) <= 31
    own = await viewer.get("/console/t/demo/?format=engines")
    assert "data-engines" not in own.text


async def test_over_a_long_time_who_is_on_top_comes_after_the_page(gateway: Gateway) -> None:
    await use(gateway, "demo", "pirate", [3, 4])
    operator, viewer = await signed_in(gateway, Role.OPERATOR), await signed_in(gateway, Role.VIEWER)
    page = await operator.get("/console/?range=30d")
    assert "pirate" not in page.words
    part = await operator.get("/console/?range=30d&format=top")
    assert "pirate" in part.words
    assert "<html" not in part.text
    assert "pirate" in (await viewer.get("/console/t/demo/?range=30d")).words


async def test_a_permalink_shows_the_same_time_again(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.VIEWER)
    page = await browser.get("/console/t/demo/?range=24h&compare=1")
    link = re.search(r'href="(\?[^"]*start=[^"]*)" title="This very time', page.text)
    assert link
    again = await browser.get(f"/console/t/demo/{link[1].replace('&amp;', '&')}")
    assert chart(again, "traffic")["x"] == chart(page, "traffic")["x"]
    assert "data-refresh-s" not in again.text  # the past does not change


async def test_usage_by_day_is_a_page_and_a_file(gateway: Gateway) -> None:
    await use(gateway, "demo", "pirate", [1, 2, 3])
    browser = await signed_in(gateway, Role.VIEWER)
    page = await browser.get("/console/t/demo/usage?range=7d")
    assert sum(chart(page, "tokens-by-day")["series"][1]["values"]) == 60
    assert "pirate@1" in page.words
    file = await browser.get("/console/t/demo/usage?range=7d&format=csv")
    assert file.headers["Content-Type"].startswith("text/csv")
    header, *days = file.text.splitlines()
    assert len(days) == 7
    column = header.split(",").index("completion_tokens")
    assert sum(int(day.split(",")[column]) for day in days) == 60
    await browser.get("/console/t/other/usage", status=404)


@pytest.mark.parametrize("query", ["range=2y", "start=x&end=y", "start=2026-01-02&end=2026-01-01"])
async def test_a_time_that_is_none_is_told(gateway: Gateway, query: str) -> None:
    browser = await signed_in(gateway, Role.VIEWER)
    assert "Not accepted" in (await browser.get(f"/console/t/demo/?{query}", status=400)).words


async def test_the_map_names_an_engine(gateway: Gateway) -> None:
    browser: Browser = await signed_in(gateway, Role.OPERATOR)
    page = await browser.get("/console/memory")
    assert 'data-engine="1"' in page.text
    await browser.get("/console/memory?engine=7", status=404)
    pages = await browser.api("GET", "/engines/1/pages")
    assert sum(pages["runs"][1::2]) == pages["total"]


async def follow(browser: Browser, path: str, pictures: int) -> list[dict[str, Any]]:
    """What an event stream tells first."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(45), browser.http.get(browser.gateway.url + path) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        while len(found) < pictures and (line := await answer.content.readline()):
            if line.startswith(b"data: {"):
                found.append(json.loads(line[6:]))
    return found


async def test_what_happens_now_is_told_to_those_it_concerns(gateway: Gateway) -> None:
    operator, viewer = await signed_in(gateway, Role.OPERATOR), await signed_in(gateway, Role.VIEWER)
    [picture] = await follow(operator, "/console/live", 1)
    assert [one["engine"] for one in picture["engines"]] == [1]
    [own] = await follow(viewer, "/console/t/demo/live", 1)
    assert (own["total"]["tenant"], own["engines"], own["tenants"]) == ("demo", [], [])
    await viewer.get("/console/live", status=403)
    await viewer.get("/console/t/other/live", status=404)


async def test_the_stream_ends_with_the_session(gateway: Gateway) -> None:
    browser = await signed_in(gateway, Role.VIEWER)
    async with asyncio.timeout(45), browser.http.get(f"{gateway.url}/console/t/demo/live") as answer:
        assert (await answer.content.readline()) == b"event: now\n"
        await browser.submit("/console/sign-out")
        told = await answer.content.read()
    assert told.endswith(b"event: signed-out\ndata: \n\n")
