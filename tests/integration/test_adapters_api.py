"""Adapters over the admin API, from upload to purge, against the real gateway and the fake engine."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import select

from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.catalog.usage_models import UsageRequestRow
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.lifecycle import gatekeeper
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.fakes.engine import Options
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.gateway_harness import BASE_ID, EOS, VOCAB_SIZE, Gateway, new_version, running_gateway
from tests.unit.adapters import FIRST_B, GOOD, lora_tensors, safetensors_bytes, tiny_spec
from tests.unit.test_archive import tar_bytes, zip_bytes

SPEC = tiny_spec(base_id=BASE_ID, vocab_size=VOCAB_SIZE)
PIRATE = "/tenants/demo/adapters/pirate"
HELPER = "/tenants/demo/adapters/helper"
A, B = "a" * 64, "b" * 64
"""The digests of pirate@1 and pirate@2."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=512, reversing=frozenset({B}))
    async with running_gateway(tmp_path, options) as running:
        yield running


@pytest.fixture
async def admin(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "demo", Role.ADMIN)


@pytest.fixture
async def operator(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "other", Role.OPERATOR)


def files(seed: int = 0, **config: Any) -> dict[str, bytes]:
    """An adapter for the gateway's base."""
    made = {**GOOD, "base_model_name_or_path": BASE_ID, **config}
    return {CONFIG_NAME: json.dumps(made).encode(), WEIGHTS_NAME: safetensors_bytes(lora_tensors(SPEC, seed=seed))}


async def send(admin: AdminClient, path: str, data: Any, kind: str | None = None, method: str = "POST") -> Any:
    headers = {"Authorization": f"Bearer {admin.key}", **({"Content-Type": kind} if kind else {})}
    url = f"{admin.gateway.url}{ADMIN_PREFIX}{path}"
    body = io.BytesIO(data) if isinstance(data, bytes) else data
    async with admin.gateway.http.request(method, url, data=body, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def upload(admin: AdminClient, seed: int = 0, query: str = "", **config: Any) -> Any:
    kind = "application/x-tar"
    return await send(admin, f"{HELPER}/versions{query}", tar_bytes(files(seed, **config)), kind)


async def model_of(gateway: Gateway, name: str, **fields: Any) -> str:
    body = {"model": name, "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, **fields}
    status, answer = await gateway.post("/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["model"])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- uploads -------------------------------------------------------------------------------------------------


async def test_two_files_a_tar_and_a_zip_are_the_same_version(gateway: Gateway, admin: AdminClient) -> None:
    form = aiohttp.FormData()
    for name, content in files().items():
        form.add_field("f", content, filename=name)
    status, first = await send(admin, f"{HELPER}/versions", form)
    assert status == 201, first
    assert (first["created"], first["promoted"], first["version"]["version"]) == (True, True, "helper@1")
    assert [(one["name"], one["ranks"]) for one in first["modules"]] == [("q_proj", [4]), ("v_proj", [4])]
    for data, kind in (
        (tar_bytes(files()), "application/x-tar"),
        (tar_bytes(files(), "w:gz"), "application/gzip"),
        (zip_bytes({f"helper/{name}": content for name, content in files().items()}), "application/zip"),
    ):
        status, again = await send(admin, f"{HELPER}/versions", data, kind)
        assert (status, again["created"], again["version"]["digest"]) == (201, False, first["version"]["digest"])
    assert await model_of(gateway, "helper") == "helper@1"
    shown = await admin("GET", HELPER)
    assert [one["version"] for one in shown["versions"]] == ["helper@1"]
    assert shown["versions"][0]["aliases"] == ["prod"]


async def test_a_refused_upload_tells_everything_and_leaves_nothing(gateway: Gateway, admin: AdminClient) -> None:
    tensors = lora_tensors(SPEC)
    tensors[FIRST_B][0, 0] = 3.4e38
    bad = {**files(use_dora=True, bias="all"), WEIGHTS_NAME: safetensors_bytes(tensors)}
    status, answer = await send(admin, f"{HELPER}/versions", zip_bytes(bad), "application/zip")
    error = answer["error"]
    assert (status, error["code"]) == (422, "invalid_adapter")
    assert {(one["field"], one["code"]) for one in error["findings"]} == {
        ("use_dora", "unsupported"),
        ("bias", "unsupported"),
        (FIRST_B, "overflow"),
    }
    assert [one["name"] for one in error["modules"]] == ["q_proj", "v_proj"]
    assert (await admin.raw("GET", HELPER))[0] == 404
    desk = gateway.services.desk
    assert desk is not None
    assert list(desk.blobs.staging.iterdir()) == []
    assert desk.blobs.digests() == frozenset()


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"x" * 1000, "application/zip", 422),
        (zip_bytes({"../x": b""}), "application/zip", 422),
        (b"{}", "application/json", 415),
        (b"--x\r\n", "multipart/form-data; boundary=x", 400),
        (b"garbage", "multipart/form-data; boundary=x", 400),
        (b"garbage", "multipart/form-data", 400),
        (b"--x\r\nA: " + b"a" * 200_000 + b"\r\n\r\n", "multipart/form-data; boundary=x", 400),
        (b"--x\r\nContent-Length: -5\r\n\r\n", "multipart/form-data; boundary=x", 400),
        (
            b'--x\r\nContent-Disposition: form-data; name="evil.py"\r\n\r\nx\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
            400,
        ),
    ],
)
async def test_what_is_no_upload_is_refused(
    gateway: Gateway, admin: AdminClient, data: bytes, kind: str, status: int
) -> None:
    found, answer = await send(admin, f"{HELPER}/versions", data, kind)
    assert found == status, answer
    assert set(answer["error"]) >= {"message", "type", "param", "code"}


