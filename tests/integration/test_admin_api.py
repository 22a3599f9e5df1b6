"""The admin API on a real socket: tenants, keys, audit; every answer is held against the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from stencilpress.gateway.access import Permission, Role
from stencilpress.gateway.api.admin.router import OPERATIONS
from stencilpress.gateway.api.admin.views import LimitChanges, TenantView
from stencilpress.gateway.catalog.limits import FIELDS, OPTIONAL, RANGES
from tests.integration.admin_client import DOCUMENT, AdminClient, admin_client
from tests.integration.gateway_harness import Gateway, running_gateway

CHAT = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def operator(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "other", Role.OPERATOR)


@pytest.fixture
async def admin(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "demo", Role.ADMIN)


async def chat(gateway: Gateway, key: str, **changes: Any) -> tuple[int, Any]:
    return await gateway.post("/v1/chat/completions", {**CHAT, **changes}, headers={"Authorization": f"Bearer {key}"})


async def test_the_document_is_valid_openapi_and_served_as_it_is(gateway: Gateway) -> None:
    validate(DOCUMENT)
    async with gateway.http.get(f"{gateway.url}/admin/api/v1/openapi.json") as answer:
        assert await answer.json() == DOCUMENT
    names = [operation["operationId"] for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


def test_the_ranges_of_the_document_are_those_that_are_checked() -> None:
    schema = DOCUMENT["components"]["schemas"]["LimitChanges"]["properties"]
    assert set(schema) == set(FIELDS) == set(LimitChanges.__struct_fields__)
    assert set(schema) < set(TenantView.__struct_fields__)
    for field, (low, high) in RANGES.items():
        choices = schema[field].get("anyOf", [schema[field]])
        numbers = [choice for choice in choices if choice["type"] != "null"]
        assert [(choice["minimum"], choice["maximum"]) for choice in numbers] == [(low, high)], field
        assert ({"type": "null"} in choices) == (field in OPTIONAL), field


async def test_a_tenants_life(gateway: Gateway, operator: AdminClient) -> None:
    made = await operator(
        "POST", "/tenants", {"name": "acme", "max_rank": 16, "target_modules": ["q_proj"]}, status=201
    )
    assert (made["max_rank"], made["target_modules"], made["max_versions"]) == (16, ["q_proj"], 1000)
    changed = await operator("PATCH", "/tenants/acme", {"max_tokens": 100, "target_modules": None})
    assert changed == {**made, "max_tokens": 100, "target_modules": None}
    assert await operator("GET", "/tenants/acme") == changed
    assert (await operator("POST", "/tenants/acme/disable"))["disabled_at"] is not None
    assert (await operator("POST", "/tenants/acme/enable")) == changed
    assert (await operator("DELETE", "/tenants/acme"))["deleted_at"] is not None
    await operator("GET", "/tenants/acme", status=404)
    await operator("POST", "/tenants", {"name": "acme"}, status=409)
    assert "acme" not in [one["name"] for one in (await operator("GET", "/tenants"))["data"]]
    assert "acme" in [one["name"] for one in (await operator("GET", "/tenants?deleted=true"))["data"]]
    assert (await operator("POST", "/tenants/acme/restore")) == changed
    actions = [one["action"] for one in (await operator("GET", "/audit?target=tenant:acme"))["data"]]
    assert actions == [f"tenant.{verb}" for verb in ("restore", "delete", "enable", "disable", "change", "create")]


async def test_a_deleted_tenant_is_purged_once_its_name_is_said_twice(gateway: Gateway, operator: AdminClient) -> None:
    made = await operator("POST", "/tenants/demo/keys", {"label": "x"}, status=201)
    admin = await admin_client(gateway, "demo", Role.ADMIN)
    await admin("POST", "/tenants/demo/purge", {"confirm": "demo"}, status=403)
    await operator("POST", "/tenants/other/purge", {"confirm": "other"}, status=409)  # its own
    await operator("POST", "/tenants/demo/purge", {"confirm": "demo"}, status=409)  # not deleted
    await operator("DELETE", "/tenants/demo")
    for confirm in ("", "Demo", "demo "):
        refused = await operator("POST", "/tenants/demo/purge", {"confirm": confirm}, status=400)
        assert refused["error"]["param"] == "confirm"
    purged = await operator("POST", "/tenants/demo/purge", {"confirm": "demo"})
    assert (purged["tenant"], purged["adapters"], purged["versions"]) == ("demo", 1, 2)
    assert sorted(gateway.engine.forgotten) == ["a" * 64, "b" * 64]
    await operator("POST", "/tenants/demo/restore", status=404)
    await operator("POST", f"/tenants/{purged['tombstone']}/restore", status=404)
    status, _ = await gateway.post("/v1/models", {}, headers={"Authorization": f"Bearer {made['token']}"})
    assert status in (401, 405)
    assert [one["name"] for one in (await operator("GET", "/tenants?deleted=true"))["data"]] == ["other"]
    await operator("POST", "/tenants", {"name": "demo"}, status=201)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_rank": 0}, "max_rank"),
        ({"max_rank": None}, "max_rank"),
        ({"max_rank": "16"}, "max_rank"),
        ({"target_modules": ["q_porj"]}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"max_tokens": 10, "default_max_tokens": 11}, "default_max_tokens"),
        ({"tokens_per_day": 0}, "tokens_per_day"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"time_zone": "../../etc/passwd"}, "time_zone"),
        ({"time_zone": None}, "time_zone"),
        ({"prefix_salt": "x"}, "prefix_salt"),
        ({"id": 7}, "id"),
        ({"deleted_at": None}, "deleted_at"),
        ([], None),
    ],
)
async def test_what_cannot_be_is_refused_by_name_and_changes_nothing(
    operator: AdminClient, body: Any, param: str | None
) -> None:
    before = await operator("GET", "/tenants/demo")
    refused = await operator("PATCH", "/tenants/demo", body, status=400)
    assert refused["error"]["param"] == param
    assert await operator("GET", "/tenants/demo") == before


async def test_a_disabled_or_deleted_tenants_keys_are_refused_at_once(gateway: Gateway, operator: AdminClient) -> None:
    for verb, undo in (("POST /disable", "POST /enable"), ("DELETE ", "POST /restore")):
        assert (await chat(gateway, gateway.key))[0] == 200
        await operator(verb.split()[0], "/tenants/demo" + verb.partition(" ")[2])
        assert (await chat(gateway, gateway.key))[0] == 401
        await operator(undo.split()[0], "/tenants/demo" + undo.partition(" ")[2])
    assert (await chat(gateway, gateway.key))[0] == 200


async def test_an_operator_does_not_lock_itself_out(operator: AdminClient) -> None:
    await operator("POST", "/tenants/other/disable", status=409)
    await operator("DELETE", "/tenants/other", status=409)


async def test_a_tenants_longest_answer_holds(gateway: Gateway, operator: AdminClient) -> None:
    await operator("PATCH", "/tenants/demo", {"max_tokens": 5, "default_max_tokens": 3})
    status, answer = await chat(gateway, gateway.key, max_tokens=6)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert "5" in answer["error"]["message"]
    for asked, expected in ((5, 5), (None, 3)):
        status, answer = await chat(gateway, gateway.key, max_tokens=asked, ignore_eos=True)
        assert (status, answer["usage"]["completion_tokens"]) == (200, expected)
    await operator("PATCH", "/tenants/demo", {"default_max_tokens": None})
    assert (await chat(gateway, gateway.key, max_tokens=None, ignore_eos=True))[1]["usage"]["completion_tokens"] == 5


async def test_a_keys_life(gateway: Gateway, admin: AdminClient) -> None:
    body = {"label": "ci", "expires_at": (datetime.now(UTC) + timedelta(days=1)).isoformat()}
    made = await admin("POST", "/tenants/demo/keys", body, status=201)
    token = made.pop("token")
    assert token.split("_")[1] == made["id"]
    assert (made["role"], made["label"], made["last_four"]) == ("caller", "ci", token[-4:])
    path = f"/tenants/demo/keys/{made['id']}"
    assert await admin("GET", path) == made
    assert (await chat(gateway, token))[0] == 200
    changed = await admin("PATCH", path, {"label": "nightly", "expires_at": None})
    assert changed == {**made, "label": "nightly", "expires_at": None}
    rotated = await admin("POST", f"{path}/rotate", {"overlap_s": 600})
    fresh = rotated.pop("token")
    assert (rotated["id"], fresh.split("_")[1]) == (made["id"], made["id"])
    assert [(await chat(gateway, one))[0] for one in (token, fresh)] == [200, 200]
    last = (await admin("POST", f"{path}/rotate", {"overlap_s": 0}))["token"]
    assert [(await chat(gateway, one))[0] for one in (token, fresh, last)] == [401, 401, 200]
    assert (await admin("DELETE", path))["revoked_at"] is not None
    assert (await chat(gateway, last))[0] == 401
    await admin("POST", f"{path}/rotate", {}, status=409)
    listed = (await admin("GET", "/tenants/demo/keys"))["data"]
    assert listed[0]["id"] == made["id"]
    secrets = [one.split("_")[2] for one in (token, fresh, last)]
    for place in ("/tenants/demo/keys", "/tenants/demo/audit"):
        text = (await admin.raw("GET", place))[1]
        assert not any(secret in text for secret in secrets)


async def test_a_key_is_confined_to_its_models(gateway: Gateway, admin: AdminClient) -> None:
    token = (await admin("POST", "/tenants/demo/keys", {"models": ["pirate"]}, status=201))["token"]
    assert (await chat(gateway, token))[0] == 200
    assert (await chat(gateway, token, model="pirate@2"))[0] == 200
    status, refused = await chat(gateway, token, model="base")
    unknown = (await chat(gateway, token, model="nosuch"))[1]
    assert (status, refused["error"]["code"]) == (404, "model_not_found")
    assert str(refused).replace("'base'", "'nosuch'") == str(unknown)
    async with gateway.http.get(f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {token}"}) as answer:
        assert [one["id"] for one in (await answer.json())["data"]] == ["pirate"]
    confined = (await admin("POST", "/tenants/demo/keys", {"models": ["base"]}, status=201))["token"]
    assert (await chat(gateway, confined, model="base"))[0] == 200
    assert (await chat(gateway, confined))[0] == 404


async def test_a_key_is_confined_to_its_routes(gateway: Gateway, admin: AdminClient) -> None:
    body = {"routes": ["/v1/models"], "role": "admin"}
    token = (await admin("POST", "/tenants/demo/keys", body, status=201))["token"]
    status, refused = await chat(gateway, token)
    assert (status, refused["error"]["code"]) == (403, "permission_denied")
    for path, expected in (("/v1/models", 200), ("/v1/models/pirate", 200), ("/admin/api/v1/me", 403)):
        async with gateway.http.get(f"{gateway.url}{path}", headers={"Authorization": f"Bearer {token}"}) as answer:
            assert answer.status == expected


@pytest.mark.parametrize("body", [{"models": ["Pirate"]}, {"models": ["pirate@2"]}, {"routes": ["/v1/chat"]}])
async def test_a_scope_that_can_never_match_is_refused(admin: AdminClient, body: dict[str, Any]) -> None:
    refused = await admin("POST", "/tenants/demo/keys", body, status=400)
    assert refused["error"]["param"] == next(iter(body))


async def test_a_key_grants_no_more_than_it_has(gateway: Gateway, admin: AdminClient, operator: AdminClient) -> None:
    assert (await admin("POST", "/tenants/demo/keys", {"role": "operator"}, status=403))["error"]["param"] == "role"
    for role in ("admin", "viewer", "caller"):
        await admin("POST", "/tenants/demo/keys", {"role": role}, status=201)
    scoped = {"role": "admin", "models": ["pirate"]}
    token = (await admin("POST", "/tenants/demo/keys", scoped, status=201))["token"]
    confined = AdminClient(gateway, token)
    await confined("POST", "/tenants/demo/keys", {}, status=403)
    await confined("PATCH", f"/tenants/demo/keys/{token.split('_')[1]}", {"models": None}, status=403)
    await confined("PATCH", f"/tenants/demo/keys/{token.split('_')[1]}", {"models": ["pirate", "x"]}, status=403)
    await confined("POST", "/tenants/demo/keys", {"models": ["pirate"]}, status=201)
    assert (await operator("POST", "/tenants/demo/keys", {"role": "operator"}, status=201))["role"] == "operator"


async def test_a_confined_key_manages_no_other_adapter(gateway: Gateway, admin: AdminClient) -> None:
    """Whoever may only use ``helper`` may neither look into ``pirate``, nor replace nor delete it."""
    ids = {
        "tenant": "demo",
        "adapter": "pirate",
        "version": "1",
        "alias": "prod",
        "guest": "other",
        "kind": "errors_high",
        "file": "adapter_config.json",
    }
    upload = (await admin("POST", "/tenants/demo/uploads", {"adapter": "pirate"}, status=201))["id"]
    made = await admin("POST", "/tenants/demo/keys", {"role": "admin", "models": ["helper"]}, status=201)
    confined = AdminClient(gateway, made["token"])
    part = f"/files/archive?offset=0&sha256={'0' * 64}"
    uploads = [f"/tenants/demo/uploads/{upload}{rest}" for rest in ("", "/complete", part)]
    for one in OPERATIONS:
        if "{adapter}" in one.path and one.needs is not Permission.OPERATE:
            path = re.sub(r"{(\w+)}", lambda found: ids[found[1]], one.path)
            assert (await confined.raw(one.method, path, {} if one.body or one.accepts else None))[0] == 404, one.id
    digests = {"sha256": {"archive": "0" * 64}}
    for method, at in (("GET", 0), ("DELETE", 0), ("POST", 1), ("PUT", 2)):
        assert (await confined.raw(method, uploads[at], digests))[0] == 404, (method, at)
    assert (await confined.raw("POST", "/tenants/demo/uploads", {"adapter": "pirate"}))[0] == 404
    await admin("GET", f"/tenants/demo/uploads/{upload}")
    await confined("POST", "/tenants/demo/uploads", {"adapter": "helper"}, status=201)


async def test_an_operators_key_does_not_exist_for_its_tenants_admin(admin: AdminClient, operator: AdminClient) -> None:
    hidden = (await operator("POST", "/tenants/demo/keys", {"role": "operator"}, status=201))["id"]
    assert hidden not in [one["id"] for one in (await admin("GET", "/tenants/demo/keys"))["data"]]
    assert hidden in [one["id"] for one in (await operator("GET", "/tenants/demo/keys"))["data"]]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/rotate"), ("PATCH", "")):
        body: dict[str, str] | None = {} if method in ("POST", "PATCH") else None
        await admin(method, f"/tenants/demo/keys/{hidden}{path}", body, status=404)
    assert (await operator("GET", f"/tenants/demo/keys/{hidden}"))["revoked_at"] is None


async def test_pages_join_to_the_whole_list(admin: AdminClient, operator: AdminClient) -> None:
    for number in range(7):
        await admin("POST", "/tenants/demo/keys", {"label": str(number)}, status=201)
        await operator("POST", "/tenants", {"name": f"t{number}"}, status=201)
    for client, path in ((admin, "/tenants/demo/keys"), (operator, "/tenants"), (operator, "/audit")):
        whole = (await client("GET", f"{path}?limit=200"))["data"]
        pages: list[Any] = []
        after = ""
        while True:
            page = await client("GET", f"{path}?limit=3&after={after}")
            assert len(page["data"]) <= 3
            pages += page["data"]
            if page["next"] is None:
                break
            after = page["next"]
        assert pages == whole
        assert len(whole) > 6
    assert [one["name"] for one in (await operator("GET", "/tenants?prefix=t"))["data"]] == [f"t{n}" for n in range(7)]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=201",
        "limit=x",
        "after=!!",
        "after=e30",
        "sort=id;drop",
        "limit=1&limit=2",
        "prefix=" + "a" * 65,
    ],
)
async def test_a_query_that_means_nothing_is_refused_by_name(operator: AdminClient, query: str) -> None:
    refused = await operator("GET", f"/tenants?{query}", status=400)
    assert refused["error"]["param"] == query.partition("=")[0]


async def test_the_audit_log_says_who_what_when_and_from_where(gateway: Gateway, admin: AdminClient) -> None:
    made = await admin("POST", "/tenants/demo/keys", {"label": "ci"}, status=201)
    await admin("PATCH", f"/tenants/demo/keys/{made['id']}", {"label": "nightly"})
    await admin("PATCH", f"/tenants/demo/keys/{made['id']}", {"label": "nightly"})
    changed, created = (await admin("GET", f"/tenants/demo/audit?target=key:{made['id']}"))["data"]
    assert (created["action"], created["before"], created["after"]["label"]) == ("key.create", None, "ci")
    assert (changed["before"], changed["after"]) == ({"label": "ci"}, {"label": "nightly"})
    for entry in (created, changed):
        assert entry["actor"] == f"key:{admin.key.split('_')[1]}"
        assert (entry["role"], entry["tenant"], entry["source"]) == ("admin", "demo", "127.0.0.1")
        assert entry["request_id"].startswith("req_")
        assert datetime.now(UTC) - datetime.fromisoformat(entry["at"]) < timedelta(minutes=1)
    foreign = await admin_client(gateway, "other", Role.VIEWER)
    assert made["id"] not in (await foreign.raw("GET", "/tenants/other/audit"))[1]


async def test_me_says_what_the_key_may(gateway: Gateway) -> None:
    viewer = await admin_client(gateway, "demo", Role.VIEWER)
    assert await viewer("GET", "/me") == {
        "key": viewer.key.split("_")[1],
        "tenant": "demo",
        "role": "viewer",
        "permissions": ["read"],
        "models": None,
        "routes": None,
    }


async def test_the_quota_says_what_is_used_beside_the_limits(gateway: Gateway, operator: AdminClient) -> None:
    limits = {"requests_per_minute": 5, "concurrent_streams": 3, "tokens_per_day": 1000, "time_zone": "Asia/Tokyo"}
    await operator("PATCH", "/tenants/demo", limits)
    api = await gateway.openai()
    answer = await api.chat.completions.create(
        model="base", messages=[{"role": "user", "content": "abc"}], max_tokens=5
    )
    assert answer.usage is not None
    viewer = await admin_client(gateway, "demo", Role.VIEWER)
    quota = await viewer("GET", "/tenants/demo/quota")
    assert quota["requests_per_minute"] == {"used": 1, "limit": 5}
    assert quota["concurrent_streams"] == {"used": 0, "limit": 3}
    assert quota["tokens_per_day"] == {"used": answer.usage.total_tokens, "limit": 1000}
    assert quota["tokens_per_month"] == {"used": answer.usage.total_tokens, "limit": None}
    assert quota["adapters"]["used"] > 0
    assert quota["stored_bytes"]["used"] > 0
    assert (quota["time_zone"], quota["shadow"]) == ("Asia/Tokyo", False)


async def test_a_key_cannot_have_expired_when_it_is_made(admin: AdminClient) -> None:
    past = (datetime.now(UTC) - timedelta(minutes=1)).isoformat()
    [one, *rest] = (await admin("GET", "/tenants/demo/keys"))["data"]
    for method, path in (("POST", "/tenants/demo/keys"), ("PATCH", f"/tenants/demo/keys/{one['id']}")):
        error = (await admin(method, path, {"expires_at": past}, status=422))["error"]
        assert (error["param"], error["code"]) == ("expires_at", "in_the_past")
        assert "later than 20" in error["message"]
    assert (await admin("GET", "/tenants/demo/keys"))["data"] == [one, *rest]


@pytest.mark.parametrize("instant", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z", "1969-12-31T23:59:59Z"])
async def test_instants_at_the_ends_of_the_calendar_are_refused_by_name(operator: AdminClient, instant: str) -> None:
    refused = await operator("POST", "/tenants/demo/keys", {"expires_at": instant}, status=400)
    assert refused["error"]["param"] == "expires_at"
    for path in ("/series", "/top", "/tenants/demo/usage", "/tenants/demo/series", "/tenants/demo/top"):
        refused = await operator("GET", f"{path}?end={instant.replace('+', '%2B')}", status=400)
        assert refused["error"]["param"] == "end"
