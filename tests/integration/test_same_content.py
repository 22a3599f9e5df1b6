"""Two tenants upload the same weights: nothing that either sees or is served comes from the other's files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import delete, select, update

from stencilpress.cli import main
from stencilpress.engine.image import build_image, image_name, read_image
from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.api.admin.dispatch import NOT_FOUND
from stencilpress.gateway.catalog.models import AdapterRow, TenantRow, VersionFilesRow
from stencilpress.gateway.errors import NotFoundError
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.fakes.engine import Options
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import BASE_ID, EOS, VOCAB_SIZE, Gateway, running_gateway
from tests.unit.adapters import GOOD, lora_tensors, safetensors_bytes, tiny_spec
from tests.unit.test_archive import tar_bytes

SPEC = tiny_spec(base_id=BASE_ID, vocab_size=VOCAB_SIZE)
TENSORS = lora_tensors(SPEC)
FREE = {"revision": "r-{}", "auto_mapping": {"parent_library": "lib_{}"}, "loftq_config": {"path": "/home/{}/x"}}
"""Fields that decide nothing, in which anybody may write anything."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=512)
    async with running_gateway(tmp_path, options) as running:
        yield running


@pytest.fixture
async def first(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "demo", Role.ADMIN)


@pytest.fixture
async def second(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "other", Role.ADMIN)


def config(who: str, **fields: Any) -> bytes:
    """A config with what ``who`` wrote into it."""
    made = {**GOOD, "base_model_name_or_path": BASE_ID, **FREE, **fields}
    return json.dumps(made, indent=2).replace("{}", who).encode()


def weights(who: str, *, backwards: bool = False) -> bytes:
    names = sorted(TENSORS, reverse=backwards)
    return safetensors_bytes({name: TENSORS[name] for name in names}, {"format": "pt", "trained_by": who})


async def upload(admin: AdminClient, tenant: str, files: dict[str, bytes], name: str = "helper") -> Any:
    url = f"{admin.gateway.url}{ADMIN_PREFIX}{at(tenant, name)}/versions"
    headers = {"Authorization": f"Bearer {admin.key}", "Content-Type": "application/x-tar"}
    async with admin.gateway.http.post(url, data=tar_bytes(files), headers=headers) as response:
        answer = await response.json()
        assert response.status == 201, answer
    return answer


def at(tenant: str, name: str = "helper") -> str:
    return f"/tenants/{tenant}/adapters/{name}"


async def upload_both(first: AdminClient, second: AdminClient, **fields: Any) -> tuple[Any, Any]:
    """Of the first tenant with the usual config, of the second one with ``fields``."""
    mine = {CONFIG_NAME: config("ada"), WEIGHTS_NAME: weights("ada", backwards=True)}
    theirs = {CONFIG_NAME: config("bob", **fields), WEIGHTS_NAME: weights("bob")}
    return await upload(first, "demo", mine), await upload(second, "other", theirs)


def blob(gateway: Gateway, added: Any) -> Path:
    assert gateway.services.desk is not None
    return gateway.services.desk.blobs.folder(added["version"]["digest"])


async def test_each_sees_its_own_config(first: AdminClient, second: AdminClient) -> None:
    one, other = await upload_both(first, second)
    assert one["version"]["digest"] == other["version"]["digest"], "the content is the same, so it is there once"
    for admin, tenant, who in ((first, "demo", "ada"), (second, "other", "bob")):
        shown = await admin("GET", f"{at(tenant)}/versions/1/contents")
        assert shown["config"] == json.loads(config(who))
        assert [one["name"] for one in shown["modules"]] == ["q_proj", "v_proj"], "not as the first file has them"


async def test_each_compares_its_own_configs(first: AdminClient, second: AdminClient) -> None:
    await upload_both(first, second)
    changed = {CONFIG_NAME: config("bob", lora_alpha=16), WEIGHTS_NAME: weights("bob")}
    await upload(second, "other", changed)
    found = await second("GET", f"{at('other')}/versions/1/diff?other=2")
    assert found["config"] == [{"field": "lora_alpha", "left": 8, "right": 16}]


