"""The command and the admin API are two ways to the same services: the same verbs, the same answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from stencilpress.cli import main
from stencilpress.gateway.access import Role
from stencilpress.gateway.api.admin.router import OPERATIONS
from stencilpress.gateway.catalog.usage import insert_usage
from stencilpress.gateway.catalog.usage_roll_up import roll_up
from stencilpress.gateway.usage.record import UsageRow
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import Gateway, running_gateway
from tests.usage import usage_row

VERBS = {
    "list_tenants": "tenant list",
    "create_tenant": "tenant add",
    "get_tenant": "tenant show",
    "change_tenant": "tenant set",
    "disable_tenant": "tenant disable",
    "enable_tenant": "tenant enable",
    "delete_tenant": "tenant delete",
    "restore_tenant": "tenant restore",
    "purge_tenant": "tenant purge",
    "list_keys": "key list",
    "create_key": "key create",
    "get_key": "key show",
    "change_key": "key set",
    "rotate_key": "key rotate",
    "revoke_key": "key revoke",
    "list_usage": "usage list",
    "get_series": "usage series",
    "get_tenant_series": "usage series",
    "get_top": "usage top",
    "get_tenant_top": "usage top",
    "list_every_adapter": "adapter all",
    "list_usage_days": "usage days",
    "list_tenant_requests": "usage requests",
    "list_adapters": "adapter list",
    "get_adapter": "adapter show",
    "add_version": "adapter add",
    "delete_adapter": "adapter delete",
    "restore_adapter": "adapter restore",
    "get_version": "version show",
    "set_version_defaults": "version defaults",
    "delete_version": "version delete",
    "restore_version": "version restore",
    "get_version_contents": "version contents",
    "get_version_file": "version download",
    "diff_versions": "version diff",
    "run_smoke_prompts": "version smoke",
    "list_smoke_runs": "version smoke-runs",
    "get_smoke_prompts": "adapter prompts",
    "set_smoke_prompts": "adapter set-prompts",
    "get_alias": "alias show",
    "move_alias": "alias move",
    "get_canary": "alias canary",
    "roll_back_alias": "alias rollback",
    "remove_alias": "alias remove",
    "list_alias_moves": "alias history",
    "list_shares": "adapter shares",
    "share_adapter": "adapter share",
    "unshare_adapter": "adapter unshare",
    "pin_adapter": "adapter pin",
    "unpin_adapter": "adapter unpin",
    "preload_adapter": "adapter preload",
    "list_alerts": "alert list",
    "list_tenant_alerts": "alert list",
    "acknowledge_alert": "alert ack",
    "acknowledge_tenant_alert": "alert ack",
    "list_alert_rules": "alert rules",
    "list_tenant_alert_rules": "alert rules",
    "set_alert_rule": "alert set-rule",
    "set_tenant_alert_rule": "alert set-rule",
    "set_adapter_alert_rule": "alert set-rule",
    "reset_alert_rule": "alert reset-rule",
    "reset_tenant_alert_rule": "alert reset-rule",
    "reset_adapter_alert_rule": "alert reset-rule",
    "get_alert_webhook": "alert webhook",
    "set_alert_webhook": "alert set-webhook",
    "remove_alert_webhook": "alert remove-webhook",
    "try_alert_webhook": "alert test-webhook",
    "get_prometheus_rules": "alert prometheus-rules",
    "list_audit": "audit list",
    "list_tenant_audit": "audit list",
    "export_file": "catalog export",
    "import_file": "catalog import",
}
"""What each operation is called on the command line."""
WITHOUT_VERB = {"get_me", "get_quota", "create_upload", "get_upload", "put_part", "complete_upload", "delete_upload"}
"""The command has no key to tell of and no requests to count, and takes files as a whole."""
WITHOUT_VERB |= {
    "list_engines",
    "get_pages",
    "list_residency",
    "list_tenant_residency",
    "follow_live",
    "follow_tenant_live",
}
"""What a running server tells."""
WITHOUT_VERB |= {"compare_versions", "get_activity", "get_engine_series"}
"""For pages: ``usage series`` and ``usage top`` show the same."""
WITHOUT_VERB |= {"get_operator_webhook", "try_operator_webhook"}
"""Of a gateway's settings, which the command does not know."""