async def test_limits_are_the_tenants_and_bytes_stop_being_read(
    gateway: Gateway, admin: AdminClient, operator: AdminClient
) -> None:
    await operator("PATCH", "/tenants/demo", {"max_adapter_bytes": 1000})
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1 << 30:
            sent += 1 << 16
            yield bytes(1 << 16)

    try:
        status, answer = await send(admin, f"{HELPER}/versions", endless(), "application/x-tar")
        assert (status, answer["error"]["code"]) == (413, "too_large")
    except aiohttp.ClientOSError:
        pass  # the gateway closed while we were still sending
    assert sent < 64 << 20


async def test_an_upload_in_parts_survives_the_gateway(tmp_path: Path) -> None:
    data = tar_bytes(files())
    half = len(data) // 2
    async with running_gateway(tmp_path) as before:
        admin = await admin_client(before, "demo", Role.ADMIN)
        made = await admin("POST", "/tenants/demo/uploads", {"adapter": "helper"}, status=201)
        path = f"/tenants/demo/uploads/{made['id']}"
        part = f"{path}/files/archive?offset=0&sha256={sha256(data[:half])}"
        status, first = await send(admin, part, data[:half], "application/octet-stream", "PUT")
        assert (status, first["received_bytes"]) == (200, {"archive": half})
    (tmp_path / "catalog.db").unlink()  # the harness fills a new one, with the same tenants
    async with running_gateway(tmp_path) as after:
        admin = await admin_client(after, "demo", Role.ADMIN)
        assert (await admin("GET", path))["received_bytes"] == {"archive": half}
        again = f"{path}/files/archive?offset=0&sha256={sha256(data)}"
        status, answer = await send(admin, again, data, "application/octet-stream", "PUT")
        assert (status, answer["error"]["code"]) == (409, "wrong_offset")
        rest = f"{path}/files/archive?offset={half}&sha256={sha256(data[half:])}"
        assert (await send(admin, rest, data[half:], "application/octet-stream", "PUT"))[0] == 200
        whole = {"sha256": {"archive": sha256(data)}}
        added = await admin("POST", f"{path}/complete", whole)
        assert (added["version"]["version"], added["created"]) == ("helper@1", True)
        assert added["promoted"]
        assert added["modules"]
        assert await admin("POST", f"{path}/complete", whole) == added, "a client that missed the answer gets it"
        assert (await admin("GET", path))["result"] == "helper@1"
        assert await model_of(after, "helper") == "helper@1"


async def test_a_refused_upload_in_parts_is_gone(gateway: Gateway, admin: AdminClient) -> None:
    data = zip_bytes({"train.py": b"import os"})
    made = await admin("POST", "/tenants/demo/uploads", {"adapter": "helper"}, status=201)
    path = f"/tenants/demo/uploads/{made['id']}"
    part = f"{path}/files/archive?offset=0&sha256={sha256(data)}"
    assert (await send(admin, part, data, "application/octet-stream", "PUT"))[0] == 200
    status, text = await admin.raw("POST", f"{path}/complete", {"sha256": {"archive": sha256(data)}})
    assert (status, json.loads(text)["error"]["findings"][0]["code"]) == (422, "unexpected_file")
    assert (await admin.raw("GET", path))[0] == 404