async def test_adapters_of_one_tenant_are_apart_too(first: AdminClient) -> None:
    """A key may be confined to one of them."""
    for name in ("helper", "twin"):
        await upload(first, "demo", {CONFIG_NAME: config(name), WEIGHTS_NAME: weights(name)}, name)
    for name in ("helper", "twin"):
        assert (await first("GET", f"{at('demo', name)}/versions/1/contents"))["config"] == json.loads(config(name))


async def test_a_version_keeps_the_config_that_it_came_with(first: AdminClient) -> None:
    for who in ("ada", "bob"):
        added = await upload(first, "demo", {CONFIG_NAME: config(who), WEIGHTS_NAME: weights(who)})
    assert (added["created"], added["version"]["version"]) == (False, "helper@1")
    assert (await first("GET", f"{at('demo')}/versions/1/contents"))["config"] == json.loads(config("ada"))


@pytest.mark.parametrize("fields", [{"lora_alpha": 32}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}])
async def test_each_is_served_with_its_own_scale(
    gateway: Gateway, first: AdminClient, second: AdminClient, fields: dict[str, Any]
) -> None:
    added = await upload_both(first, second, **fields)
    assert added[0]["version"]["digest"] != added[1]["version"]["digest"]
    for one, own in zip(added, ({}, fields), strict=True):
        path = blob(gateway, one) / image_name(SPEC.fingerprint())
        image = read_image(path, digest=one["version"]["digest"], fingerprint=SPEC.fingerprint())
        expected = build_image(SPEC, {**GOOD, **own}, TENSORS)
        assert image.header == expected.header
        assert image.payload.tobytes() == expected.payload.tobytes()


async def test_two_ways_to_write_one_scale_share_content_and_nothing_else(
    first: AdminClient, second: AdminClient
) -> None:
    one, other = await upload_both(first, second, lora_alpha=4, use_rslora=True)
    assert one["version"]["digest"] == other["version"]["digest"], "8 / 4 is 4 / sqrt(4)"
    assert (await first("GET", f"{at('demo')}/versions/1/contents"))["config"]["lora_alpha"] == 8
    assert (await second("GET", f"{at('other')}/versions/1/contents"))["config"]["lora_alpha"] == 4


async def test_what_is_shared_holds_nothing_that_anybody_wrote(
    gateway: Gateway, first: AdminClient, second: AdminClient
) -> None:
    one, _ = await upload_both(first, second)
    folder = blob(gateway, one)
    assert {path.name for path in folder.iterdir()} == {CONFIG_NAME, WEIGHTS_NAME, image_name(SPEC.fingerprint())}
    for path in folder.iterdir():
        content = path.read_bytes()
        assert not any(who in content for who in (b"ada", b"bob", b"trained_by", b"revision")), path.name


async def test_an_answer_does_not_tell_that_another_tenant_has_the_same(
    first: AdminClient, second: AdminClient
) -> None:
    one, other = await upload_both(first, second)
    for answer in (one, other):
        for own in ("created_at", "size_bytes"):
            answer["version"].pop(own)
    assert one == other
    assert (one["created"], one["promoted"]) == (True, True)


@pytest.mark.parametrize("what", ["/versions/2", ""])
async def test_who_deletes_takes_nothing_out_of_anothers_memory(
    gateway: Gateway, first: AdminClient, second: AdminClient, what: str
) -> None:
    await upload_both(first, second)
    await upload(second, "other", {CONFIG_NAME: config("bob", lora_alpha=2), WEIGHTS_NAME: weights("bob")})
    await upload(second, "other", {CONFIG_NAME: config("bob"), WEIGHTS_NAME: weights("bob")}, "spare")
    [mine] = (await first("GET", at("demo")))["versions"]
    theirs = (await second("GET", at("other")))["versions"]
    alone = [one["digest"] for one in theirs if one["digest"] != mine["digest"]]
    assert (len(theirs), len(alone)) == (2, 1)
    await second("DELETE", at("other", "spare"))
    assert gateway.engine.forgotten == []
    await second("DELETE", at("other") + what)
    assert gateway.engine.forgotten == alone
    await first("DELETE", at("demo"))
    forgotten = [*alone, mine["digest"]] if not what else alone
    assert gateway.engine.forgotten == forgotten, "the other one's first version has that content still"