Cli = Callable[..., Any]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def operator(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "other", Role.OPERATOR)


@pytest.fixture
def cli(gateway: Gateway, tmp_path: Path) -> Cli:
    """Run a command on the gateway's catalog, in a thread since it has a loop of its own; its JSON."""

    async def run(*arguments: str) -> Any:
        place = ("--data", str(tmp_path / "data"), "--database-url", gateway.services.settings.database_url)
        result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, *place])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    return run


def test_every_operation_has_a_verb() -> None:
    assert {one.id for one in OPERATIONS} == VERBS.keys() | WITHOUT_VERB
    for verb in VERBS.values():
        group, name = verb.split()
        commands = main.commands[group]
        assert isinstance(commands, click.Group)
        assert name in commands.commands, verb


async def test_what_the_command_makes_the_api_shows(operator: AdminClient, cli: Cli) -> None:
    made = await cli("tenant", "add", "acme", "--max-rank", "8", "--tokens-per-day", "100", "--json")
    assert await operator("GET", "/tenants/acme") == made == await cli("tenant", "show", "acme", "--json")
    changed = await cli("tenant", "set", "acme", "--tokens-per-day", "none", "--json")
    assert await operator("GET", "/tenants/acme") == changed
    key = await cli("key", "create", "acme", "--role", "viewer", "--json")
    token = key.pop("token")
    assert await operator("GET", f"/tenants/acme/keys/{key['id']}") == key
    assert (await operator("GET", "/tenants/acme/keys"))["data"] == await cli("key", "list", "acme", "--json")
    viewer = AdminClient(operator.gateway, token)
    assert (await viewer("GET", "/tenants"))["data"] == [changed]
    await cli("key", "revoke", key["id"])
    await operator.gateway.services.changes.poll()
    assert (await viewer.raw("GET", "/tenants"))[0] == 401


async def test_what_the_api_makes_the_command_shows(operator: AdminClient, cli: Cli) -> None:
    made = await operator("POST", "/tenants", {"name": "acme", "time_zone": "Asia/Tokyo"}, status=201)
    assert await cli("tenant", "show", "acme", "--json") == made
    assert (await operator("GET", "/tenants"))["data"] == await cli("tenant", "list", "--json")
    key = await operator("POST", "/tenants/acme/keys", {"models": ["base"]}, status=201)
    del key["token"]
    assert await cli("key", "show", key["id"], "--json") == key
    assert (await operator("GET", "/audit"))["data"] == await cli("audit", "list", "--json")
    of_tenant = (await operator("GET", "/tenants/acme/audit"))["data"]
    assert of_tenant == await cli("audit", "list", "--tenant", "acme", "--json")


async def test_a_file_that_the_command_wrote_the_api_takes_and_gives(
    gateway: Gateway, operator: AdminClient, cli: Cli, tmp_path: Path
) -> None:
    await cli("catalog", "export", str(tmp_path / "file"))
    headers = {"Authorization": f"Bearer {operator.key}"}
    url = f"{gateway.url}/admin/api/v1/catalog"
    async with gateway.http.get(url, headers=headers) as answer:
        theirs = (await answer.read()).splitlines()
    ours = (tmp_path / "file").read_bytes().splitlines()
    assert theirs[1:] == ours[1:]
    assert {"demo", "other"} <= {json.loads(line)["row"].get("name") for line in ours[1:-1]}
    async with gateway.http.post(url, headers=headers, data=b"\n".join(ours) + b"\n") as answer:
        assert answer.status == 409
    async with gateway.http.post(f"{url}?skip_existing=true", headers=headers, data=b"\n".join(ours) + b"\n") as answer:
        assert (answer.status, await answer.json()) == (
            200,
            {"rows": {}, "skipped": ["demo", "other"], "digests": []},
        )


