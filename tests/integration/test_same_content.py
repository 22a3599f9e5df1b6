"""Two tenants upload the same weights: nothing that either sees or is served comes from the other's files."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stencilpress.engine.image import build_image, image_name, read_image
from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.adapter_config import CONFIG_NAME
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


async def test_each_pays_for_its_own_bytes(first: AdminClient, second: AdminClient) -> None:
    before = [await stored_bytes(first, "demo"), await stored_bytes(second, "other")]
    added = await upload_both(first, second)
    sizes = [len(config("ada") + weights("ada", backwards=True)), len(config("bob") + weights("bob"))]
    assert [one["version"]["size_bytes"] for one in added] == sizes
    after = [await stored_bytes(first, "demo"), await stored_bytes(second, "other")]
    assert [late - early for early, late in zip(before, after, strict=True)] == sizes


async def stored_bytes(admin: AdminClient, tenant: str) -> int:
    return int((await admin("GET", f"/tenants/{tenant}/quota"))["stored_bytes"]["used"])
