"""The console's pages of tenants and keys: what operators, admins and viewers see and do there."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.tenants import create_tenant, get_tenant
from tests.integration.console_harness import Browser, running_console, signed_in
from tests.integration.gateway_harness import Gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path) as running:
        yield running


@pytest.fixture
async def operator(gateway: Gateway) -> Browser:
    return await signed_in(gateway, Role.OPERATOR)


@pytest.fixture
async def admin(gateway: Gateway) -> Browser:
    return await signed_in(gateway, Role.ADMIN)


async def test_an_operator_adds_a_tenant_and_sets_its_plan(gateway: Gateway, operator: Browser) -> None:
    answer = await operator.submit("/console/tenants", name="acme", requests_per_minute="60", tokens_per_month="")
    assert answer.location == "/console/t/acme/settings"
    plan = await plan_form(operator, "acme")
    assert (plan["requests_per_minute"], plan["tokens_per_month"], plan["time_zone"]) == ("60", "", "UTC")
    plan |= {"tokens_per_day": "5000", "requests_per_minute": "", "weight": "2.5", "quota_shadow": "true"}
    await operator.submit("/console/t/acme/settings", **plan | {"target_modules": ["q_proj", "v_proj"]})
    limits = (await get_tenant(gateway.services.db, "acme")).limits
    assert (limits.weight, limits.target_modules) == (2.5, ("q_proj", "v_proj"))
    assert (limits.quota.tokens_per_day, limits.quota.requests_per_minute, limits.quota.shadow) == (5000, None, True)
    plan = await plan_form(operator, "acme")
    assert plan["target_modules"] == ["q_proj", "v_proj"]
    assert "acme" in (await operator.get("/console/tenants?prefix=ac")).words


async def test_a_bad_limit_is_told_beside_its_field_and_what_was_typed_stays(operator: Browser) -> None:
    plan = await plan_form(operator, "demo")
    answer = await operator.submit("/console/t/demo/settings", 400, **plan | {"time_zone": "Mars/Base", "weight": "3"})
    assert 'value="Mars/Base"' in answer.text
    assert "'Mars/Base' is no time zone" in answer.words
    assert (await plan_form(operator, "demo"))["weight"] != "3"
    answer = await operator.submit("/console/tenants", 409, name="demo")
    assert "exists already" in answer.words
    assert re.search(r'id="new-tenant"[^>]* data-open', answer.text)


async def test_a_tenant_is_disabled_enabled_deleted_and_restored(gateway: Gateway, operator: Browser) -> None:
    await create_tenant(gateway.services.db, "acme")
    for verb, state in (("disable", "Disabled"), ("enable", "Active"), ("delete", "Deleted"), ("restore", "Active")):
        await operator.submit(f"/console/t/acme/{verb}")
        assert state in (await operator.get("/console/t/acme/settings")).words
    own = await operator.submit("/console/t/demo/disable", 409)
    assert "is the one" in own.words


async def test_a_secret_is_shown_once_and_works_until_it_is_revoked(gateway: Gateway, admin: Browser) -> None:
    made = await admin.submit("/console/t/demo/keys", 200, label="<img src=x onerror=alert(1)>", role="caller")
    token = secret_of(made.text)
    assert made.headers["Cache-Control"] == "no-store"
    assert "<img src=x" not in made.text
    page = await admin.get("/console/t/demo/keys")
    assert token not in page.text
    assert await models(gateway, token)
    key = token.split("_")[1]
    rotated = secret_of((await admin.submit(f"/console/t/demo/keys/{key}/rotate", 200, overlap_s="0")).text)
    assert await models(gateway, rotated)
    with pytest.raises(openai.AuthenticationError):
        await models(gateway, token)
    assert (await admin.submit(f"/console/t/demo/keys/{key}/revoke")).location == "/console/t/demo/keys"
    with pytest.raises(openai.AuthenticationError):
        await models(gateway, rotated)
    assert "Revoked" in (await admin.get("/console/t/demo/keys")).words


async def test_a_key_may_be_confined_and_expire(admin: Browser) -> None:
    fields: dict[str, Any] = {
        "label": "ci",
        "role": "viewer",
        "expires_at": "2099-01-02T03:04",
        "models": "pirate, base",
    }
    await admin.submit("/console/t/demo/keys", 200, **fields, routes=["/v1/models", "/tokenize"])
    [made] = (await admin.api("GET", "/tenants/demo/keys?limit=1"))["data"]
    assert (made["role"], made["expires_at"]) == ("viewer", "2099-01-02T03:04:00Z")
    assert (made["models"], made["routes"]) == (["pirate", "base"], ["/v1/models", "/tokenize"])
    refused = await admin.submit("/console/t/demo/keys", 400, label="x", role="caller", expires_at="soon")
    assert "is not a date and time" in refused.words
    refused = await admin.submit("/console/t/demo/keys", 422, role="caller", expires_at="2020-01-02T03:04")
    assert "it must be later than" in refused.words
    refused = await admin.submit("/console/t/demo/keys", 403, label="x", role="operator")
    assert "cannot grant" in refused.words


@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER])
async def test_others_than_operators_see_their_own_plan_and_change_nothing(gateway: Gateway, role: Role) -> None:
    await create_tenant(gateway.services.db, "acme")
    browser = await signed_in(gateway, role)
    page = await browser.get("/console/t/demo/settings")
    assert "Only an operator can change the plan" in page.words
    assert "Save the plan" not in page.words
    await browser.submit("/console/t/demo/settings", 403, weight="9")
    await browser.submit("/console/t/demo/disable", 403)
    await browser.get("/console/tenants", status=403)
    absent = await browser.get("/console/t/nobody/settings", status=404)
    for path in ("settings", "keys"):
        foreign = await browser.get(f"/console/t/acme/{path}", status=404)
        assert foreign.words == absent.words
    if role is Role.VIEWER:
        assert "Create a key" not in (await browser.get("/console/t/demo/keys")).words
        await browser.submit("/console/t/demo/keys", 403, label="x", role="viewer")


async def plan_form(browser: Browser, tenant: str) -> dict[str, Any]:
    """The fields of the plan's form as a browser would send them."""
    text = (await browser.get(f"/console/t/{tenant}/settings")).text
    fields: dict[str, Any] = {}
    for tag in re.findall(r"<input[^>]*>", text):
        about = dict(re.findall(r'(\w[\w-]*)="([^"]*)"', tag))
        if about.get("type") == "checkbox":
            if re.search(r"\schecked\b", tag):
                fields.setdefault(about["name"], []).append(about["value"])
        elif about.get("name") not in (None, "csrf", "quota_shadow"):
            fields[about["name"]] = about["value"]
    return fields


def secret_of(text: str) -> str:
    found = re.search(r"<code data-secret>(sp_[^<]+)</code>", text)
    assert found
    return found[1]


async def models(gateway: Gateway, token: str) -> list[Any]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=token, max_retries=0) as api:
        return [model async for model in api.models.list()]
