"""Hostile visitors of the console: odd bytes, ends of the calendar, streams and sockets that outlive a session, links
that outlive a role, and one tenant that takes what all need."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import pytest
import pytest_asyncio

from stencilpress.gateway import change_limit
from stencilpress.gateway.access import Role
from stencilpress.gateway.api import ws
from stencilpress.gateway.api.admin.router import OPERATIONS
from stencilpress.gateway.catalog.credentials import revoke_key
from stencilpress.gateway.catalog.users import disable_user
from stencilpress.gateway.keys import issue_key
from stencilpress.gateway.live import MAX_TENANT_LISTENERS
from stencilpress.web import chat_socket
from stencilpress.web.headers import HEADERS
from tests.integration.console_harness import PASSWORD, Browser, make_user, running_console, signed_in
from tests.integration.gateway_harness import Gateway
from tests.integration.test_gateway_ws import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENDLESS = {"model": "pirate", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 450, "ignore_eos": True}
LIVE = ("/console/t/demo/live", "/console/api/tenants/demo/live")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(shared: Gateway) -> Browser:
    return await signed_in(shared, Role.ADMIN)


def cursor(position: bytes) -> str:
    return base64.urlsafe_b64encode(position).decode().rstrip("=")


async def raw(gateway: Gateway, head: bytes, body: bytes = b"") -> bytes:
    """The whole answer to a request that no client would send."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lengths = b"Host: %b:%b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (
        host.encode(),
        port.encode(),
        len(body),
    )
    writer.write(head + lengths + body)
    answer = await asyncio.wait_for(reader.read(), 45)
    writer.close()
    return answer


@pytest.mark.parametrize("query", ["last=0001-01-01", "last=9999-12-31", "first=9999-12-30&last=9999-12-31"])
async def test_days_at_the_ends_of_the_calendar_are_refused(admin: Browser, query: str) -> None:
    refused = await admin.get(f"/console/api/tenants/demo/usage/days?{query}", status=400)
    assert json.loads(refused.text)["error"]["param"] in ("first", "last")


async def test_no_cursor_is_a_fault_of_the_server(shared: Gateway) -> None:
    operator = await signed_in(shared, Role.OPERATOR)
    positions = (
        b"%d" % 2**70,
        b"%d" % -(2**70),
        b'"\\u0000"',
        b"1e400",
        b'["0001-01-01T00:00:00+23:59","x"]',
        b'"\\ud800"',
    )
    lists = [one for one in OPERATIONS if one.query is not None and "after" in one.query.__struct_fields__]
    assert len(lists) > 8
    for operation in lists:
        path = re.sub(
            r"\{(\w+)\}", lambda part: {"tenant": "demo", "adapter": "pirate"}.get(part[1], "prod"), operation.path
        )
        for position in positions:
            answer = await operator.request("GET", f"/console/api{path}?after={cursor(position)}")
            assert answer.status in (200, 400), (path, position, answer.text)


async def test_a_text_with_nul_is_refused_by_name(admin: Browser) -> None:
    refused = await admin.get("/console/api/tenants/demo/audit?target=%00", status=400)
    assert json.loads(refused.text)["error"]["param"] == "target"
    body = {"version": 1, "expected_version": 0, "reason": "a\0b"}
    refused_body = await admin.api("PUT", "/tenants/demo/adapters/pirate/aliases/odd", body, status=400)
    assert refused_body["error"]["param"] == "reason"


@pytest.mark.parametrize(
    "header",
    [b"Cookie: stencilpress-flash=a.\xff", b"Cookie: stencilpress-session=\xff", b"Origin: \xff", b"User-Agent: \xff"],
)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
async def test_bytes_that_are_no_text_break_no_page(shared: Gateway, method: bytes, header: bytes) -> None:
    answer = await raw(shared, b"%b /console/sign-in HTTP/1.1\r\n%b\r\n" % (method, header))
    assert answer.startswith(b"HTTP/1.1 200" if method == b"GET" else b"HTTP/1.1 403"), answer[:200]
    assert b"Content-Security-Policy" in answer


