"""The command and the admin API are two ways to the same services: the same verbs, the same answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from stencilpress.cli import main
from stencilpress.gateway.access import Role
from stencilpress.gateway.api.admin import adapters, aliases, uploads
from stencilpress.gateway.api.admin.router import OPERATIONS
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import Gateway, running_gateway

VERBS = {
    "list_tenants": "tenant list",
    "create_tenant": "tenant add",
    "get_tenant": "tenant show",
    "change_tenant": "tenant set",
    "disable_tenant": "tenant disable",
    "enable_tenant": "tenant enable",
    "delete_tenant": "tenant delete",
    "restore_tenant": "tenant restore",
    "list_keys": "key list",
    "create_key": "key create",
    "get_key": "key show",
    "change_key": "key set",
    "rotate_key": "key rotate",
    "revoke_key": "key revoke",
    "list_audit": "audit list",
    "list_tenant_audit": "audit list",
    "export_file": "catalog export",
    "import_file": "catalog import",
}
"""What each operation is called on the command line."""
WITHOUT_VERB = {"get_me"}
"""The command has no key to tell of."""
OF_ADAPTERS = {one.id for one in (*adapters.OPERATIONS, *aliases.OPERATIONS, *uploads.OPERATIONS)}

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
    assert {one.id for one in OPERATIONS} == VERBS.keys() | WITHOUT_VERB | OF_ADAPTERS
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
