"""The operations of alerts, on a real gateway, held against the OpenAPI document; and the command's verbs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from stencilpress.cli import main
from stencilpress.gateway.access import Role
from stencilpress.gateway.alerts import watch
from stencilpress.gateway.alerts.incidents import Incident, Moves, State, Subject
from stencilpress.gateway.alerts.prometheus import rules_file
from stencilpress.gateway.alerts.rules import Kind, Rules, Severity
from stencilpress.gateway.alerts.watch import alerting
from stencilpress.gateway.catalog.alert_outbox import record
from stencilpress.gateway.catalog.tenants import get_tenant
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import Gateway, running_gateway
from tests.integration.webhook_receiver import Receiver, webhook_receiver

NOW = datetime.now(UTC)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with webhook_receiver() as running:
        yield running


@pytest.fixture
async def gateway(tmp_path: Path, receiver: Receiver) -> AsyncIterator[Gateway]:
    """With the receiver as the operator's webhook."""
    async with running_gateway(tmp_path, alert_webhook_url=receiver.url, alert_every_s=1.0) as running:
        yield running


@pytest.fixture
async def admin(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "demo", Role.ADMIN)


@pytest.fixture
async def operator(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "other", Role.OPERATOR)


async def fire(gateway: Gateway, tenant: str | None, kind: Kind = Kind.ERRORS_HIGH, adapter: str = "") -> None:
    db = gateway.services.db
    tenant_id = None if tenant is None else (await get_tenant(db, tenant)).id
    subject = Subject(kind, tenant_id, adapter)
    firing = Incident(subject, State.FIRING, NOW, 0.5, 0.05, Severity.CRITICAL, "9 requests", NOW)
    await record(db, Moves({subject: firing}, fired=(firing,)), operator=True)


async def test_each_sees_and_acknowledges_its_own(gateway: Gateway, admin: AdminClient, operator: AdminClient) -> None:
    await fire(gateway, "demo", adapter="pirate")
    await fire(gateway, "other")
    await fire(gateway, None, Kind.ENGINE_DOWN)
    (mine,) = (await admin("GET", "/tenants/demo/alerts"))["data"]
    assert (mine["kind"], mine["adapter"], mine["tenant"], mine["state"]) == ("errors_high", "pirate", "demo", "firing")
    assert mine["summary"] == "Too many requests fail: demo/pirate"
    first = await operator("GET", "/alerts?limit=2")
    assert [one["tenant"] for one in first["data"]] == [None, "other"]
    assert (await operator("GET", f"/alerts?after={first['next']}"))["data"] == [mine]
    assert [one["kind"] for one in (await operator("GET", "/alerts?kind=engine_down"))["data"]] == ["engine_down"]
    assert (await operator("GET", "/alerts?state=resolved"))["data"] == []
    viewer = await admin_client(gateway, "demo", Role.VIEWER)
    await viewer("POST", f"/tenants/demo/alerts/{mine['id']}/acknowledge", status=403)
    seen = await admin("POST", f"/tenants/demo/alerts/{mine['id']}/acknowledge")
    assert seen["acknowledged_by"].startswith("key:")
    assert (await viewer("GET", "/tenants/demo/alerts"))["data"] == [seen]
    others = first["data"][1]["id"]
    for alert in (others, 10**17, "x", "-1", 0):
        await admin("POST", f"/tenants/demo/alerts/{alert}/acknowledge", status=404)
    assert (await operator("POST", f"/alerts/{others}/acknowledge"))["acknowledged_by"].startswith("key:")


async def test_rules_narrow_from_all_to_an_adapter(admin: AdminClient, operator: AdminClient) -> None:
    slow, objective = "first_token_slow", "/tenants/demo/adapters/pirate/alert-rules/first_token_slow"
    await operator("PUT", f"/alert-rules/{slow}", {"threshold": 900, "for_s": 60})
    await admin("PUT", f"/tenants/demo/alert-rules/{slow}", {"severity": "critical"})
    set_ = await admin("PUT", objective, {"threshold": 300.5})
    assert (set_["threshold"], set_["for_s"], set_["severity"]) == (300.5, 60, "critical")
    assert set_["changed"] == {"threshold": 300.5}
    rules = (await admin("GET", "/tenants/demo/alert-rules"))["data"]
    assert [one["threshold"] for one in rules if one["kind"] == slow] == [900, 300.5]
    assert {one["scope"] for one in rules} == {"tenant", "adapter"}
    assert len((await operator("GET", "/alert-rules"))["data"]) == len(Kind)
    assert (await admin("DELETE", objective))["threshold"] == 900
    await admin("DELETE", objective, status=404)
    await operator("DELETE", f"/alert-rules/{slow}")
    actions = [one["action"] for one in (await admin("GET", "/tenants/demo/audit"))["data"]]
    assert actions[:3] == ["alert_rule.reset", "alert_rule.set", "alert_rule.set"]