@pytest.mark.parametrize("body", ["####", "bm9wZQ", "W1sxLDJdXQ", "a"])
async def test_a_flash_that_its_visitor_signed_is_none(shared: Gateway, body: str) -> None:
    browser = Browser(shared)
    signature = hmac.digest((await browser.csrf()).encode(), b"flash" + body.encode(), hashlib.sha256).hex()
    browser.http.cookie_jar.update_cookies({"stencilpress-flash": f"{body}.{signature}"})
    await browser.get("/console/sign-in")


async def test_a_browser_with_an_odd_name_signs_in(shared: Gateway) -> None:
    user, browser = await make_user(shared.services.db, Role.VIEWER), Browser(shared)
    token = await browser.csrf()
    [visit] = [cookie.value for cookie in browser.http.cookie_jar if cookie.key == "stencilpress-visit"]
    form = urlencode({"csrf": token, "email": user.email, "password": PASSWORD}).encode()
    head = (
        b"POST /console/sign-in HTTP/1.1\r\nUser-Agent: \xff\xfe\r\nCookie: stencilpress-visit=%b\r\n"
        b"Content-Type: application/x-www-form-urlencoded\r\n" % visit.encode()
    )
    answer = await raw(shared, head, form)
    assert answer.startswith(b"HTTP/1.1 303"), answer[:300]


@pytest.mark.parametrize("path", [*LIVE, "/console/live", "/console/chat/ws", "/v1/chat/ws"])
async def test_what_streams_has_no_head_alone(shared: Gateway, admin: Browser, path: str) -> None:
    """A body behind the answer to HEAD would be taken for the next answer."""
    answer = await admin.request("HEAD", path, headers={"Origin": shared.url})
    assert answer.status == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/console/static/../t/demo/keys", "/console/static/%2e%2e/t/demo/keys", "/console/static/x/..%2f..%2fapp.py"),
        *("/%63onsole/t/demo/keys", "/console%2Ft/demo/keys", "/console/t/demo;x/keys", "/console//t/demo/keys"),
        *(
            "/console/t/demo%2F..%2Fother/keys",
            "/console/t/%C0%AE%C0%AE/keys",
            "/console/api/nothing",
            "/console/static/",
        ),
    ],
)
async def test_no_spelling_of_a_path_gets_past_the_guard(shared: Gateway, path: str) -> None:
    answer = await raw(shared, b"GET %b HTTP/1.1\r\n" % path.encode())
    assert answer.split(b" ", 2)[1] in (b"303", b"404"), answer[:200]
    for name in HEADERS:
        assert name.encode() in answer, (path, name)


@pytest.mark.parametrize("path", LIVE)
async def test_a_stream_ends_with_its_session(shared: Gateway, path: str) -> None:
    browser = await signed_in(shared, Role.VIEWER)
    assert browser.user is not None
    async with browser.http.get(f"{shared.url}{path}") as answer:
        assert answer.status == 200
        await answer.content.readline()
        await disable_user(shared.services.db, browser.user.public_id)
        await shared.services.changes.poll()
        async with asyncio.timeout(45):
            await answer.content.read()


async def test_a_socket_ends_with_its_session_or_key_and_so_does_what_runs_on_it(
    shared: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ws, "WATCH_S", 0.05)
    browser, db = await signed_in(shared, Role.ADMIN), shared.services.db
    assert browser.user is not None
    key = await issue_key(db, "demo")
    sockets = [
        await browser.http.ws_connect(f"{shared.url}/console/chat/ws", headers={"Origin": shared.url}),
        await browser.http.ws_connect(f"{shared.url}/v1/chat/ws", headers={"Authorization": f"Bearer {key.token}"}),
    ]
    for socket in sockets:
        await socket.send_str(json.dumps({"type": "response.create", "response": ENDLESS}))
        for kind in ("session.created", "response.created"):
            assert json.loads(await socket.receive_str(timeout=45))["type"] == kind
    ends = asyncio.gather(*map(last_error, sockets))
    await disable_user(db, browser.user.public_id)
    await revoke_key(db, key.key.public_id)
    await shared.services.changes.poll()
    assert await ends == ["signed_out", "invalid_api_key"]
    assert [socket.close_code for socket in sockets] == [1008, 1008]
    await eventually(lambda: not any(shared.services.engine.open_requests))


