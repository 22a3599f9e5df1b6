"""Signing in and out of the console, what its cookies are like, where it leads, and who is kept out."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
import pytest_asyncio

from stencilpress.gateway.access import Role
from stencilpress.gateway.accounts import sign_in as signing
from stencilpress.gateway.accounts.links import reset_link
from stencilpress.gateway.accounts.sign_in import ACCOUNT_ATTEMPTS, REFUSAL
from stencilpress.gateway.accounts.tokens import new_token
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.sessions import list_sessions
from stencilpress.gateway.catalog.tenants import disable_tenant, enable_tenant
from stencilpress.gateway.catalog.users import User, disable_user
from stencilpress.gateway.errors import UnavailableError
from tests.integration.console_harness import PASSWORD, Answer, Browser, make_user, running_console, signed_in
from tests.integration.gateway_harness import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIGN_IN = "/console/sign-in"
NEW_PASSWORD = "a pass phrase of some length"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def session_cookie(answer: Answer) -> SimpleCookie:
    return SimpleCookie(answer.headers["Set-Cookie"])


async def is_signed_in(browser: Browser) -> bool:
    return (await browser.request("GET", "/console/account")).status == 200


def user_of(browser: Browser) -> User:
    assert browser.user is not None
    return browser.user


async def test_a_visit_from_the_first_page_to_signing_out(shared: Gateway) -> None:
    user = await make_user(shared.services.db, Role.ADMIN)
    browser = Browser(shared)
    assert (await browser.get("/", status=303)).location == "/console/"
    assert (await browser.get("/console/", status=303)).location == SIGN_IN
    assert (await browser.get("/console/account", status=303)).location == f"{SIGN_IN}?next=%2Fconsole%2Faccount"
    answer = await browser.sign_in(user.email.upper(), back="/console/account")
    assert answer.location == "/console/account"
    assert user.email in (await browser.get("/console/account")).words
    assert (await browser.get(SIGN_IN, status=303)).location == "/console/"
    await browser.submit("/console/sign-out")
    assert (await browser.get("/console/account", status=303)).location.startswith(SIGN_IN)
    actions = [entry.action for entry in await list_audit(shared.services.db, target=f"user:{user.public_id}")]
    assert actions[:2] == ["user.sign_out", "user.sign_in"]


async def test_the_operations_of_the_admin_api_answer_to_a_session(shared: Gateway) -> None:
    browser = await signed_in(shared, Role.ADMIN)
    me = await browser.api("GET", "/me")
    assert (me["tenant"], me["role"]) == ("demo", "admin")
    made = await browser.api("POST", "/tenants/demo/keys", {"label": "ci"}, status=201)
    assert made["token"].startswith("sp_")
    [entry] = (await browser.api("GET", f"/tenants/demo/audit?target=key:{made['id']}"))["data"]
    assert entry["actor"] == f"user:{user_of(browser).email}"
    refused = await browser.api("POST", "/tenants/demo/keys", {"label": 7}, status=400)
    assert refused["error"]["param"] == "label"
    assert (await Browser(shared).request("GET", "/console/api/me")).status == 401


@pytest.mark.parametrize(
    "back",
    [
        "https://elsewhere.example/console/",
        "//elsewhere.example/console/",
        "/\\elsewhere.example",
        "/console\\..\\elsewhere",
        "/console/..//elsewhere.example",
        "/console//elsewhere.example",
        "/console/\r\nSet-Cookie: x=y",
        "/consolex",
        "javascript:alert(1)",
        "console/account",
        "/v1/models",
        "/console/" + "x" * 1000,
        "/console/\u202eaccount",
    ],
)
async def test_signing_in_leads_to_no_other_site(shared: Gateway, back: str) -> None:
    browser = Browser(shared)
    user = await make_user(shared.services.db, Role.VIEWER)
    assert (await browser.sign_in(user.email, back=back)).location == "/console/"


async def test_the_page_asked_for_comes_after_signing_in(shared: Gateway) -> None:
    browser = Browser(shared)
    user = await make_user(shared.services.db, Role.VIEWER)
    led = (await browser.get("/console/t/demo/usage?period=hour&adapter=a%26b", status=303)).location
    page = await browser.get(led)
    found = re.search(r'name="next" value="([^"]*)"', page.text)
    assert found
    back = found[1].replace("&amp;", "&")
    assert (await browser.sign_in(user.email, back=back)).location == "/console/t/demo/usage?period=hour&adapter=a%26b"


async def test_the_sessions_cookie_is_out_of_reach(shared: Gateway) -> None:
    browser = Browser(shared)
    user = await make_user(shared.services.db, Role.VIEWER)
    cookie = session_cookie(await browser.sign_in(user.email))["stencilpress-session"]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Lax", "/console")
    assert not cookie["secure"]
    assert len(cookie.value) == 43


async def test_behind_tls_cookies_are_for_tls_alone(tmp_path: Path) -> None:
    place = "https://press.example.com"
    async with running_console(tmp_path, console_url=place, trusted_proxies=1) as gateway:
        browser = Browser(gateway)
        page = await browser.get(SIGN_IN)
        visit = session_cookie(page)["__Secure-stencilpress-visit"]
        assert visit["secure"]
        assert page.headers["Strict-Transport-Security"] == "max-age=31536000"
        user = await make_user(gateway.services.db, Role.VIEWER)
        answer = await browser.request(
            "POST",
            SIGN_IN,
            data={"csrf": page.csrf, "email": user.email, "password": PASSWORD},
            headers={
                "Origin": place,
                "Cookie": f"__Secure-stencilpress-visit={visit.value}",
                "X-Forwarded-For": "10.9.9.9, 203.0.113.7",
            },
        )
        cookie = session_cookie(answer)["__Secure-stencilpress-session"]
        assert (cookie["secure"], cookie["httponly"]) == (True, True)
        [entry, *_] = await list_audit(gateway.services.db, target=f"user:{user.public_id}")
        assert entry.source == "203.0.113.7", "what the proxy saw, not what the client said"


async def test_a_session_is_not_taken_over_by_a_cookie_set_before(shared: Gateway) -> None:
    user, planted = await make_user(shared.services.db, Role.VIEWER), new_token()
    browser = Browser(shared)
    cookie = {"Cookie": f"stencilpress-session={planted}; stencilpress-visit={planted}"}
    page = await browser.request("GET", SIGN_IN, headers=cookie)
    fields = {"csrf": page.csrf, "email": user.email, "password": PASSWORD}
    answer = await browser.request("POST", SIGN_IN, data=fields, headers=cookie)
    assert answer.status == 303
    assert session_cookie(answer)["stencilpress-session"].value != planted
    assert (await Browser(shared).request("GET", "/console/account", headers=cookie)).status == 303


async def test_signing_in_again_ends_the_session_before(shared: Gateway) -> None:
    browser, other = await signed_in(shared, Role.VIEWER), await make_user(shared.services.db, Role.VIEWER)
    before = {cookie.key: cookie.value for cookie in browser.http.cookie_jar}
    await browser.submit(SIGN_IN, email=other.email, password=PASSWORD)
    assert other.email in (await browser.get("/console/account")).words
    await shared.services.changes.poll()
    old = Browser(shared)
    cookie = {"Cookie": f"stencilpress-session={before['stencilpress-session']}"}
    assert (await old.request("GET", "/console/account", headers=cookie)).status == 303


async def test_refusals_look_the_same(shared: Gateway) -> None:
    db = shared.services.db
    known, gone = await make_user(db, Role.VIEWER), await make_user(db, Role.VIEWER)
    await disable_user(db, gone.public_id)
    browser, pages = Browser(shared), set()
    for email, password in ((known.email, "wrong"), ("nobody@example.com", PASSWORD), (gone.email, PASSWORD)):
        answer = await browser.sign_in(email, password, status=422)
        assert REFUSAL in answer.words
        pages.add(answer.text.replace(email, "EMAIL"))
    assert len(pages) == 1


async def test_too_many_attempts_are_told_when_to_try_again(shared: Gateway) -> None:
    browser, user = Browser(shared), await make_user(shared.services.db, Role.VIEWER)
    for _ in range(ACCOUNT_ATTEMPTS):
        await browser.sign_in(user.email, "wrong", status=422)
    answer = await browser.sign_in(user.email, status=429)
    assert "Too many attempts" in answer.words
    assert 0 < int(answer.headers["Retry-After"]) <= signing.WINDOW.total_seconds()
    assert not await is_signed_in(browser)


async def test_a_disabled_tenant_signs_nobody_in(shared: Gateway) -> None:
    db = shared.services.db
    browser = await signed_in(shared, Role.ADMIN, "other")
    await disable_tenant(db, "other")
    await shared.services.changes.poll()
    assert not await is_signed_in(browser)
    await browser.sign_in(user_of(browser).email, status=422)
    await enable_tenant(db, "other")
    await browser.sign_in(user_of(browser).email)


async def test_a_person_ends_their_other_sessions(shared: Gateway) -> None:
    one = await signed_in(shared, Role.VIEWER)
    others = [Browser(shared, one.user) for _ in range(3)]
    for other in others:
        await other.sign_in(user_of(one).email)
    page = await one.get("/console/account")
    ids = re.findall(r'name="session" value="(\w+)"', page.text)
    assert len(ids) == 3
    await one.submit("/console/account/sessions/end", session=ids[0])
    assert "has ended" in (await one.get("/console/account")).words
    assert sorted([await is_signed_in(other) for other in others]) == [False, True, True]
    await one.submit("/console/account/sessions/end")
    assert [await is_signed_in(browser) for browser in (one, *others)] == [True, False, False, False]
    stranger, [mine] = (
        await signed_in(shared, Role.ADMIN),
        await list_sessions(shared.services.db, user_of(one).public_id),
    )
    await stranger.submit("/console/account/sessions/end", status=404, session=mine.public_id)
    assert await is_signed_in(one)


async def test_a_password_changes_and_other_sessions_end(shared: Gateway) -> None:
    one = await signed_in(shared, Role.VIEWER)
    other = Browser(shared, one.user)
    await other.sign_in(user_of(one).email)
    path = "/console/account/password"
    for fields, text in (
        ({"current": "wrong", "password": NEW_PASSWORD, "repeated": NEW_PASSWORD}, "is not your password"),
        ({"current": PASSWORD, "password": "short", "repeated": "short"}, "must have 12 to 256 characters"),
        ({"current": PASSWORD, "password": NEW_PASSWORD, "repeated": PASSWORD}, "differs from the new password"),
    ):
        assert text in (await one.submit(path, status=400, **fields)).words
    await one.submit(path, current=PASSWORD, password=NEW_PASSWORD, repeated=NEW_PASSWORD)
    assert [await is_signed_in(browser) for browser in (one, other)] == [True, False]
    await other.sign_in(user_of(one).email, status=422)
    await other.sign_in(user_of(one).email, NEW_PASSWORD)


async def test_a_reset_link_ends_all_sessions(shared: Gateway) -> None:
    one = await signed_in(shared, Role.VIEWER)
    _, path = await reset_link(shared.services.db, user_of(one).public_id)
    visitor = Browser(shared)
    page = await visitor.get(path)
    assert user_of(one).email in page.text
    assert await is_signed_in(one), "looking at it uses nothing up"
    fields = {"password": NEW_PASSWORD, "repeated": "another"}
    assert "differs" in (await visitor.submit(path, status=400, **fields)).words
    assert (await visitor.submit(path, password=NEW_PASSWORD, repeated=NEW_PASSWORD)).location == SIGN_IN
    assert "The password is set" in (await visitor.get(SIGN_IN)).words
    assert not await is_signed_in(one)
    await visitor.get(path, status=404)
    await visitor.sign_in(user_of(one).email, NEW_PASSWORD)


async def test_without_the_catalog_a_page_says_so(shared: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        raise UnavailableError("The catalog is not available; try again shortly.")

    browser = await signed_in(shared, Role.VIEWER)
    monkeypatch.setattr("stencilpress.gateway.accounts.sessions.find_session", away)
    monkeypatch.setattr(shared.services.changes, "is_current", lambda *_: False)
    answer = await browser.request("GET", "/console/account")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert "The catalog is not available" in answer.words
    assert (await browser.request("GET", "/console/api/me")).status == 503