REFUSED: list[tuple[str, Any, int, str | None]] = [
    ("/alert-rules/engine_down", {"for_s": 5}, 400, "kind"),
    ("/alert-rules/errors_high", {"threshold": 2}, 400, "threshold"),
    ("/alert-rules/errors_high", {"threshold": "0.5"}, 400, "threshold"),
    ("/alert-rules/errors_high", {"for_s": 86_401}, 400, "for_s"),
    ("/alert-rules/errors_high", {"severity": "bad"}, 400, "severity"),
    ("/alert-rules/errors_high", {"mute": True}, 400, "mute"),
    ("/alert-rules/unheard_of", {}, 404, None),
    ("/adapters/nobody/alert-rules/errors_high", {}, 404, None),
    ("/adapters/pirate/alert-rules/quota_near", {}, 400, "kind"),
    ("/alert-webhook", {"url": "https://hooks.example/", "secret": "short"}, 400, "secret"),
    ("/alert-webhook", {"url": "http://127.0.0.1/"}, 400, "url"),
    ("/alert-webhook", {"url": "http://user@hooks.example/"}, 400, "url"),
    ("/alert-webhook", {}, 400, "url"),
]
"""Below a tenant: a path, a body, the status and the field that are named."""


async def test_what_cannot_be_is_refused_by_its_name(admin: AdminClient) -> None:
    for path, body, status, param in REFUSED:
        refused = await admin("PUT", f"/tenants/demo{path}", body, status=status)
        assert refused["error"]["param"] == param, (path, body)


async def test_a_tenants_webhook_leads_outside_alone(admin: AdminClient, receiver: Receiver) -> None:
    """Names that stand for an address inside are refused when they are used: what they stand for may change."""
    hook = "/tenants/demo/alert-webhook"
    assert (await admin("GET", hook))["url"] is None
    await admin("POST", f"{hook}/test", status=404)
    inside = receiver.url.replace("127.0.0.1", "localhost")
    set_ = await admin("PUT", hook, {"url": inside, "secret": "sixteen characters"})
    assert (set_["url"], set_["signed"]) == (inside, True)
    assert await admin("POST", f"{hook}/test") == {
        "delivered": False,
        "error": "its name stands for an address inside this network",
    }
    assert receiver.taken == []
    assert (await admin("PUT", hook, {"url": inside, "secret": None}))["signed"] is False
    assert (await admin.raw("DELETE", hook))[0] == 204
    assert (await admin.raw("DELETE", hook))[0] == 404


async def test_where_the_operator_allows_it_a_webhook_may_be_inside(tmp_path: Path, receiver: Receiver) -> None:
    async with running_gateway(tmp_path, alert_private_webhooks=True) as gateway:
        admin = await admin_client(gateway, "demo", Role.ADMIN)
        hook = "/tenants/demo/alert-webhook"
        await admin("PUT", hook, {"url": receiver.url, "secret": "sixteen characters"})
        receiver.answers += [200, 302, 404]
        answers = [await admin("POST", f"{hook}/test") for _ in range(3)]
        assert [one["error"] for one in answers] == ["", "HTTP status 302", "HTTP status 404"]
        assert len(receiver.taken) == 3
        assert receiver.taken[0].message["groupLabels"] == {"alertname": "StencilpressTest"}
        assert "webhook-signature" in receiver.taken[0].headers


