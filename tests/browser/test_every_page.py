"""What holds on every page: axe-core finds nothing serious, nothing sticks out on a phone, and no link is dead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Visit
from tests.browser.pages import PAGES

SERIOUS = ("serious", "critical")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
async def test_axe_finds_nothing_serious(visit: Visit, name: str, theme: str) -> None:
    axe: Any = pytest.importorskip("axe_playwright_python.async_playwright").Axe()
    page = await visit(*PAGES[name], theme=theme, known=True)
    results = (await axe.run(page)).response
    found = [
        (one["id"], [node["target"] for node in one["nodes"]])
        for one in results["violations"]
        if one["impact"] in SERIOUS
    ]
    assert found == []


@pytest.mark.parametrize("name", PAGES)
async def test_a_phone_shows_the_whole_width(visit: Visit, name: str) -> None:
    page = await visit(*PAGES[name], width=360, known=True)
    over = await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert over == 0


async def test_every_link_of_every_page_leads_somewhere(visit: Visit) -> None:
    pages: dict[Any, Any] = {}
    seen: set[tuple[Any, str]] = set()
    for role, path in PAGES.values():
        page = pages.get(role) or await visit(role, known=True)
        pages[role] = page
        await page.goto(path)
        hrefs = await page.eval_on_selector_all("a[href]", "links => links.map(link => link.href)")
        for href in hrefs:
            if (role, href) in seen or "/console" not in href:
                continue
            seen.add((role, href))
            answer = await page.context.request.get(href)
            assert answer.status == 200, (path, href, answer.status)