async def test_each_pays_for_its_own_bytes(first: AdminClient, second: AdminClient) -> None:
    before = [await stored_bytes(first, "demo"), await stored_bytes(second, "other")]
    added = await upload_both(first, second)
    sizes = [len(config("ada") + weights("ada", backwards=True)), len(config("bob") + weights("bob"))]
    assert [one["version"]["size_bytes"] for one in added] == sizes
    after = [await stored_bytes(first, "demo"), await stored_bytes(second, "other")]
    assert [late - early for early, late in zip(before, after, strict=True)] == sizes


async def stored_bytes(admin: AdminClient, tenant: str) -> int:
    return int((await admin("GET", f"/tenants/{tenant}/quota"))["stored_bytes"]["used"])


# --- files to take away --------------------------------------------------------------------------------------


async def take(admin: AdminClient, path: str) -> tuple[int, bytes, Any]:
    headers = {"Authorization": f"Bearer {admin.key}"}
    async with admin.gateway.http.get(f"{admin.gateway.url}{ADMIN_PREFIX}{path}", headers=headers) as response:
        return response.status, await response.read(), response.headers


async def test_each_gets_its_own_files_back_byte_by_byte(first: AdminClient, second: AdminClient) -> None:
    await upload_both(first, second)
    for admin, tenant, who in ((first, "demo", "ada"), (second, "other", "bob")):
        uploaded = {CONFIG_NAME: config(who), WEIGHTS_NAME: weights(who, backwards=who == "ada")}
        for name, kind in ((CONFIG_NAME, "application/json"), (WEIGHTS_NAME, "application/octet-stream")):
            status, content, headers = await take(admin, f"{at(tenant)}/versions/1/files/{name}")
            assert (status, content) == (200, uploaded[name])
            assert (headers["Content-Type"], headers["Content-Length"]) == (kind, str(len(content)))
            assert headers["Content-Disposition"] == f'attachment; filename="{name}"'
            assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")


async def test_a_foreign_file_does_not_exist(gateway: Gateway, first: AdminClient, second: AdminClient) -> None:
    """Not even for a tenant that has the same content under the same name, in a version that it has not."""
    await upload_both(first, second)
    await upload(first, "demo", {CONFIG_NAME: config("ada", lora_alpha=16), WEIGHTS_NAME: weights("ada")})
    absent = (404, NotFoundError(NOT_FOUND).body())
    for path in (
        f"{at('demo')}/versions/1/files/{CONFIG_NAME}",
        f"{at('other')}/versions/2/files/{CONFIG_NAME}",
        f"{at('other')}/versions/1/files/{image_name(SPEC.fingerprint())}",
        f"{at('other')}/versions/1/files/..%2F..%2F..%2Fcatalog.db",
    ):
        assert (await take(second, path))[:2] == absent, path
    for role, status in ((Role.OPERATOR, 200), (Role.ADMIN, 200), (Role.VIEWER, 403), (Role.CALLER, 403)):
        mine = await admin_client(gateway, "other", role)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            assert (await take(mine, f"{at('other')}/versions/1/files/{name}"))[0] == status, (role, name)