# --- aliases -------------------------------------------------------------------------------------------------


async def test_of_two_consoles_one_moves_the_alias(gateway: Gateway, admin: AdminClient) -> None:
    move = {"version": 2, "expected_version": 1}
    outcomes = await asyncio.gather(*(admin.raw("PUT", f"{PIRATE}/aliases/prod", move) for _ in range(8)))
    assert sorted(status for status, _ in outcomes) == [200] + [409] * 7
    assert {json.loads(text)["error"]["code"] for status, text in outcomes if status == 409} == {"alias_moved"}
    assert await model_of(gateway, "pirate") == "pirate@2", "this gateway follows at once"
    back = await admin("POST", f"{PIRATE}/aliases/prod/rollback", {"reason": "worse"})
    assert (back["version"], await model_of(gateway, "pirate")) == (1, "pirate@1")
    history = (await admin("GET", f"{PIRATE}/aliases/prod/history"))["data"]
    assert [(one["kind"], one["version"], one["reason"]) for one in history][:2] == [
        ("rollback", 1, "worse"),
        ("move", 2, ""),
    ]
    assert history[0]["actor"].startswith("key:")
    entries = (await admin("GET", "/tenants/demo/audit"))["data"]
    assert [one["action"] for one in entries][:2] == ["alias.rollback", "alias.move"]


async def test_an_etag_is_a_condition(gateway: Gateway, admin: AdminClient) -> None:
    url = f"{gateway.url}{ADMIN_PREFIX}{PIRATE}/aliases/prod"
    seen = (await admin("GET", f"{PIRATE}/aliases/prod"))["etag"]

    async def move(**headers: str) -> int:
        sent = {"Authorization": f"Bearer {admin.key}", **headers}
        async with gateway.http.put(url, data=io.BytesIO(b'{"version": 2}'), headers=sent) as response:
            return response.status

    assert await move() == 400
    assert await move(**{"If-Match": "nonsense"}) == 400
    assert await move(**{"If-None-Match": "*"}) == 409
    assert await move(**{"If-Match": seen}) == 200
    assert await move(**{"If-Match": seen}) == 409
    body = {"version": 1, "expected_etag": seen}
    status, text = await admin.raw("PUT", f"{PIRATE}/aliases/prod", body)
    assert (status, json.loads(text)["error"]["code"]) == (409, "alias_moved")
    assert (await admin.raw("POST", f"{PIRATE}/aliases/prod/rollback", {"expected_etag": seen}))[0] == 409
    now = (await admin("GET", f"{PIRATE}/aliases/prod"))["etag"]
    assert (await admin("PUT", f"{PIRATE}/aliases/prod", {**body, "expected_etag": now}))["version"] == 1
    assert (await admin.raw("PUT", f"{PIRATE}/aliases/prod", {**body, "expected_etag": "7"}))[0] == 400


async def test_a_canary_is_sticky_by_user(gateway: Gateway, admin: AdminClient) -> None:
    change = {"version": 1, "canary": {"version": 2, "percent": 50}, "expected_version": 1}
    await admin("PUT", f"{PIRATE}/aliases/prod", change)
    users = [f"u{i}" for i in range(12)]
    first = [await model_of(gateway, "pirate", user=user) for user in users]
    assert set(first) == {"pirate@1", "pirate@2"}
    assert first == [await model_of(gateway, "pirate", user=user) for user in users]
    keyed = {await model_of(gateway, "pirate") for _ in range(4)}
    assert len(keyed) == 1, "without a user the key is one"


async def test_running_streams_end_on_the_version_they_began_with(gateway: Gateway, admin: AdminClient) -> None:
    api = await gateway.openai()
    message: Any = {"role": "user", "content": "abc"}
    stream = await api.chat.completions.create(model="pirate", messages=[message], max_tokens=40, stream=True)
    chunks = [await anext(stream)]
    await admin("PUT", f"{PIRATE}/aliases/prod", {"version": 2, "expected_version": 1})
    await admin("DELETE", f"{PIRATE}/versions/1")
    assert await model_of(gateway, "pirate") == "pirate@2"
    chunks += [chunk async for chunk in stream]
    assert {chunk.model for chunk in chunks} == {"pirate@1"}
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (await gateway.post("/v1/completions", {"model": "pirate@1", "prompt": "a"}))[0] == 404
    await admin("POST", f"{PIRATE}/versions/1/restore")
    assert await model_of(gateway, "pirate@1") == "pirate@1"


