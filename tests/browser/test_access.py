"""What the console is for, as a person does it: keys that work until they are revoked, quotas, and others' pages."""

from __future__ import annotations

import openai
import pytest

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.keys import issue_key
from tests.browser.conftest import Site, Visit


async def ask(site: Site, key: str, model: str = "") -> str:
    """The text of one short answer."""
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0) as api:
        answer = await api.chat.completions.create(
            model=model or site.base, messages=[{"role": "user", "content": "Say hello."}], max_tokens=4
        )
    return answer.choices[0].message.content or ""


async def test_a_key_works_until_it_is_revoked(visit: Visit, site: Site) -> None:
    page = await visit(Role.ADMIN, "/console/t/demo/keys")
    await page.get_by_role("button", name="Create a key").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Label").fill("<img src=x onerror=alert(1)>")
    await dialog.get_by_role("button", name="Create").click()
    key = await page.locator("[data-secret]").text_content() or ""
    assert await page.get_by_role("heading", name="The new key <img src=x onerror=alert(1)>").is_visible()
    await ask(site, key)
    await page.goto("/console/t/demo/keys")
    assert await page.locator("[data-secret]").count() == 0
    page.on("dialog", lambda question: question.accept())
    row = page.get_by_role("row").filter(has_text=key.split("_")[1])
    await row.get_by_role("button", name="Actions for").click()
    await row.get_by_role("button", name="Revoke").click()
    await row.get_by_text("Revoked").wait_for()
    with pytest.raises(openai.AuthenticationError):
        await ask(site, key)


async def test_a_spent_quota_is_seen_on_the_dashboard(visit: Visit, site: Site) -> None:
    await create_tenant(site.db, "thrifty")
    key = (await issue_key(site.db, "thrifty")).token
    page = await visit(Role.OPERATOR, "/console/t/thrifty/settings")
    await page.get_by_label("Requests a minute").fill("2")
    await page.get_by_role("button", name="Save the plan").click()
    await page.get_by_text("The plan has been saved").wait_for()
    for _ in range(2):
        await ask(site, key)
    with pytest.raises(openai.RateLimitError):
        await ask(site, key)
    await page.reload()
    assert await page.get_by_text("2 of 2").is_visible()
    refused = page.locator("#refusals .chart-legend").get_by_text("requests a minute")
    await page.goto("/console/t/thrifty/")
    for _ in range(60):  # refusals are written every few seconds
        if await refused.count():
            break
        await page.wait_for_timeout(500)
        await page.reload()
    assert await refused.is_visible()


async def test_the_pages_of_another_tenant_do_not_exist(visit: Visit, site: Site) -> None:
    await create_tenant(site.db, "neighbour")
    page = await visit(Role.ADMIN)
    for path in ("", "chat", "adapters", "adapters/support", "usage", "keys", "members", "settings", "alerts", "audit"):
        answer = await page.goto(f"/console/t/neighbour/{path}")
        assert answer is not None
        assert answer.status == 404, path
        assert await page.get_by_role("heading", name="Not found").is_visible()
    answer = await page.goto("/console/tenants")
    assert answer is not None
    assert answer.status == 403
