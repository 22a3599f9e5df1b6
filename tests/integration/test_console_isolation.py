"""Who sees what: role by route by foreign tenant; headers of every answer; hostile texts are inert."""

from __future__ import annotations

import html
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser

import pytest
import pytest_asyncio

from stencilpress.gateway.access import Role
from stencilpress.gateway.api.admin.dispatch import NOT_FOUND
from stencilpress.web.csrf import SAFE
from stencilpress.web.headers import HEADERS
from tests.integration.console_harness import Answer, Browser, make_user, running_console, signed_in
from tests.integration.gateway_harness import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARTS = {"adapter": "pirate", "version": "1", "alias": "prod"}
HOSTILE = "\"><img src=x onerror=alert(1)><script>alert(1)</script>'{{7*7}}"
ALL_PAGES = "console/static|chat/ws|/console/api/|/console/sign-in/oidc"
"""What is no page."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def people(shared: Gateway) -> dict[Role, Browser]:
    """Of tenant ``demo``, one for each role."""
    return {role: await signed_in(shared, role) for role in (Role.OPERATOR, Role.ADMIN, Role.VIEWER)}


def console_paths(gateway: Gateway, *, safe: bool) -> list[tuple[str, str]]:
    """Method and pattern of the console's routes."""
    return [
        (route.method, re.sub(r":[^}]*\}", "}", route.resource.canonical))
        for route in gateway.routes
        if route.resource is not None
        and route.resource.canonical.startswith("/console")
        and route.method != "HEAD"
        and (route.method in SAFE) is safe
    ]


def filled(pattern: str, tenant: str, others: str = "") -> str:
    return re.sub(
        r"\{(\w+)\}", lambda part: tenant if part[1] == "tenant" else others or PARTS.get(part[1], "x"), pattern
    )


async def ask(browser: Browser, method: str, path: str) -> Answer:
    headers = {} if method in SAFE else {"x-csrf-token": await browser.csrf()}
    return await browser.request(method, path, headers=headers)


@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER])
async def test_a_foreign_tenant_is_the_same_page_as_none(
    shared: Gateway, people: dict[Role, Browser], role: Role
) -> None:
    browser = people[role]
    routes = [one for safe in (True, False) for one in console_paths(shared, safe=safe) if "{tenant}" in one[1]]
    assert len(routes) > 50
    for method, pattern in routes:
        foreign, absent, bad = [
            await ask(browser, method, filled(pattern, tenant)) for tenant in ("other", "nobody", "Other%20..")
        ]
        assert (foreign.status, foreign.text) == (absent.status, absent.text), (method, pattern)
        assert (bad.status, bad.text) == (absent.status, absent.text), (method, pattern)
        assert foreign.status == 404
        assert NOT_FOUND in foreign.text


async def test_a_foreign_member_is_the_same_page_as_none(shared: Gateway, people: dict[Role, Browser]) -> None:
    foreign = await make_user(shared.services.db, Role.VIEWER, "other")
    operator = await make_user(shared.services.db, Role.OPERATOR, "demo")
    browser = people[Role.ADMIN]
    for verb in ("role", "disable", "enable", "reset"):
        answers = []
        for user_id in (foreign.public_id, operator.public_id, "zzzzzzzzzzzz", "%27"):
            fields = {"csrf": await browser.csrf(), "role": "viewer"}
            answers.append(await browser.request("POST", f"/console/t/demo/members/{user_id}/{verb}", data=fields))
        assert {(answer.status, answer.text) for answer in answers} == {(404, answers[0].text)}, verb


async def test_operators_pages_are_refused_to_others(shared: Gateway, people: dict[Role, Browser]) -> None:
    own = {"/console/", "/console/account", "/console", "/console/sign-in"}
    pages = [
        pattern
        for _, pattern in console_paths(shared, safe=True)
        if "{" not in pattern and pattern not in own and not re.search(ALL_PAGES, pattern)
    ]
    assert "/console/tenants" in pages
    for pattern in pages:
        for role in (Role.ADMIN, Role.VIEWER):
            assert (await people[role].request("GET", pattern)).status == 403, (role, pattern)
        assert (await people[Role.OPERATOR].request("GET", pattern)).status == 200, pattern


