"""Dashboards and the memory map over a real engine."""

from __future__ import annotations

import re

from stencilpress.gateway.access import Role
from tests.browser.conftest import Site, Visit
from tests.browser.test_access import ask


async def test_a_dashboard_follows_by_itself(visit: Visit, site: Site) -> None:
    from playwright.async_api import expect

    page = await visit(Role.OPERATOR, "/console/")
    await page.locator("#live-state").get_by_text("live").wait_for()
    await ask(site, site.key, site.adapters[0])
    await expect(page.locator("#live-hbm [data-value]")).not_to_have_text(re.compile("^[0–]$"))
    requests = page.locator("#fact-requests [data-value]")
    await expect(requests).not_to_have_text("0", timeout=60_000)
    ttft = page.locator("#ttft")
    await ttft.get_by_role("button", name="Table").click()
    assert await ttft.get_by_role("columnheader", name="p99").is_visible()


async def test_a_month_brings_its_table_and_its_engines_after_the_page(visit: Visit) -> None:
    page = await visit(Role.OPERATOR, "/console/?range=30d")
    await page.locator("#top table").wait_for()
    assert await page.get_by_text("One moment").count() == 0


async def test_the_map_tells_who_holds_a_page(visit: Visit, site: Site) -> None:
    adapter = site.adapters[0]
    await ask(site, site.key, adapter)
    page = await visit(Role.OPERATOR, "/console/memory")
    owner = page.locator("#map-owners").get_by_text(f"demo/{adapter}@1", exact=True)
    await owner.wait_for()
    await owner.click()
    assert await page.locator('#map-owners tr[aria-selected="true"]').count() == 1
    canvas, tip = page.locator("#map canvas"), page.locator("#map-tip")
    await canvas.focus()
    owners = set()
    for _ in range(80):
        await page.keyboard.press("ArrowRight")
        owners.add(await tip.locator("div").first.text_content())
        if f"demo/{adapter}@1" in owners:
            break
    assert f"demo/{adapter}@1" in owners
    await canvas.hover(position={"x": 4, "y": 4})
    assert await tip.is_visible()