async def last_error(socket: aiohttp.ClientWebSocketResponse) -> str:
    """The code of the error before the connection's end."""
    code = ""
    async with asyncio.timeout(45):
        async for message in socket:
            event = json.loads(message.data)
            code = event["error"]["code"] if event["type"] == "error" else code
    return code


async def test_one_tenants_viewers_do_not_take_the_live_pictures_of_others(shared: Gateway) -> None:
    viewer = await signed_in(shared, Role.VIEWER)
    held = [await viewer.http.get(f"{shared.url}{LIVE[0]}") for _ in range(MAX_TENANT_LISTENERS)]
    assert {answer.status for answer in held} == {200}
    await viewer.get(LIVE[0], status=503)
    await (await signed_in(shared, Role.VIEWER, "other")).get("/console/t/other/live")
    await (await signed_in(shared, Role.OPERATOR)).get("/console/live")
    for answer in held:
        answer.close()


async def test_a_link_from_before_a_promotion_does_not_lead_to_the_new_role(shared: Gateway, admin: Browser) -> None:
    """Else an admin would keep a link, wait until an operator promotes its user, and become an operator."""
    issued = await admin.submit("/console/t/demo/members", 200, email="later@example.com", role="viewer")
    found = re.search(r"/console/setup/[\w-]{43}", issued.text)
    assert found
    await Browser(shared).get(found[0])
    members = await admin.get("/console/t/demo/members")
    user = re.search(r"later@example\.com.*?/members/(\w{12})/", members.text, re.DOTALL)
    assert user
    operator = await signed_in(shared, Role.OPERATOR)
    await operator.submit(f"/console/t/demo/members/{user[1]}/role", role="operator")
    await Browser(shared).get(found[0], status=404)


async def test_one_of_several_who_use_a_link_at_once_sets_the_password(shared: Gateway, admin: Browser) -> None:
    issued = await admin.submit("/console/t/demo/members", 200, email="race@example.com", role="viewer")
    found = re.search(r"/console/setup/[\w-]{43}", issued.text)
    assert found

    async def use(password: str) -> int:
        browser = Browser(shared)
        form = {"csrf": await browser.csrf(), "password": password, "repeated": password}
        return (await browser.request("POST", found[0], data=form)).status

    assert sorted(await asyncio.gather(*(use(f"{PASSWORD} {i}") for i in range(2)))) == [303, 404]


async def test_the_audit_log_of_a_tenant_does_not_tell_of_operators(shared: Gateway) -> None:
    operator, viewer = await signed_in(shared, Role.OPERATOR), await signed_in(shared, Role.VIEWER)
    assert operator.user is not None
    assert viewer.user is not None
    key = await issue_key(shared.services.db, "demo", "root", role=Role.OPERATOR)
    await operator.submit(f"/console/t/demo/members/{viewer.user.public_id}/reset", 200)
    path = "/tenants/demo/audit?limit=200"
    mine, theirs = [(await who.api("GET", path))["data"] for who in (viewer, operator)]
    hidden = {f"user:{operator.user.public_id}", f"key:{key.key.public_id}"}
    assert hidden <= {one["target"] for one in theirs}
    assert hidden.isdisjoint(one["target"] for one in mine)
    [sent] = [one for one in mine if one["action"] == "user.reset_link" and one["actor"].endswith(operator.user.email)]
    assert sent["target"] == f"user:{viewer.user.public_id}", "what is done to the tenant it sees"
    assert {one["source"] for one in mine if one["role"] == "operator"} == {""}
    assert {one["source"] for one in mine if one["role"] == "viewer"} == {"127.0.0.1"}


