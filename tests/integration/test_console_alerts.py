"""The console's pages of alerts and of the audit log: what each role sees and does there, and that texts are inert."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stencilpress.gateway.access import Role
from stencilpress.gateway.alerts.incidents import Incident, Moves, State, Subject
from stencilpress.gateway.alerts.rules import Kind, Place, RuleChange, Severity
from stencilpress.gateway.api.admin.views import AuditView
from stencilpress.gateway.catalog.alert_outbox import find_webhook, record
from stencilpress.gateway.catalog.alerts import read_rules
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.web.audit import Difference, differences
from stencilpress.web.firing import Firing
from tests.integration.console_harness import Browser, running_console, signed_in
from tests.integration.gateway_harness import Gateway
from tests.integration.webhook_receiver import Receiver, webhook_receiver

NOW = datetime.now(UTC)
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with webhook_receiver() as running:
        yield running


@pytest.fixture
async def gateway(tmp_path: Path, receiver: Receiver) -> AsyncIterator[Gateway]:
    settings = {"alert_private_webhooks": True, "alert_webhook_url": receiver.url}
    async with running_console(tmp_path, **settings) as running:
        yield running


@pytest.fixture
async def admin(gateway: Gateway) -> Browser:
    return await signed_in(gateway, Role.ADMIN)


@pytest.fixture
async def operator(gateway: Gateway) -> Browser:
    return await signed_in(gateway, Role.OPERATOR)


async def fire(gateway: Gateway, tenant: str | None, kind: Kind, adapter: str = "", note: str = "") -> None:
    db = gateway.services.db
    tenant_id = None if tenant is None else (await get_tenant(db, tenant)).id
    firing = Incident(Subject(kind, tenant_id, adapter), State.FIRING, NOW, 0.5, 0.05, Severity.CRITICAL, note, NOW)
    await record(db, Moves({firing.subject: firing}, fired=(firing,)), operator=True)


async def test_what_fires_is_seen_by_those_it_concerns_and_acknowledged(
    gateway: Gateway, admin: Browser, operator: Browser
) -> None:
    await fire(gateway, "demo", Kind.ERRORS_HIGH, "pirate", HOSTILE)
    await fire(gateway, "other", Kind.QUOTA_NEAR)
    await fire(gateway, None, Kind.ENGINE_DOWN)
    page = await admin.get("/console/t/demo/alerts")
    assert "Too many requests fail: demo/pirate" in page.words
    assert "Engine is down" not in page.words
    assert HOSTILE not in page.text
    viewer = await signed_in(gateway, Role.VIEWER)
    assert "/acknowledge" not in (await viewer.get("/console/t/demo/alerts")).text
    everything = (await operator.get("/console/alerts")).words
    assert "Engine is down" in everything
    assert "Quota is running out: other" in everything
    (action,) = re.findall(r'action="(/console/t/demo/alerts/\d+/acknowledge)"', page.text)
    assert (await admin.submit(action)).location == "/console/t/demo/alerts"
    page = await admin.get("/console/t/demo/alerts")
    assert "seen by user:" in page.words
    assert "/acknowledge" not in page.text
    others = re.search(r'action="/console/alerts(/\d+/acknowledge)"', (await operator.get("/console/alerts")).text)
    assert others
    await admin.submit(f"/console/t/demo/alerts{others[1]}", 404)


async def test_the_menu_counts_what_nobody_has_acknowledged_without_asking_for_each_page(
    gateway: Gateway, admin: Browser, operator: Browser
) -> None:
    await fire(gateway, "demo", Kind.ERRORS_HIGH, "pirate")
    await fire(gateway, None, Kind.ENGINE_DOWN)
    firing = Firing(gateway.services.db)
    assert firing.counts() == {}  # nobody waits for the first answer
    await firing.refresh()
    assert firing.counts() == {"demo": 1, "": 2}
    await firing.close()
    page = await operator.get("/console/alerts")
    (action,) = re.findall(r'action="(/console/alerts/\d+/acknowledge)"', page.text)[:1]
    await operator.submit(action)  # which refreshes the count
    page = await operator.get("/console/tenants")
    assert re.findall(r'class="rail-badge" aria-label="(\d+) firing"', page.text) == ["1"]


async def test_a_rule_is_changed_for_all_a_tenant_and_an_adapter_and_reset(
    gateway: Gateway, admin: Browser, operator: Browser
) -> None:
    db = gateway.services.db
    tenant_id = (await get_tenant(db, "demo")).id
    await operator.submit("/console/alerts/rules/disk_share_low", threshold="12.5", severity="critical", for_s="")
    await operator.submit("/console/alerts/rules/disk_bytes_low", threshold="3")
    await admin.submit("/console/t/demo/alerts/rules/errors_high", threshold="10", enabled="false", min_requests="7")
    await admin.submit("/console/t/demo/alerts/rules/first_token_slow", adapter="pirate", threshold="300")
    rules = await read_rules(db)
    assert rules.change(Kind.DISK_SHARE_LOW, Place()) == RuleChange(threshold=0.125, severity=Severity.CRITICAL)
    assert rules.change(Kind.DISK_BYTES_LOW, Place()) == RuleChange(threshold=3 * 2.0**30)
    changed = RuleChange(enabled=False, threshold=0.1, min_requests=7)
    assert rules.change(Kind.ERRORS_HIGH, Place(tenant_id)) == changed
    assert rules.change(Kind.FIRST_TOKEN_SLOW, Place(tenant_id, "pirate")) == RuleChange(threshold=300)
    page = await admin.get("/console/t/demo/alerts?view=rules")
    assert "above 300 ms" in page.words
    assert 'name="threshold" type="text" value="10"' in page.text
    await admin.submit("/console/t/demo/alerts/rules/first_token_slow", adapter="pirate", reset="1")
    assert (await read_rules(db)).change(Kind.FIRST_TOKEN_SLOW, Place(tenant_id, "pirate")) is None


async def test_a_rule_that_cannot_be_is_told_beside_its_field_in_an_open_dialog(admin: Browser) -> None:
    for fields, told in (
        ({"threshold": "200"}, "must be above 0 and at most 1 share"),
        ({"threshold": "much"}, "float"),
        ({"for_s": "99999999"}, "86400"),
        ({"adapter": "nobody"}, "does not exist"),
    ):
        answer = await admin.submit("/console/t/demo/alerts/rules/errors_high", 400, **fields)
        assert told in answer.words, fields
        assert len(re.findall(r"<dialog[^>]* data-open", answer.text)) == 1, fields
    await admin.submit("/console/t/demo/alerts/rules/engine_down", 400)
    await admin.submit("/console/t/demo/alerts/rules/nonsense", 404)


async def test_a_webhook_is_set_tried_and_removed(gateway: Gateway, admin: Browser, receiver: Receiver) -> None:
    at, db = "/console/t/demo/alerts/webhook", gateway.services.db
    tenant_id = (await get_tenant(db, "demo")).id
    await admin.submit(at, url=receiver.url, secret="sixteen characters")
    hook = await find_webhook(db, tenant_id)
    assert hook is not None
    assert (hook.url, hook.secret) == (receiver.url, "sixteen characters")
    receiver.answers += [200, 503]
    assert "has taken the test" in (await admin.follow((await admin.submit(f"{at}/test")).location)).words
    assert "HTTP status 503" in (await admin.follow((await admin.submit(f"{at}/test")).location)).words
    page = await admin.get("/console/t/demo/alerts?view=webhook")
    assert "sixteen characters" not in page.text
    await admin.submit(at, url=receiver.url, secret="")
    assert await find_webhook(db, tenant_id) is not None
    hook = await find_webhook(db, tenant_id)
    assert hook is not None
    assert hook.secret == "sixteen characters"
    await admin.submit(at, url=receiver.url, unsigned="true")
    hook = await find_webhook(db, tenant_id)
    assert hook is not None
    assert hook.secret == ""
    refused = await admin.submit(at, 400, url="ftp://hooks.example/", secret="short")
    assert "is no URL" in refused.words or "Expected" in refused.words
    await admin.submit(f"{at}/remove")
    assert await find_webhook(db, tenant_id) is None
    viewer = await signed_in(gateway, Role.VIEWER)
    assert "Webhook" not in (await viewer.get("/console/t/demo/alerts?view=webhook")).words


async def test_the_operators_webhook_is_shown_without_its_path(operator: Browser, receiver: Receiver) -> None:
    page = await operator.get("/console/alerts?view=webhook")
    assert "127.0.0.1" in page.words
    assert "/hook" not in page.words
    assert (await operator.submit("/console/alerts/webhook/test")).location == "/console/alerts?view=webhook"
    assert len(receiver.taken) == 1
    rules = await operator.request("GET", "/console/api/alerts/prometheus-rules")
    assert (rules.status, "StencilpressEngineDown" in rules.text) == (200, True)


async def test_the_history_has_what_is_resolved(gateway: Gateway, operator: Browser) -> None:
    await fire(gateway, "demo", Kind.ERRORS_HIGH, "pirate")
    subject = Subject(Kind.ERRORS_HIGH, (await get_tenant(gateway.services.db, "demo")).id, "pirate")
    over = Incident(
        subject, State.RESOLVED, NOW, 0.01, 0.05, Severity.CRITICAL, fired_at=NOW, good_since=NOW, resolved_at=NOW
    )
    await record(gateway.services.db, Moves({subject: over}, resolved=(over,)), operator=False)
    assert "resolved" in (await operator.get("/console/alerts?view=history")).words
    assert "Nothing is wrong" in (await operator.get("/console/alerts")).words


async def test_the_audit_log_shows_differences_and_narrows(admin: Browser, operator: Browser) -> None:
    await operator.submit("/console/tenants", name="zebra", requests_per_minute="60")
    made = await operator.get("/console/audit")
    assert "tenant.create" in made.words
    await admin.submit("/console/t/demo/keys", 200, label=HOSTILE, role="caller")
    page = await admin.get("/console/t/demo/audit")
    assert HOSTILE not in page.text
    assert HOSTILE in page.words
    assert "zebra" not in page.words
    narrowed = await admin.get("/console/t/demo/audit?action=key.")
    assert "key.create" in narrowed.words
    assert "adapter." not in narrowed.words
    assert admin.user is not None
    assert "key.create" in (await admin.get(f"/console/t/demo/audit?actor=user:{admin.user.email}")).words
    assert "Nothing found" in (await admin.get("/console/t/demo/audit?actor=user:nobody@example.com")).words
    assert "Nothing found" in (await admin.get("/console/t/demo/audit?action=%25")).words  # no wildcard


async def test_the_audit_log_comes_in_pages(admin: Browser, operator: Browser) -> None:
    for n in range(53):
        await operator.api("PATCH", "/tenants/other", {"weight": 1 + n})
    first = await operator.get("/console/audit?action=tenant.")
    (following,) = re.findall(r'href="(/console/audit\?[^"]*)" rel="next"', first.text)
    second = await operator.get(following.replace("&amp;", "&"))
    assert len(re.findall(r'<li class="entry">', first.text)) == 50
    assert 3 <= len(re.findall(r'<li class="entry">', second.text)) <= 10


def test_differences_name_nested_fields() -> None:
    one = AuditView(
        id=1, at=NOW, actor="system", role="operator", tenant="demo", action="alias.move", target="alias:a@prod",
        before={"version": 1, "canary": None, "same": 1},
        after={"version": 2, "canary": {"version": 3, "percent": 5}, "same": 1},
        source="", request_id="",
    )  # fmt: skip
    assert differences(one) == [
        Difference("version", "1", "2"),
        Difference("canary.version", None, "3"),
        Difference("canary.percent", None, "5"),
    ]
