"""Members of a tenant: invited, promoted, disabled, by who may; and the first operator."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner

from stencilpress.cli import main
from stencilpress.gateway.access import Role
from stencilpress.gateway.accounts.links import first_path
from stencilpress.gateway.catalog.users import find_account
from tests.integration.console_harness import PASSWORD, Answer, Browser, make_user, running_console, signed_in
from tests.integration.gateway_harness import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

MEMBERS = "/console/t/demo/members"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_console(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def link_of(answer: Answer) -> str:
    """The path of the link that a page shows this once."""
    found = re.search(r"<code data-secret>http://[^/<]+(/console/setup/[^<]+)</code>", answer.text)
    assert found, answer.words
    return found[1]


async def id_of(gateway: Gateway, email: str) -> str:
    account = await find_account(gateway.services.db, email=email)
    assert account is not None
    return account.user.public_id


async def test_the_first_operator_comes_by_the_link_of_the_start(tmp_path: Path) -> None:
    async with running_console(tmp_path) as gateway:
        path = await first_path(gateway.services.db, "demo")
        browser = Browser(gateway)
        assert "the first operator, in the tenant demo" in (await browser.get(path)).words
        refused = await browser.submit(path, 400, email="nonsense", password=PASSWORD, repeated=PASSWORD)
        assert "is no e-mail address" in refused.words
        await browser.submit(path, email="first@example.com", password=PASSWORD, repeated=PASSWORD)
        assert (await browser.sign_in("first@example.com")).location == "/console/"
        assert "operator" in (await browser.follow("/console/")).words
        await browser.get(path, status=404)


async def test_an_invitation_from_the_form_to_the_first_page(shared: Gateway) -> None:
    admin, email = await signed_in(shared, Role.ADMIN), "new@example.com"
    answer = await admin.submit(MEMBERS, status=200, email=email, role="admin")
    path = link_of(answer)
    page = await admin.get(MEMBERS)
    assert "invited" in page.words
    assert path not in page.text, "it is shown once"
    person = Browser(shared)
    assert "invited to the tenant demo" in (await person.get(path)).words
    await person.submit(path, password=PASSWORD, repeated=PASSWORD)
    await person.sign_in(email)
    assert (await person.get(MEMBERS)).status == 200
    assert "belongs to a user already" in (await admin.submit(MEMBERS, status=409, email=email, role="viewer")).words
    assert "is no e-mail address" in (await admin.submit(MEMBERS, status=400, email="x", role="viewer")).words


async def test_a_role_changes_and_the_session_ends(shared: Gateway) -> None:
    admin, person = await signed_in(shared, Role.ADMIN), await signed_in(shared, Role.VIEWER)
    assert person.user is not None
    at = f"{MEMBERS}/{person.user.public_id}"
    await admin.submit(f"{at}/role", role="admin")
    assert f"{person.user.email} now has the role admin" in (await admin.get(MEMBERS)).words
    assert (await person.request("GET", MEMBERS)).status == 303
    await person.sign_in(person.user.email)
    await person.submit(MEMBERS, status=200, email="by-new-admin@example.com", role="viewer")
    await admin.submit(f"{at}/role", status=400, role="caller")
    await admin.submit(f"{at}/role", status=400, role="king")
    await admin.submit(f"{at}/disable")
    assert (await person.request("GET", MEMBERS)).status == 303
    await person.sign_in(person.user.email, status=422)
    await admin.submit(f"{at}/enable")
    await person.sign_in(person.user.email)
    path = link_of(await admin.submit(f"{at}/reset", status=200))
    await Browser(shared).submit(path, password="another pass phrase", repeated="another pass phrase")
    await person.sign_in(person.user.email, "another pass phrase")


async def test_operators_are_made_by_operators_alone(shared: Gateway) -> None:
    admin, operator = await signed_in(shared, Role.ADMIN), await signed_in(shared, Role.OPERATOR)
    viewer = await make_user(shared.services.db, Role.VIEWER)
    assert "cannot grant" in (await admin.submit(MEMBERS, status=403, email="op@example.com", role="operator")).words
    await admin.submit(f"{MEMBERS}/{viewer.public_id}/role", status=403, role="operator")
    assert 'value="operator"' not in (await admin.get(MEMBERS)).text
    await operator.submit("/console/t/other/members", status=200, email="op2@example.com", role="operator")
    await operator.submit(f"{MEMBERS}/{viewer.public_id}/role", role="operator")
    assert viewer.email not in (await admin.get(MEMBERS)).words, "an admin does not see operators"
    assert viewer.email in (await operator.get(MEMBERS)).words


async def test_nobody_changes_their_own_account_here(shared: Gateway) -> None:
    admin = await signed_in(shared, Role.ADMIN)
    assert admin.user is not None
    for verb in ("role", "disable", "enable"):
        answer = await admin.submit(f"{MEMBERS}/{admin.user.public_id}/{verb}", status=409, role="viewer")
        assert "your own account" in answer.words


async def test_a_viewer_sees_members_and_changes_none(shared: Gateway) -> None:
    viewer = await signed_in(shared, Role.VIEWER)
    assert viewer.user is not None
    page = await viewer.get(MEMBERS)
    assert viewer.user.email in page.words
    assert "Invite" not in page.words
    await viewer.submit(MEMBERS, status=403, email="x@example.com", role="viewer")


async def test_the_command_does_the_same(shared: Gateway, tmp_path: Path) -> None:
    async def cli(*arguments: str, code: int = 0) -> Any:
        place = ("--data", str(tmp_path), "--database-url", shared.services.settings.database_url, "--json")
        run: Callable[..., Any] = CliRunner().invoke
        result = await asyncio.to_thread(run, main, ["user", *arguments, *place])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if code == 0 else result.stderr

    email = "cli@example.com"
    made = await cli("add", "demo", email, "--role", "admin", "--console-url", "https://press.example.com")
    assert made["link"].startswith("https://press.example.com/console/setup/")
    assert (made["id"], made["role"], made["has_password"]) == (await id_of(shared, email), "admin", False)
    person = Browser(shared)
    await person.submit(made["link"].removeprefix("https://press.example.com"), password=PASSWORD, repeated=PASSWORD)
    await person.sign_in(email)
    listed = [one["email"] for one in await cli("list", "--tenant", "demo")]
    assert email in listed
    assert listed == sorted(listed)
    assert (await cli("role", email, "viewer"))["role"] == "viewer"
    await shared.services.changes.poll()
    assert (await person.request("GET", MEMBERS)).status == 303
    assert (await cli("disable", email.upper()))["disabled_at"] is not None
    await person.sign_in(email, status=422)
    assert (await cli("enable", email))["disabled_at"] is None
    assert (await cli("reset", email))["link"].startswith("http://127.0.0.1:8000/console/setup/")
    assert "does not exist" in await cli("disable", "nobody@example.com", code=1)
    assert "belongs to a user already" in await cli("add", "demo", email, code=1)