async def test_a_flood_of_changes_is_refused_and_others_go_on(shared: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    flooding, other = await signed_in(shared, Role.ADMIN, "other"), await signed_in(shared, Role.ADMIN)
    operator = await signed_in(shared, Role.OPERATOR, "other")
    monkeypatch.setattr(change_limit, "MAX_CHANGES", 3)
    shared.services.change_limit._counts.clear()
    for _ in range(3):
        await flooding.api("POST", "/tenants/other/keys", {"label": "more"}, status=201)
    refused = await flooding.api("POST", "/tenants/other/keys", {"label": "more"}, status=429)
    assert refused["error"]["dimension"] == "changes_per_minute"
    assert 0 < refused["error"]["retry_after_ms"] <= 60_000
    page = await flooding.submit("/console/t/other/members", 429, email="more@example.com", role="viewer")
    assert "changes a minute" in page.words
    await flooding.get("/console/t/other/keys")
    await operator.api("POST", "/tenants/other/keys", {"label": "operator's"}, status=201)
    await other.api("POST", "/tenants/demo/keys", {"label": "another tenant's"}, status=201)
    shared.services.change_limit._counts.clear()


async def test_who_asks_for_addresses_is_slow_and_seen(shared: Gateway) -> None:
    """That an address is taken is all that an admin learns of other tenants, and operators learn of it."""
    asking, other = await signed_in(shared, Role.ADMIN, "other"), await signed_in(shared, Role.VIEWER)
    operator = await signed_in(shared, Role.OPERATOR, "other")
    assert other.user is not None
    assert asking.user is not None
    members, email = "/console/t/other/members", other.user.email
    shared.services.change_limit._counts.clear()
    most = change_limit.MAX_CHANGES // (change_limit.INVITATION_COST + 1)  # the form itself is a change
    for _ in range(most):
        await asking.submit(members, 409, email=email, role="viewer")
    assert "changes a minute" in (await asking.submit(members, 429, email=email, role="viewer")).words
    assert (await operator.submit(members, 409, email=email, role="viewer")).status == 409
    shared.services.change_limit._counts.clear()
    path = f"/audit?target=user:{email}&action=user.address_taken&actor=user:{asking.user.email}"
    assert len((await operator.api("GET", path))["data"]) == most
    assert (await asking.api("GET", "/tenants/other/audit?action=user.address_taken"))["data"] == []


async def test_a_user_has_so_many_chats_open(shared: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_socket, "MAX_SOCKETS", 2)
    browser = await signed_in(shared, Role.ADMIN)

    async def connect() -> aiohttp.ClientWebSocketResponse:
        return await browser.http.ws_connect(f"{shared.url}/console/chat/ws", headers={"Origin": shared.url})

    first, second = await connect(), await connect()
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await connect()
    assert refused.value.status == 503
    await first.close()
    async with asyncio.timeout(45):
        while True:  # the server notices by itself
            try:
                third = await connect()
                break
            except aiohttp.WSServerHandshakeError:
                continue
    await second.close()
    await third.close()


async def test_whoever_becomes_an_operator_needs_a_new_password(shared: Gateway, admin: Browser) -> None:
    """An admin can make links for the tenant's accounts, so may know the password of any."""
    operator, viewer = await signed_in(shared, Role.OPERATOR), await signed_in(shared, Role.VIEWER)
    assert viewer.user is not None
    at = f"/console/t/demo/members/{viewer.user.public_id}"
    await operator.submit(f"{at}/role", role="operator")
    assert "Send a link for a new password" in (await operator.get("/console/t/demo/members")).words
    await Browser(shared).sign_in(viewer.user.email, status=422)
    await admin.submit(f"{at}/reset", 404)
    issued = await operator.submit(f"{at}/reset", 200)
    found = re.search(r"/console/setup/[\w-]{43}", issued.text)
    assert found
    await Browser(shared).submit(found[0], password=f"{PASSWORD} 2", repeated=f"{PASSWORD} 2")
    await Browser(shared).sign_in(viewer.user.email, f"{PASSWORD} 2")


async def test_over_tls_a_page_without_it_is_another_site(tmp_path: Path) -> None:
    async with running_console(tmp_path, console_url="https://press.example") as gateway:
        browser = Browser(gateway)
        for origin, status in (("http://press.example", 403), ("https://press.example", 422)):
            headers = {"Origin": origin, "Host": "press.example"}
            page = await browser.request("GET", "/console/sign-in", headers=headers)
            visit = page.headers["Set-Cookie"].partition(";")[0]
            form = {"csrf": page.csrf, "email": "a@example.com", "password": PASSWORD}
            answer = await browser.request("POST", "/console/sign-in", data=form, headers={**headers, "Cookie": visit})
            assert answer.status == status, origin