async def test_a_viewer_changes_nothing(shared: Gateway, people: dict[Role, Browser]) -> None:
    own = ("/console/sign-", "/console/account", "/console/setup/")
    for method, pattern in console_paths(shared, safe=False):
        if pattern.startswith(own) or "{upload}" in pattern:
            continue
        answer = await ask(people[Role.VIEWER], method, filled(pattern, "demo"))
        assert answer.status == 403, (method, pattern, answer.status)


async def test_who_is_signed_out_sees_nothing(shared: Gateway) -> None:
    nobody = Browser(shared)
    for _, pattern in console_paths(shared, safe=True):
        if re.search("static|/sign-in|/setup/", pattern):
            continue
        answer = await nobody.request("GET", filled(pattern, "demo"))
        if pattern.startswith("/console/api"):
            assert answer.status == 401, pattern
        elif pattern.endswith("/chat/ws"):
            assert answer.status in (401, 403)
        elif pattern != "/console":
            assert answer.status == 303, pattern
            assert answer.location.startswith("/console/sign-in"), pattern


async def test_every_answer_has_the_headers(shared: Gateway, people: dict[Role, Browser]) -> None:
    paths = [filled(pattern, "demo") for _, pattern in console_paths(shared, safe=True)]
    paths += ["/console/nothing/here", "/console/t/demo/nothing", "/console/t/nobody/", "/console/static/x/y"]
    for browser in (people[Role.OPERATOR], people[Role.VIEWER], Browser(shared)):
        for path in paths:
            answer = await browser.request("GET", path)
            for name, value in HEADERS.items():
                assert answer.headers.get(name) == value, (path, name)
            assert answer.headers["Cache-Control"] in ("no-store", "no-cache"), path
            if answer.headers.get("Content-Type", "").startswith("text/html"):
                assert_no_inline(answer.text, path)


async def test_static_files_are_kept_for_ever_under_their_hash(shared: Gateway) -> None:
    page = await Browser(shared).get("/console/sign-in")
    for path in set(re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page.text)):
        answer = await Browser(shared).get(path)
        assert answer.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert answer.headers["Content-Type"].partition(";")[0] in ("text/css", "text/javascript", "image/svg+xml")
        hash_ = path.split("/")[3]
        for wrong in (path.replace(hash_, "0" * 16), f"/console/static/{hash_}/../app.py", f"{path}x"):
            assert (await Browser(shared).request("GET", wrong)).status == 404
        assert (await Browser(shared).request("GET", f"/console/static/{hash_}/..%2fapp.py")).status == 404


async def test_hostile_texts_are_inert(shared: Gateway) -> None:
    browser = Browser(shared)
    user = await make_user(shared.services.db, Role.ADMIN)
    agent = {"User-Agent": HOSTILE}
    fields = {"csrf": await browser.csrf(), "email": HOSTILE, "password": HOSTILE, "next": HOSTILE}
    refused = await browser.request("POST", "/console/sign-in", data=fields, headers=agent)
    assert refused.status == 422
    assert_harmless(refused.text)
    fields = {"csrf": await browser.csrf(), "email": user.email, "password": "correct horse battery staple"}
    assert (await browser.request("POST", "/console/sign-in", data=fields, headers=agent)).status == 303
    assert HOSTILE in html.unescape((await browser.get("/console/account")).text)
    for path in ("account", "t/demo/members", "t/demo/%22%3E%3Cscript%3E"):
        assert_harmless((await browser.request("GET", f"/console/{path}")).text)
    fields = {"csrf": await browser.csrf(), "email": HOSTILE, "role": HOSTILE}
    refused = await browser.request("POST", "/console/t/demo/members", data=fields)
    assert refused.status == 400
    assert_harmless(refused.text)


def assert_no_inline(page: str, path: str) -> None:
    """What the policy would block: inline scripts and styles, handlers."""
    for tag, attributes in _elements(page):
        inline = tag == "style" or (
            tag == "script" and "src" not in attributes and attributes.get("type") != "application/json"
        )
        assert not inline, (path, tag)
        assert not [name for name in attributes if name == "style" or name.startswith("on")], (path, tag)


def assert_harmless(page: str) -> None:
    assert_no_inline(page, "")
    assert not [tag for tag, attributes in _elements(page) if tag == "img" or attributes.get("src") == "x"]
    assert "49" not in visible_expression(page)


def visible_expression(page: str) -> str:
    """What became of ``{{7*7}}`` in a text."""
    return " ".join(re.findall(r"&#39;(.{0,8})", page))


def _elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    found: list[tuple[str, dict[str, str | None]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    Reader().feed(page)
    return found