async def test_usage_is_shown_by_both(gateway: Gateway, cli: Cli) -> None:
    viewer = await admin_client(gateway, "demo", Role.VIEWER)
    now = datetime.now(UTC)
    await insert_usage(gateway.services.db, [request_row(now - timedelta(minutes=n), n) for n in range(5)])
    await roll_up(gateway.services.db)
    base, pirate = (await viewer("GET", "/tenants/demo/usage"))["data"]
    assert (base["adapter"], base["requests"], base["prompt_tokens"]) == ("", 2, 10 + 30)
    assert (pirate["adapter"], pirate["requests"], pirate["completion_tokens"]) == ("pirate", 3, 3 * 7)
    assert pirate["ttft_ms"]["p50"] == pytest.approx(102, rel=0.05)
    assert pirate["ttft_ms"]["p99"] == pytest.approx(104, rel=0.05)
    assert await cli("usage", "list", "demo", "--json") == [base, pirate]
    day = (now - timedelta(minutes=4)).date()
    days = await viewer("GET", f"/tenants/demo/usage/days?first={day}&last={now.date()}")
    assert sum(one["requests"] for one in days["data"]) == 5
    assert sum(one["prompt_tokens"] for one in days["data"]) == 10 * (1 + 2 + 3 + 4)
    assert (await cli("usage", "days", "demo", "--json"))["data"][-1] == days["data"][-1]
    assert len((await viewer("GET", "/tenants/demo/usage/days"))["data"]) == 30
    first = await viewer("GET", "/tenants/demo/usage?limit=1")
    assert first["data"] == [base]
    assert (await viewer("GET", f"/tenants/demo/usage?limit=1&after={first['next']}"))["data"] == [pirate]
    requests = (await viewer("GET", "/tenants/demo/requests"))["data"]
    assert [one["request_id"] for one in requests] == [f"req_{n}" for n in range(5)]
    assert await cli("usage", "requests", "demo", "--json") == requests
    page = await viewer("GET", "/tenants/demo/requests?limit=2")
    assert (await viewer("GET", f"/tenants/demo/requests?limit=9&after={page['next']}"))["data"] == requests[2:]
    assert (await (await admin_client(gateway, "other", Role.ADMIN))("GET", "/tenants/other/requests"))["data"] == []
    span = "start=2026-01-01T00:00:00Z&end="
    for query in (f"{span}2025-01-01T00:00:00Z", f"{span}2028-01-01T00:00:00Z", "start=yesterday", "period=year"):
        refused = await viewer("GET", f"/tenants/demo/usage?{query}", status=400)
        assert refused["error"]["param"] in ("start", "period")


def request_row(admitted_at: datetime, number: int) -> UsageRow:
    of_base = number % 2 == 1
    return usage_row(
        admitted_at,
        request_id=f"req_{number}",
        adapter="" if of_base else "pirate",
        version=0 if of_base else 1,
        prompt_tokens=10 * number,
        ttft_ms=100.0 + number,
    )


