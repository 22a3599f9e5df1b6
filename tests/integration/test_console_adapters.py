"""The console's pages about adapters, against the real gateway, its real intake, and the fake engine."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from markupsafe import escape
from sqlalchemy import delete
from yarl import URL

from stencilpress.engine.messages import AdapterSeen
from stencilpress.gateway.access import Role
from stencilpress.gateway.adapter_config import CONFIG_NAME
from stencilpress.gateway.catalog.adapters import add_version, get_adapter
from stencilpress.gateway.catalog.aliases import withdraw_canary
from stencilpress.gateway.catalog.models import VersionFilesRow
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.fakes.engine import Options
from tests.integration.admin_client import AdminClient, admin_client
from tests.integration.console_harness import Browser, running_console, signed_in
from tests.integration.gateway_harness import BASE_NAMES, EOS, VOCAB_SIZE, Gateway, new_version
from tests.integration.test_adapters_api import files, send
from tests.unit.test_archive import tar_bytes

B = "b" * 64
HOME = "/console/t/demo"
LIST = f"{HOME}/adapters"
PIRATE = f"{LIST}/pirate"
HELPER = f"{LIST}/helper"
API = "/tenants/demo/adapters"
HOSTILE = "<img src=x onerror=alert(1)>"
PAGES = (
    LIST,
    f"{LIST}?deleted=1&sort=newest&q=p",
    PIRATE,
    f"{PIRATE}?deleted=1",
    f"{PIRATE}/aliases",
    f"{PIRATE}/aliases/prod/canary",
    f"{PIRATE}/smoke",
    f"{PIRATE}/settings",
    f"{PIRATE}/versions/1",
)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """Adapter ``pirate`` has versions 1 (prod) and 2, whose files are not there and which answers backwards."""
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=512, reversing=frozenset({B}))
    async with running_console(tmp_path, options=options) as running:
        yield running


@pytest.fixture
async def admin(gateway: Gateway) -> Browser:
    return await signed_in(gateway, Role.ADMIN, email="ada@example.com")


@pytest.fixture
async def api(gateway: Gateway) -> AdminClient:
    return await admin_client(gateway, "demo", Role.ADMIN)


async def upload(api: AdminClient, seed: int = 0, name: str = "helper", **config: object) -> None:
    data = tar_bytes(files(seed, **config))
    status, answer = await send(api, f"{API}/{name}/versions", data, "application/x-tar")
    assert status == 201, answer


async def prod_of(api: AdminClient, name: str = "pirate") -> tuple[int, tuple[int, int] | None]:
    """Where prod points, and its canary as version and percentage."""
    shown = await api("GET", f"{API}/{name}/aliases/prod")
    canary = shown["canary"]
    return shown["version"], (canary["version"], canary["percent"]) if canary else None


async def etag_of(api: AdminClient, name: str = "pirate") -> str:
    return str((await api("GET", f"{API}/{name}/aliases/prod"))["etag"])


# --- who sees what -------------------------------------------------------------------------------------------


async def test_every_page_is_there_for_every_role(gateway: Gateway) -> None:
    for role in (Role.OPERATOR, Role.ADMIN, Role.VIEWER):
        browser = await signed_in(gateway, role)
        for path in PAGES:
            page = await browser.get(path)
            changes = page.text.count('method="post"') - page.text.count('action="/console/sign-out"')
            if role is Role.VIEWER:
                assert changes == 0, f"{path} has a button that would be refused"
        await browser.get("/console/adapters", status=200 if role is Role.OPERATOR else 403)
        await browser.get(f"{HOME}/upload", status=403 if role is Role.VIEWER else 200)


async def test_what_is_foreign_looks_like_what_does_not_exist(gateway: Gateway, admin: Browser) -> None:
    stranger = await signed_in(gateway, Role.ADMIN, "other")
    nothing = (await stranger.get("/console/t/other/adapters/nothing", status=404)).words
    for path in PAGES:
        assert (await stranger.get(path, status=404)).words == nothing, path
    for path in (f"{LIST}/nothing", f"{PIRATE}/versions/9", f"{PIRATE}/versions/x", f"{PIRATE}/aliases/new/canary"):
        await admin.get(path, status=404)
    for path in ("/aliases", "/aliases/prod/rollback", "/aliases/prod/canary", "/delete", "/versions/1/smoke", "/keep"):
        await stranger.submit(PIRATE + path, 404, alias="prod", version="2")
    assert (
        await get_adapter(gateway.services.db, (await get_tenant(gateway.services.db, "demo")).id, "pirate")
    ).aliases


async def test_a_viewer_may_not_change_anything(gateway: Gateway, api: AdminClient) -> None:
    viewer = await signed_in(gateway, Role.VIEWER)
    for path in (
        "/aliases",
        "/aliases/prod/rollback",
        "/delete",
        "/smoke",
        "/versions/2/delete",
        "/versions/1/defaults",
    ):
        await viewer.submit(PIRATE + path, 403, alias="prod", version="2")
    assert await prod_of(api) == (1, None)


async def test_what_people_typed_is_inert(gateway: Gateway, admin: Browser, api: AdminClient) -> None:
    await upload(api, revision=HOSTILE)
    await upload(api, seed=1, revision="main")
    await api("PUT", f"{API}/helper/aliases/prod", {"version": 2, "expected_version": 1, "reason": HOSTILE})
    await api("PUT", f"{API}/helper/versions/1/defaults", {"system_prompt": HOSTILE})
    prompts = {"messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 3, "must_match": HOSTILE}
    await api("PUT", f"{API}/helper/smoke-prompts", {"prompts": [prompts]})
    await api("POST", f"{API}/helper/versions/1/smoke")
    for path in ("/aliases", "/versions/1", "/versions/1?other=2", "/smoke"):
        page = await admin.get(HELPER + path)
        assert HOSTILE not in page.text, path
        assert str(escape(HOSTILE)) in page.text, path
    listed = await admin.get(f"{LIST}?q={quote(HOSTILE)}")
    assert HOSTILE not in listed.text
    refused = await admin.submit(f"{PIRATE}/aliases", 400, alias=HOSTILE, version="1")
    assert HOSTILE not in refused.text


# --- aliases -------------------------------------------------------------------------------------------------


async def test_a_version_is_promoted_and_taken_back(admin: Browser, api: AdminClient) -> None:
    seen = await etag_of(api)
    await admin.submit(f"{PIRATE}/aliases", alias="prod", version="2", etag=seen, reason="fewer refusals")
    assert await prod_of(api) == (2, None)
    page = await admin.get(f"{PIRATE}/aliases")
    assert "fewer refusals" in page.words
    assert "ada@example.com" in page.words
    assert "Roll back to @1" in page.words
    answer = await admin.submit(f"{PIRATE}/aliases/prod/rollback", etag=await etag_of(api))
    assert answer.location == f"{PIRATE}/aliases"
    assert "prod points at @1 again." in (await admin.get(answer.location)).words
    assert await prod_of(api) == (1, None)


async def test_somebody_who_was_faster_is_named(admin: Browser, api: AdminClient) -> None:
    seen = await etag_of(api)
    await api("PUT", f"{API}/pirate/aliases/prod", {"version": 2, "expected_version": 1, "reason": "hotfix"})
    page = await admin.submit(f"{PIRATE}/aliases", 409, alias="prod", version="1", etag=seen, reason="mine")
    assert "Somebody was faster" in page.words
    assert "“hotfix”" in page.words
    assert 'value="mine"' in page.text, "what was typed is kept"
    assert str(escape(await etag_of(api))) in page.text, "another try is made with what holds now"
    await admin.submit(f"{PIRATE}/aliases/prod/rollback", etag=seen)
    assert "Nothing was rolled back" in (await admin.get(f"{PIRATE}/aliases")).words
    assert await prod_of(api) == (2, None)


async def test_an_alias_is_made_and_removed(admin: Browser, api: AdminClient) -> None:
    await admin.submit(f"{PIRATE}/aliases", alias="staging", version="2")
    assert "staging" in (await admin.get(PIRATE)).words
    again = await admin.submit(f"{PIRATE}/aliases", 409, alias="staging", version="1")
    assert "Somebody was faster" in again.words
    bad = await admin.submit(f"{PIRATE}/aliases", 400, alias="9x", version="1")
    assert "is not allowed; use 1 to 63 of" in bad.words
    await admin.submit(f"{PIRATE}/aliases/staging/remove")
    assert (await api.raw("GET", f"{API}/pirate/aliases/staging"))[0] == 404


async def test_smoke_prompts_stand_before_prod(admin: Browser, api: AdminClient) -> None:
    fields: Any = {"p0.m0.role": "user", "p0.m0.content": "abc", "p0.max_tokens": "3", "p0.must_match": "^xyz$"}
    await admin.submit(f"{PIRATE}/smoke", **fields)
    page = await admin.submit(f"{PIRATE}/aliases", 422, alias="prod", version="2", etag=await etag_of(api))
    assert "has not passed the smoke prompts" in page.words
    assert "It does not match what it must." in page.words
    assert "cba" in page.words, "what it answered"
    assert "failed" in (await admin.get(PIRATE)).words
    assert await prod_of(api) == (1, None)
    await admin.submit(f"{PIRATE}/smoke", **{**fields, "p0.must_match": "^cba$"})
    await admin.submit(f"{PIRATE}/aliases", alias="prod", version="2", etag=await etag_of(api))
    assert await prod_of(api) == (2, None)
    await admin.submit(f"{PIRATE}/versions/1/smoke")
    version = await admin.get(f"{PIRATE}/versions/1")
    assert "The base answers the same." in version.words


async def test_prompts_are_edited(admin: Browser, api: AdminClient) -> None:
    edited: Any = {
        "p0.m0.role": "system",
        "p0.m0.content": "Be brief.",
        "p0.m1.role": "user",
        "p0.m1.content": "one\r\ntwo",
        "p0.m2.content": "",
        "p0.max_tokens": "16",
        "p0.must_match": "",
        "p3.m0.role": "user",
        "p3.m0.content": "hello",
        "p3.max_tokens": "",
        "p7.m0.content": " ",
    }
    await admin.submit(f"{PIRATE}/smoke", **edited)
    suite = await api("GET", f"{API}/pirate/smoke-prompts")
    assert suite["prompts"] == [
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}],
            "max_tokens": 16,
        },
        {"messages": [{"role": "user", "content": "hello"}]},
    ]
    broken: Any = {"p0.m0.role": "user", "p0.m0.content": "kept", "p0.must_match": "["}
    page = await admin.submit(f"{PIRATE}/smoke", 400, **broken)
    assert "is not a regular expression" in page.words
    assert "kept" in page.words
    assert (await api("GET", f"{API}/pirate/smoke-prompts"))["revision"] == suite["revision"]
    await admin.submit(f"{PIRATE}/smoke")
    assert (await api("GET", f"{API}/pirate/smoke-prompts"))["revision"] is None


# --- canaries ------------------------------------------------------------------------------------------------


async def test_a_canary_starts_grows_and_becomes_prod(admin: Browser, api: AdminClient) -> None:
    canary = f"{PIRATE}/aliases/prod/canary"
    started: Any = {"version": "2", "percent": "5", "stable": "1"}
    await admin.submit(canary, etag=await etag_of(api), **started)
    assert await prod_of(api) == (1, (2, 5))
    page = await admin.get(canary)
    assert "@2 gets 5 % of the users" in page.words
    assert "Promote @2" in page.words
    await admin.submit(canary, etag=await etag_of(api), **{**started, "percent": "50"})
    assert await prod_of(api) == (1, (2, 50))
    figures = await admin.get(f"{canary}/figures?range=6h")
    assert "First token, p99" in figures.words
    await admin.submit(f"{canary}/promote", etag=await etag_of(api), version="2")
    assert await prod_of(api) == (2, None)
    assert "canary promoted" in (await admin.get(f"{PIRATE}/aliases")).words


async def test_a_canary_is_aborted(admin: Browser, api: AdminClient) -> None:
    canary = f"{PIRATE}/aliases/prod/canary"
    await admin.submit(canary, etag=await etag_of(api), version="2", percent="5", stable="1")
    stale = await etag_of(api)
    await api(
        "PUT",
        f"{API}/pirate/aliases/prod",
        {"version": 1, "canary": {"version": 2, "percent": 6}, "expected_version": 1},
    )
    page = await admin.submit(f"{canary}/abort", 409, etag=stale, version="1")
    assert "Somebody was faster" in page.words
    await admin.submit(f"{canary}/abort", etag=await etag_of(api), version="1")
    assert await prod_of(api) == (1, None)


async def test_a_guard_is_set_in_percent_and_takes_back(gateway: Gateway, admin: Browser, api: AdminClient) -> None:
    canary = f"{PIRATE}/aliases/prod/canary"
    fields: Any = {"version": "2", "percent": "5", "stable": "1", "guarded": "1", "window_s": "1800"}
    limits: Any = {"max_error_share": "2.5", "max_ttft_ratio": "", "min_requests": "20"}
    await admin.submit(canary, etag=await etag_of(api), **fields, **limits)
    guard = (await api("GET", f"{API}/pirate/aliases/prod"))["canary"]["guard"]
    assert guard == {"max_error_share": 0.025, "max_ttft_ratio": None, "min_requests": 20, "window_s": 1800}
    page = await admin.get(canary)
    assert 'name="max_error_share" type="number" value="2.5"' in page.text
    assert "Taken back if more than 2.5 % of its requests fail" in page.words
    bad: Any = {**limits, "max_error_share": "250"}
    refused = await admin.submit(canary, 400, etag=await etag_of(api), **fields, **bad)
    assert "expected 0 to 100" in refused.words
    assert 'value="250"' in refused.text
    empty: Any = dict.fromkeys(limits, "")
    refused = await admin.submit(canary, 400, etag=await etag_of(api), **fields, **empty)
    assert "sets no limit" in refused.words
    await admin.submit(canary, etag=await etag_of(api), **fields, **limits)
    db, etag = gateway.services.db, await etag_of(api)
    demo = await get_tenant(db, "demo")
    await withdraw_canary(db, demo.id, "pirate", "prod", move_id=int(etag.strip('"')), reason="canary 2: 9 % failed")
    taken = await admin.get(canary)
    assert "The canary was taken back by its guard" in taken.words
    assert "9 % failed" in taken.words
    await admin.submit(canary, etag=await etag_of(api), **{**fields, "guarded": ""})
    assert (await api("GET", f"{API}/pirate/aliases/prod"))["canary"]["guard"] is None


async def test_a_canary_that_cannot_be_is_explained(admin: Browser, api: AdminClient) -> None:
    for version, percent, text in (("2", "0", ">= 1"), ("2", "x", "int"), ("1", "5", "own version"), ("", "5", "int")):
        fields: Any = {"version": version, "percent": percent, "stable": "1"}
        page = await admin.submit(f"{PIRATE}/aliases/prod/canary", 400, etag=await etag_of(api), **fields)
        assert text in page.words
    assert await prod_of(api) == (1, None)


# --- versions ------------------------------------------------------------------------------------------------


async def test_a_version_shows_what_it_is(admin: Browser, api: AdminClient) -> None:
    await upload(api, r=4)
    page = await admin.get(f"{HELPER}/versions/1")
    found = await api("GET", f"{API}/helper/versions/1")
    assert found["digest"] in page.words
    assert json.loads(files()[CONFIG_NAME])["base_model_name_or_path"] in page.words
    assert "q_proj 2 4" in page.words, "projection, layers, rank"
    gone = await admin.get(f"{PIRATE}/versions/1")
    assert "not within reach of this server" in gone.words


async def test_a_version_gives_its_files_back(gateway: Gateway, admin: Browser, api: AdminClient) -> None:
    await upload(api)
    page = await admin.get(f"{HELPER}/versions/1")
    links = re.findall(r'<a href="([^"]+/files/[^"]+)" download>', page.text)
    assert links == [f"{HELPER}/versions/1/files/{name}" for name in (CONFIG_NAME, WEIGHTS_NAME)]
    config = await admin.get(links[0])
    assert json.loads(config.text) == (await api("GET", f"{API}/helper/versions/1/contents"))["config"]
    assert config.headers["Content-Disposition"] == f'attachment; filename="{CONFIG_NAME}"'
    viewer = await signed_in(gateway, Role.VIEWER)
    assert "/files/" not in (await viewer.get(f"{HELPER}/versions/1")).text
    await viewer.get(links[0], status=403)
    await admin.get(f"{HELPER}/versions/1/files/catalog.db", status=404)
    await admin.get(f"{HELPER}/versions/9/files/{CONFIG_NAME}", status=404)
    gone = await admin.get(f"{PIRATE}/versions/1/files/{CONFIG_NAME}", status=303)
    assert gone.location == f"{PIRATE}/versions/1"
    assert "not kept when the version was added" in (await admin.get(gone.location)).words


async def test_a_file_has_no_head_alone(gateway: Gateway, admin: Browser, api: AdminClient) -> None:
    """What came behind it would be taken for the next answer on the connection, or be read for nothing."""
    await upload(api)
    path = f"{HELPER}/versions/1/files/{CONFIG_NAME}"
    cookies = admin.http.cookie_jar.filter_cookies(URL(gateway.url + path))
    cookie = "; ".join(f"{one.key}={one.value}" for one in cookies.values())
    url = URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"HEAD {path} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nCookie: {cookie}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    answer, _, behind = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert (answer.split(b"\r\n")[0], behind) == (b"HTTP/1.1 405 Method Not Allowed", b"")


async def test_a_version_whose_config_was_not_kept_says_so(gateway: Gateway, admin: Browser, api: AdminClient) -> None:
    await upload(api)
    await upload(api, seed=1)
    async with gateway.services.db.write() as session:
        await session.execute(delete(VersionFilesRow).where(VersionFilesRow.version == 1))
    page = await admin.get(f"{HELPER}/versions/1?other=2")
    assert "The config of this version was not kept" in page.words
    assert "The configs cannot be compared" in page.words
    assert "/files/" not in page.text
    assert "Config and weights do not differ" not in (await admin.get(f"{HELPER}/versions/1?other=1")).words


async def test_versions_are_compared(admin: Browser, api: AdminClient) -> None:
    await upload(api, seed=1)
    await upload(api, seed=2, lora_alpha=16)
    page = await admin.get(f"{HELPER}/versions/1?other=2")
    assert "lora_alpha 8 16" in page.words
    assert "How far each delta moved" in page.words
    assert page.text.count("<rect width=") >= 4
    await admin.get(f"{HELPER}/versions/1?other=9", status=404)
    bad = await admin.get(f"{HELPER}/versions/1?other=x")
    assert "other" in bad.words
    same = await admin.get(f"{HELPER}/versions/1?other=1")
    assert "do not differ" in same.words


async def test_defaults_are_set_and_taken_away(admin: Browser, api: AdminClient) -> None:
    path = f"{PIRATE}/versions/1/defaults"
    await admin.submit(path, system_prompt="Be brief.", temperature="0.5", top_k="", min_p="0.05")
    shown = await api("GET", f"{API}/pirate/versions/1")
    assert shown["defaults"] == {"system_prompt": "Be brief.", "temperature": 0.5, "min_p": 0.05}
    page = await admin.submit(path, 400, system_prompt="kept", temperature="3", top_p="x")
    assert "kept" in page.text
    assert page.text.count('aria-invalid="true"') == 2
    await admin.submit(path, system_prompt="", temperature="")
    assert (await api("GET", f"{API}/pirate/versions/1"))["defaults"] == {}


async def test_versions_and_adapters_go_and_come_back(gateway: Gateway, admin: Browser, api: AdminClient) -> None:
    await admin.submit(f"{PIRATE}/versions/1/delete")
    assert "points at" in (await admin.get(f"{PIRATE}/versions/1")).words, "prod is version 1"
    await admin.submit(f"{PIRATE}/versions/2/delete")
    assert "/versions/2" not in (await admin.get(PIRATE)).text
    assert "@2 bbbbbbbb deleted" in (await admin.get(f"{PIRATE}?deleted=1")).words
    assert "This version was deleted" in (await admin.get(f"{PIRATE}/versions/2")).words
    await admin.submit(f"{PIRATE}/versions/2/restore")
    assert "@2" in (await admin.get(PIRATE)).words

    answer = await admin.submit(f"{PIRATE}/delete")
    listed = await admin.get(answer.location)
    assert "pirate is out of use" in listed.words
    assert "pirate" not in (await admin.get(LIST)).words
    for path in ("", "/aliases", "/smoke", "/settings", "/versions/1"):
        assert "This adapter was deleted" in (await admin.get(PIRATE + path)).words
    await admin.submit(f"{PIRATE}/restore")
    assert await prod_of(api) == (1, None)


# --- what operators decide -----------------------------------------------------------------------------------


async def test_operators_share_and_pin(gateway: Gateway, admin: Browser) -> None:
    operator = await signed_in(gateway, Role.OPERATOR, "other")
    await operator.submit(f"{PIRATE}/shares", guest="other")
    page = await operator.get(f"{PIRATE}/settings")
    assert "Take back" in page.words
    missing = await operator.submit(f"{PIRATE}/shares", 404, guest="nobody")
    assert "does not exist" in missing.words
    await operator.submit(f"{PIRATE}/shares/other/remove")
    await operator.submit(f"{PIRATE}/keep", kept="pin")
    assert "Pinned" in (await admin.get(f"{PIRATE}/settings")).words
    await operator.submit(f"{PIRATE}/keep", kept="release")
    for path in ("/shares", "/shares/other/remove", "/keep"):
        await admin.submit(PIRATE + path, 403, guest="other", kept="pin")
    own = await admin.get(f"{PIRATE}/settings")
    assert "Shared with" not in own.words
    assert "An operator can pin" in own.words


# --- lists ---------------------------------------------------------------------------------------------------


async def test_a_list_is_searched_ordered_and_paged(gateway: Gateway, admin: Browser) -> None:
    db, base = gateway.services.db, BaseNames.of(BASE_NAMES)
    demo, other = await get_tenant(db, "demo"), await get_tenant(db, "other")
    for index in range(60):
        await add_version(db, demo.id, f"support-{index:02}", new_version("c"), base)
    await add_version(db, other.id, "theirs", new_version("d"), base)
    first = await admin.get(f"{LIST}?q=support")
    assert "support-49" in first.words
    assert "support-50" not in first.words
    assert "pirate" not in first.words
    assert "theirs" not in (await admin.get(LIST)).words
    href = html.unescape(first.text.split('rel="next"')[0].rpartition('href="')[2].partition('"')[0])
    second = await admin.get(href)
    assert "support-59" in second.words
    assert 'rel="next"' not in second.text
    newest = (await admin.get(f"{LIST}?sort=newest")).words
    assert newest.index("support-59") < newest.index("support-58")
    assert "No adapter is like this" in (await admin.get(f"{LIST}?q=zzz")).words
    assert (await admin.request("GET", f"{LIST}?after=nonsense")).status == 400
    operator = await signed_in(gateway, Role.OPERATOR)
    everything = await operator.get("/console/adapters?sort=newest")
    assert "theirs" in everything.words
    assert 'href="/console/t/other/adapters/theirs"' in everything.text


async def test_a_tenant_without_adapters_is_told_how_to_begin(gateway: Gateway) -> None:
    page = await (await signed_in(gateway, Role.ADMIN, "other")).get("/console/t/other/adapters")
    assert "No adapters yet" in page.words
    assert f"{gateway.url}/admin/api/v1/tenants/other/adapters/NAME/versions" in page.words


async def test_tiers_are_told_of_ones_own_alone(gateway: Gateway, admin: Browser) -> None:
    await gateway.post("/v1/completions", {"model": "pirate", "prompt": "abc", "max_tokens": 3})
    digests = f"{'a' * 64},{B}"
    mine = json.loads((await admin.get(f"{HOME}/tiers?digests={digests}")).text)
    theirs = await (await signed_in(gateway, Role.ADMIN, "other")).get(f"/console/t/other/tiers?digests={digests}")
    assert json.loads(theirs.text) == {}
    assert all(one["tier"] in {"disk", "fetching", "host", "loading", "hbm"} for one in mine.values())


async def test_a_version_that_engines_cannot_load_is_marked(gateway: Gateway, admin: Browser) -> None:
    """On its page, in lists, and by what keeps these up to date."""
    pages = [f"{PIRATE}/versions/2", PIRATE]
    broken = AdapterSeen(B, 1, "disk", 0, 0, False, 0, 0, 0, 1, 0, 1, 0.1, 0, 0.0, "the file <b>is cut</b> short")
    gateway.engine.adapters = [broken]
    first = (await admin.get(pages[0])).text
    assert "The last try to load this version failed: the file &lt;b&gt;is cut&lt;/b&gt; short." in first
    for page in pages:
        assert "Cannot be loaded" in (await admin.get(page)).words
    told = json.loads((await admin.get(f"{HOME}/tiers?digests={B}")).text)
    assert told == {B: {"tier": "disk", "pinned": False, "error": "the file <b>is cut</b> short"}}


# --- uploads -------------------------------------------------------------------------------------------------


async def test_the_upload_page_says_what_is_accepted(gateway: Gateway, admin: Browser) -> None:
    page = await admin.get(f"{HOME}/upload?adapter=pirate")
    assert "The upload becomes its next version." in page.words
    assert f"{gateway.url}/admin/api/v1/tenants/demo/adapters/pirate/versions" in page.words
    strange = await admin.get(f"{HOME}/upload?adapter={quote(HOSTILE)}")
    assert HOSTILE not in strange.text
    assert "onerror" not in strange.words