async def test_files_that_were_not_kept_are_told_apart_and_come_with_the_next_upload(
    gateway: Gateway, first: AdminClient, second: AdminClient
) -> None:
    """As with versions from before files were kept, of which the first tenant's had been there first."""
    await upload_both(first, second)
    before = blob(gateway, {"version": await first("GET", f"{at('demo')}/versions/1")})
    (before / CONFIG_NAME).write_bytes(config("ada"))
    (before / WEIGHTS_NAME).write_bytes(weights("ada"))
    async with gateway.services.db.write() as session:
        await session.execute(update(VersionFilesRow).values(config=None, weights_header=None))
        theirs = select(AdapterRow.id).join(TenantRow).where(TenantRow.name == "other")
        await session.execute(delete(VersionFilesRow).where(VersionFilesRow.adapter_id.in_(theirs)))
    for name, content in ((CONFIG_NAME, config("ada")), (WEIGHTS_NAME, weights("ada"))):
        assert (await take(first, f"{at('demo')}/versions/1/files/{name}"))[:2] == (200, content)
        status, refused, _ = await take(second, f"{at('other')}/versions/1/files/{name}")
        assert (status, json.loads(refused)["error"]["code"]) == (409, "file_not_kept")
    assert (await first("GET", f"{at('demo')}/versions/1/contents"))["config"] == json.loads(config("ada"))
    assert (await second("GET", f"{at('other')}/versions/1/contents"))["config"] is None
    await upload(second, "other", {CONFIG_NAME: config("bob"), WEIGHTS_NAME: weights("bob")})
    assert (await second("GET", f"{at('other')}/versions/1/contents"))["config"] == json.loads(config("bob"))
    assert (await take(second, f"{at('other')}/versions/1/files/{WEIGHTS_NAME}"))[:2] == (200, weights("bob"))


async def test_the_command_writes_what_was_uploaded(
    gateway: Gateway, first: AdminClient, second: AdminClient, tmp_path: Path
) -> None:
    await upload_both(first, second)
    place = ("--data", str(tmp_path / "data"), "--database-url", gateway.services.settings.database_url)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "v1").symlink_to(tmp_path / "v1")

    async def run(*arguments: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--tenant", "other", *place])

    target = tmp_path / "taken" / "helper"
    written = await run("version", "download", "helper@1", str(target), "--json")
    assert written.exit_code == 0, written.output
    sizes = {CONFIG_NAME: len(config("bob")), WEIGHTS_NAME: len(weights("bob"))}
    assert json.loads(written.stdout) == {"folder": str(target), "files": sizes}
    assert (target / CONFIG_NAME).read_bytes() == config("bob")
    assert (target / WEIGHTS_NAME).read_bytes() == weights("bob")
    again = await run("version", "download", "helper@1", str(target))
    assert (again.exit_code, "exists" in again.output) == (1, True)
    shown = await run("version", "contents", "helper@1", "--json")
    assert json.loads(shown.stdout)["config"] == json.loads(config("bob"))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-4], lambda data: data[:0], lambda data: b"\xff" * 64 + data[64:]]
)
async def test_damaged_files_are_no_fault_of_the_server(
    gateway: Gateway, first: AdminClient, second: AdminClient, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    one, _ = await upload_both(first, second)
    await upload(second, "other", {CONFIG_NAME: config("bob", lora_alpha=16), WEIGHTS_NAME: weights("bob")})
    file = blob(gateway, one) / WEIGHTS_NAME
    file.write_bytes(damage(file.read_bytes()))
    for what in (f"files/{WEIGHTS_NAME}", "contents", "diff?other=2"):
        refused = await second("GET", f"{at('other')}/versions/1/{what}", status=503)
        assert refused["error"]["code"] == "adapter_unavailable"
    kept = await take(second, f"{at('other')}/versions/1/files/{CONFIG_NAME}")
    assert kept[:2] == (200, config("bob")), "it lies elsewhere"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "v1").symlink_to(tmp_path / "v1")
    place = ("--data", str(tmp_path / "data"), "--database-url", gateway.services.settings.database_url)
    for command in (["contents", "helper@1"], ["download", "helper@1", str(tmp_path / "taken")]):
        arguments = ["version", *command, "--tenant", "other", *place]
        told = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        assert (told.exit_code, f"{file.name}: is damaged" in told.output) == (1, True), told.output