# --- smoke prompts -------------------------------------------------------------------------------------------


def prompts(**changes: Any) -> dict[str, Any]:
    return {"prompts": [{"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, **changes}]}


async def test_prod_moves_once_the_prompts_pass(gateway: Gateway, admin: AdminClient) -> None:
    await admin("PUT", f"{PIRATE}/smoke-prompts", prompts(must_match="^xyz$"))
    move = {"version": 2, "expected_version": 1}
    status, text = await admin.raw("PUT", f"{PIRATE}/aliases/prod", move)
    error = json.loads(text)["error"]
    assert (status, error["code"], error["results"][0]["matched"]) == (422, "smoke_failed", False)
    assert (await admin("GET", f"{PIRATE}/aliases/prod"))["version"] == 1
    suite = await admin("PUT", f"{PIRATE}/smoke-prompts", prompts(must_match="^cba$"))
    assert (await admin("PUT", f"{PIRATE}/aliases/prod", move))["version"] == 2
    runs = (await admin("GET", f"{PIRATE}/versions/2/smoke"))["data"]
    assert [(one["passed"], one["suite_revision"]) for one in runs] == [
        (True, suite["revision"]),
        (False, suite["revision"] - 1),
    ]
    idle = await admin("POST", f"{PIRATE}/versions/1/smoke")
    assert (idle["passed"], idle["results"][0]["same_as_base"]) == (False, True)
    await admin("PUT", f"{PIRATE}/smoke-prompts", {"prompts": []})
    assert (await admin("GET", f"{PIRATE}/smoke-prompts"))["revision"] is None


async def test_runs_are_free_so_a_tenant_has_so_many_an_hour(
    gateway: Gateway, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gatekeeper, "RUNS_PER_HOUR", 3)
    await admin("PUT", f"{PIRATE}/smoke-prompts", prompts())
    runs = [admin.raw("POST", f"{PIRATE}/versions/{1 + number % 2}/smoke") for number in range(8)]
    answers = await asyncio.gather(*runs)
    assert sorted(status for status, _ in answers) == [200] * 3 + [429] * 5
    refused = next(json.loads(text)["error"] for status, text in answers if status == 429)
    assert refused["dimension"] == "smoke_runs_per_hour"
    operator = await admin_client(gateway, "other", Role.OPERATOR)
    await operator("POST", f"{PIRATE}/versions/2/smoke")
    await gateway.services.accounting.flush()
    async with gateway.services.db.read() as session:
        assert (await session.execute(select(UsageRequestRow.__table__))).all() == []


@pytest.mark.parametrize(
    "body", [{"prompts": [{}]}, prompts(must_match="["), prompts(max_tokens=10**6), {"prompts": [{}] * 21}]
)
async def test_bad_prompts_are_refused_by_name(gateway: Gateway, admin: AdminClient, body: Any) -> None:
    status, text = await admin.raw("PUT", f"{PIRATE}/smoke-prompts", body)
    assert (status, json.loads(text)["error"]["param"].startswith("prompts")) == (400, True)


# --- defaults, differences, shares, deletion -----------------------------------------------------------------


async def test_defaults_stand_in_for_what_a_request_leaves_out(gateway: Gateway, admin: AdminClient) -> None:
    shown = await admin("PUT", f"{PIRATE}/versions/1/defaults", {"system_prompt": "xy", "temperature": 0.5, "top_k": 7})
    assert shown["defaults"] == {"system_prompt": "xy", "temperature": 0.5, "top_k": 7}
    encode = gateway.services.tokenizer.encode_chat

    async def asked(**fields: Any) -> Any:
        await model_of(gateway, "pirate", **fields)
        return gateway.engine.submits[-1]

    submit = await asked()
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.5, 7, 1.0)
    assert submit.prompt == (await asked(messages=[{"role": "user", "content": "xyabc"}], model="pirate@2")).prompt
    messages = [{"role": "developer", "content": "z"}, {"role": "user", "content": "a"}]
    own = await asked(temperature=1.0, messages=messages)
    assert own.sampling.temperature == 1.0
    assert len(own.prompt) // 4 == len(encode([{"role": "user", "content": "za"}]))
    status, text = await admin.raw("PUT", f"{PIRATE}/versions/1/defaults", {"temperature": 3})
    assert (status, json.loads(text)["error"]["param"]) == (400, "temperature")


async def test_two_versions_are_compared(gateway: Gateway, admin: AdminClient) -> None:
    await upload(admin, seed=1)
    await upload(admin, seed=2, lora_alpha=16)
    found = await admin("GET", f"{HELPER}/versions/1/diff?other=2")
    assert found["config"] == [{"field": "lora_alpha", "left": 8, "right": 16}]
    assert len(found["tensors"]) == 8
    assert all(one["relative"] > 1 for one in found["deltas"])
    assert (await admin.raw("GET", f"{HELPER}/versions/1/diff?other=9"))[0] == 404


async def test_a_version_tells_its_config_and_ranks(admin: AdminClient) -> None:
    await upload(admin, lora_alpha=16)
    found = await admin("GET", f"{HELPER}/versions/1/contents")
    assert found["config"] == json.loads(files(lora_alpha=16)[CONFIG_NAME])
    assert found["modules"] == [{"name": name, "layers": 2, "ranks": [4]} for name in ("q_proj", "v_proj")]
    status, text = await admin.raw("GET", f"{PIRATE}/versions/1/contents")
    assert (status, json.loads(text)["error"]["code"]) == (503, "adapter_unavailable"), "its files are not here"


async def test_a_guest_sees_a_name_and_a_version(gateway: Gateway, admin: AdminClient, operator: AdminClient) -> None:
    headers = {"Authorization": f"Bearer {gateway.other_key}"}
    body = {"model": "pirate", "prompt": "abc", "max_tokens": 3}
    assert (await gateway.post("/v1/completions", body, headers=headers))[0] == 404
    await operator("PUT", f"{PIRATE}/shares/other")
    status, answer = await gateway.post("/v1/completions", body, headers=headers)
    assert (status, answer["model"]) == (200, "pirate@1")
    assert gateway.engine.submits[-1].tenant != 1, "its own share, its own cache"
    async with gateway.http.get(f"{gateway.url}/v1/models", headers=headers) as response:
        (card,) = [one for one in (await response.json())["data"] if one["id"] == "pirate"]
    assert (card["root"], card["owned_by"]) == ("pirate@1", "shared")
    guest = await admin_client(gateway, "other", Role.ADMIN)
    assert (await guest.raw("GET", "/tenants/other/adapters/pirate"))[0] == 404
    assert (await guest.raw("GET", PIRATE))[0] == 404
    await admin("PUT", f"{PIRATE}/aliases/prod", {"version": 2, "expected_version": 1})
    assert (await gateway.post("/v1/completions", body, headers=headers))[1]["model"] == "pirate@2"
    assert [one["tenant"] for one in (await operator("GET", f"{PIRATE}/shares"))["data"]] == ["other"]
    assert (await admin.raw("PUT", f"{PIRATE}/shares/other"))[0] == 403
    assert (await operator.raw("DELETE", f"{PIRATE}/shares/other"))[0] == 204
    assert (await gateway.post("/v1/completions", body, headers=headers))[0] == 404


async def test_a_deleted_adapter_comes_back_whole(gateway: Gateway, admin: AdminClient) -> None:
    before = await admin("GET", PIRATE)
    await admin("DELETE", PIRATE)
    assert sorted(gateway.engine.forgotten) == sorted({one["digest"] for one in before["versions"]})
    assert (await gateway.post("/v1/completions", {"model": "pirate", "prompt": "a"}))[0] == 404
    assert [one["name"] for one in (await admin("GET", "/tenants/demo/adapters"))["data"]] == []
    assert [one["name"] for one in (await admin("GET", "/tenants/demo/adapters?deleted=true"))["data"]] == ["pirate"]
    await admin("POST", f"{PIRATE}/restore")
    assert await admin("GET", PIRATE) == before


async def test_adapters_come_in_pages(gateway: Gateway, admin: AdminClient) -> None:
    from stencilpress.gateway.catalog.adapters import add_version
    from stencilpress.gateway.catalog.tenants import get_tenant

    db, base = gateway.services.db, gateway.services.router.base
    tenant = await get_tenant(db, "demo")
    for i in range(4):
        await add_version(db, tenant.id, f"a{i}", new_version("c"), base)
    seen, after = list[str](), ""
    while True:
        page = await admin("GET", f"/tenants/demo/adapters?limit=2{after}")
        seen += [one["name"] for one in page["data"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert seen == ["a0", "a1", "a2", "a3", "pirate"]


async def test_tgis_adapter_id_names_an_adapter(gateway: Gateway) -> None:
    assert await model_of(gateway, "base", adapter_id="pirate@2") == "pirate@2"
    assert await model_of(gateway, "pirate", adapter_id="pirate") == "pirate@1"
    for model, adapter, wanted in (("pirate", "pirate@2", 400), ("base", "nobody", 404)):
        body = {"model": model, "adapter_id": adapter, "prompt": "a"}
        assert (await gateway.post("/v1/completions", body))[0] == wanted


# --- vLLM's routes -------------------------------------------------------------------------------------------


async def lora(gateway: Gateway, key: str, verb: str, **body: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"}
    data = io.BytesIO(json.dumps(body).encode())
    async with gateway.http.post(f"{gateway.url}/v1/{verb}_lora_adapter", data=data, headers=headers) as response:
        return response.status, await response.text()


async def test_vllms_routes_load_and_unload(tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    for seed, name in enumerate(("first", "second")):
        (shelf / name).mkdir(parents=True)
        for file, content in files(seed).items():
            (shelf / name / file).write_bytes(content)
    async with running_gateway(tmp_path, lora_load_dir=str(shelf)) as gateway:
        token = (await issue_key(gateway.services.db, "demo", role=Role.OPERATOR)).token
        loaded = await lora(gateway, token, "load", lora_name="helper", lora_path="first")
        assert loaded == (200, "Success: LoRA adapter 'helper' added successfully.")
        assert await model_of(gateway, "helper") == "helper@1"
        again = {"lora_name": "helper", "lora_path": str(shelf / "second")}
        assert (await lora(gateway, token, "load", **again))[0] == 400
        assert (await lora(gateway, token, "load", **again, load_inplace=True))[0] == 200
        assert await model_of(gateway, "helper") == "helper@2"
        unloaded = await lora(gateway, token, "unload", lora_name="helper")
        assert unloaded == (200, "Success: LoRA adapter 'helper' removed successfully.")
        assert (await lora(gateway, token, "unload", lora_name="helper"))[0] == 404
        assert (await gateway.post("/v1/completions", {"model": "helper", "prompt": "a"}))[0] == 404
        (shelf / "first" / WEIGHTS_NAME).write_bytes(b"broken")
        assert (await lora(gateway, token, "load", lora_name="helper", lora_path="first"))[0] == 422
        assert (await gateway.post("/v1/completions", {"model": "helper", "prompt": "a"}))[0] == 404
        assert (await lora(gateway, token, "load", **again))[0] == 200
        assert await model_of(gateway, "helper") == "helper@2"
        admin = (await issue_key(gateway.services.db, "demo", role=Role.ADMIN)).token
        assert (await lora(gateway, admin, "load", **again, load_inplace=True))[0] == 403


@pytest.mark.parametrize(
    "path", ["..", "../model", "/etc", "link", "nothing", "first/../../model", "a\0b", "first/" + WEIGHTS_NAME]
)
async def test_nothing_outside_the_folder_is_loaded(tmp_path: Path, path: str) -> None:
    (tmp_path / "shelf" / "first").mkdir(parents=True)
    (tmp_path / "shelf" / "link").symlink_to(tmp_path)
    async with running_gateway(tmp_path, lora_load_dir=str(tmp_path / "shelf")) as gateway:
        token = (await issue_key(gateway.services.db, "demo", role=Role.OPERATOR)).token
        status, text = await lora(gateway, token, "load", lora_name="helper", lora_path=path)
        assert (status, json.loads(text)["error"]["param"]) == (400, "lora_path")
        assert str(tmp_path) not in text


async def test_vllms_routes_are_off_by_default(gateway: Gateway) -> None:
    token = (await issue_key(gateway.services.db, "demo", role=Role.OPERATOR)).token
    for verb in ("load", "unload"):
        assert (await lora(gateway, token, verb, lora_name="pirate", lora_path="x"))[0] == 404
    assert await model_of(gateway, "pirate") == "pirate@1"