async def test_adapters_are_the_same_by_both_ways(operator: AdminClient, cli: Cli, tmp_path: Path) -> None:
    demo, pirate = ("--tenant", "demo"), "/tenants/demo/adapters/pirate"
    assert await cli("adapter", "show", "pirate", *demo, "--json") == await operator("GET", pirate)
    moved = await cli(
        "alias", "move", "pirate@prod", "1", "--canary", "2", "--percent", "10", "--expect", "1", *demo, "--json"
    )
    assert (
        await operator("GET", f"{pirate}/aliases/prod")
        == moved
        == await cli("alias", "show", "pirate@prod", *demo, "--json")
    )
    guarded = ("--max-error-share", "0.05", "--max-ttft-ratio", "1.5", "--window-s", "300")
    canary = ("alias", "move", "pirate@beta", "1", "--canary", "2", "--percent", "10", *guarded)
    beta = await cli(*canary, *demo, "--json")
    limits = {"max_error_share": 0.05, "max_ttft_ratio": 1.5, "min_requests": 50, "window_s": 300}
    assert beta["canary"] == {"version": 2, "percent": 10, "guard": limits}
    report = await operator("GET", f"{pirate}/aliases/beta/canary")
    assert report == await cli("alias", "canary", "pirate@beta", *demo, "--json")
    assert (report["verdict"], report["reason"], report["guard"]) == ("undecided", "0 of 50 requests so far", limits)
    assert report["etag"] == beta["etag"]
    await operator("GET", f"{pirate}/aliases/none/canary", status=404)
    await cli("alias", "remove", "pirate@beta", *demo)
    assert (await cli("alias", "rollback", "pirate@prod", *demo)) == "pirate@prod is pirate@1\n"
    history = await cli("alias", "history", "pirate@prod", *demo, "--json")
    assert (await operator("GET", f"{pirate}/aliases/prod/history"))["data"] == history
    assert [one["kind"] for one in history] == ["rollback", "move", "move"]
    (tmp_path / "defaults.json").write_text('{"temperature": 0.5}')
    changed = await cli("version", "defaults", "pirate@2", str(tmp_path / "defaults.json"), *demo, "--json")
    assert (
        await operator("GET", f"{pirate}/versions/2")
        == changed
        == await cli("version", "show", "pirate@2", *demo, "--json")
    )
    await cli("version", "delete", "pirate@2", *demo)
    assert (await operator.raw("GET", f"{pirate}/versions/2"))[0] == 404
    await cli("version", "restore", "pirate@2", *demo)
    share = await cli("adapter", "share", "pirate", "other", *demo, "--json")
    assert (
        (await operator("GET", f"{pirate}/shares"))["data"]
        == [share]
        == await cli("adapter", "shares", "pirate", *demo, "--json")
    )
    await cli("adapter", "unshare", "pirate", "other", *demo)
    (tmp_path / "prompts.json").write_text('{"prompts": [{"messages": [{"role": "user", "content": "abc"}]}]}')
    suite = await cli("adapter", "set-prompts", "pirate", str(tmp_path / "prompts.json"), *demo, "--json")
    assert (
        await operator("GET", f"{pirate}/smoke-prompts")
        == suite
        == await cli("adapter", "prompts", "pirate", *demo, "--json")
    )
    assert await cli("version", "smoke-runs", "pirate@1", *demo, "--json") == []
    await cli("adapter", "delete", "pirate", *demo)
    assert (await operator.raw("GET", pirate))[0] == 404
    await cli("adapter", "restore", "pirate", *demo)
    await cli("alias", "move", "pirate@beta", "2", "--expect", "0", *demo)
    await cli("alias", "remove", "pirate@beta", "--expect", "2", *demo)
    entries = await cli("audit", "list", "--tenant", "demo", "--json")
    assert [one["action"] for one in entries][:3] == ["alias.remove", "alias.move", "adapter.restore"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("alias", "move", "pirate@prod", "2", "--expect", "2"), "is not where you expected it"),
        (("alias", "move", "pirate@prod", "9"), "pirate@9 does not exist"),
        (("alias", "move", "pirate", "1"), "expected NAME@ALIAS"),
        (("alias", "move", "pirate@prod", "1", "--canary", "2"), "--canary and --percent go together"),
        (("version", "delete", "pirate@1"), "pirate@prod points at it"),
        (("version", "smoke", "pirate@1"), "need a running server"),
        (("adapter", "share", "pirate", "nobody"), "tenant: 'nobody' does not exist"),
    ],
)
async def test_a_refused_verb_says_why(gateway: Gateway, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    place = ("--data", str(tmp_path / "data"), "--database-url", gateway.services.settings.database_url)
    result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--tenant", "demo", *place])
    assert result.exit_code in (1, 2)
    assert told in result.output


async def test_a_version_in_the_cold_tier_alone_does_not_fail_its_smoke_prompts(
    gateway: Gateway, operator: AdminClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has no way to bring it in, so it says so: no run is kept that says the version is bad."""
    prompts = {"prompts": [{"messages": [{"role": "user", "content": "abc"}]}]}
    await operator("PUT", "/tenants/demo/adapters/pirate/smoke-prompts", prompts)
    monkeypatch.setenv("STENCILPRESS_ENGINE_SOCKET", gateway.services.settings.engine_socket)  # as in containers
    place = ("--data", str(tmp_path / "data"), "--database-url", gateway.services.settings.database_url)
    command = ["version", "smoke", "pirate@1", "--tenant", "demo", *place]
    result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert (result.exit_code, "is not in this data folder" in result.output) == (1, True), result.output
    assert (await operator("GET", "/tenants/demo/adapters/pirate/versions/1/smoke"))["data"] == []