async def test_the_operators_webhook_is_the_settings_and_a_gateways_jobs_tell_it(
    gateway: Gateway, operator: AdminClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = await operator("GET", "/alert-webhook")
    assert (shown["host"], shown["signed"], shown["deliveries"]) == ("127.0.0.1", False, [])
    assert (await operator("POST", "/alert-webhook/test"))["delivered"]
    await operator("PUT", "/alert-rules/disk_bytes_low", {"threshold": 2.0**50})
    monkeypatch.setattr(watch, "DELIVER_S", 0.2)
    async with alerting(gateway.services.settings, gateway.services.engine), asyncio.timeout(45):
        await receiver.has(2)
        for _ in range(100):
            deliveries = (await operator("GET", "/alert-webhook"))["deliveries"]
            if deliveries[0]["state"] == "delivered":
                break
            await asyncio.sleep(0.05)
    assert receiver.taken[1].message["commonLabels"]["alertname"] == "StencilpressDiskBytesLow"
    assert [(one["state"], one["alerts"]) for one in deliveries] == [("delivered", 1)]
    (alert,) = (await operator("GET", "/alerts"))["data"]
    assert (alert["tenant"], alert["unit"]) == (None, "bytes")


async def test_prometheus_gets_rules_over_metrics_that_are_there(gateway: Gateway, operator: AdminClient) -> None:
    status, text = await operator.raw("GET", "/alerts/prometheus-rules")
    assert (status, text) == (200, rules_file(Rules({})))
    async with gateway.http.get(f"{gateway.url}/metrics") as answer:
        exposed = await answer.text()
    families = set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))
    names = families | {f"{name}_{part}" for name in families for part in ("bucket", "count", "sum")}
    for rule in yaml.safe_load(text)["groups"][0]["rules"]:
        assert set(re.findall(r"\bstencilpress_[a-z_]+", rule["expr"])) <= names
    assert (await (await admin_client(gateway, "demo", Role.ADMIN)).raw("GET", "/alerts/prometheus-rules"))[0] == 403


async def test_the_command_does_the_same(
    gateway: Gateway, admin: AdminClient, operator: AdminClient, tmp_path: Path
) -> None:
    async def cli(*arguments: str, code: int = 0) -> Any:
        place = ("--data", str(tmp_path / "data"), "--database-url", gateway.services.settings.database_url)
        done = await asyncio.to_thread(CliRunner().invoke, main, ["alert", *arguments, *place])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout) if "--json" in arguments else done.output

    demo = ("--tenant", "demo")
    await fire(gateway, "demo", adapter="pirate")
    listed = await cli("list", *demo, "--json")
    assert listed == (await admin("GET", "/tenants/demo/alerts"))["data"] == await cli("list", "--json")
    assert "Too many requests fail: demo/pirate" in await cli("list")
    seen = await cli("ack", str(listed[0]["id"]), *demo, "--json")
    assert (await admin("GET", "/tenants/demo/alerts"))["data"] == [seen]
    objective = ("first_token_slow", *demo, "--adapter", "pirate")
    set_ = await cli("set-rule", *objective, "--threshold", "300", "--severity", "info", "--disabled", "--json")
    assert set_ in await cli("rules", *demo, "--json") == (await admin("GET", "/tenants/demo/alert-rules"))["data"]
    assert (await cli("reset-rule", *objective, "--json"))["changed"] is None
    assert await cli("rules", "--json") == (await operator("GET", "/alert-rules"))["data"]
    (tmp_path / "secret").write_text("sixteen characters\n")
    hook = await cli(
        "set-webhook", "https://hooks.example/x", *demo, "--secret-file", str(tmp_path / "secret"), "--json"
    )
    assert hook == await admin("GET", "/tenants/demo/alert-webhook") == await cli("webhook", *demo, "--json")
    assert "127.0.0.1" not in await cli("set-webhook", "http://127.0.0.1/", *demo, code=1)
    await cli("set-webhook", "http://127.0.0.1:1/", *demo, "--private")
    assert await cli("test-webhook", *demo, "--private") == "it cannot be reached\n"
    await cli("remove-webhook", *demo)
    assert await cli("prometheus-rules") == rules_file(Rules({}))
    await cli("prometheus-rules", str(tmp_path / "rules.yml"))
    assert (tmp_path / "rules.yml").read_text() == rules_file(Rules({}))
    assert "is not one of hit_rate_falling" in await cli("set-rule", "nonsense", code=2)
    assert "--adapter needs --tenant" in await cli("set-rule", "errors_high", "--adapter", "pirate", code=2)
