"""The console in a real browser, in front of a real server: gateway and CPU engine as `stencilpress serve` starts them.

Tests are coroutines on one loop and take ``visit``::

    async def test_keys(visit: Visit) -> None:
        page = await visit(Role.ADMIN, "/console/t/demo/keys")
        await page.get_by_role("button", name="New key").click()

``visit(None, path)`` is nobody's browser; ``visit(role, path, theme="dark", width=360)`` is a phone. Each visit is a
browser of its own with a fresh user of tenant ``demo``, whose adapters are :attr:`Site.adapters`. When a test ends, no
page of it may have met an error: a script's, a blocked inline style, a file that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import pytest_asyncio

from bench.server import Server, serving
from stencilpress.gateway.access import Role
from stencilpress.gateway.catalog.session import Database
from tests.demo_base import NAME as BASE
from tests.demo_base import ROOT
from tests.integration.console_harness import PASSWORD, make_user
from tests.tiny import save_adapter, save_base

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Page, Response

BROWSER = os.environ.get("STENCILPRESS_BROWSER", "/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
FIRST_OPERATOR = "first@example.com"
DEMO_ADAPTERS = ("json", "pirate", "support", "terse")
TINY_ADAPTERS = ("pirate", "terse")
EXPECTED_STATUSES = frozenset({400, 401, 403, 404, 409, 413, 422, 429})
"""Refusals, which a test may provoke; the browser's console calls them errors."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All on one loop, with the time that a browser takes."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            item.add_marker(pytest.mark.timeout(300))


@dataclass(frozen=True)
class Site:
    """The server under test."""

    server: Server
    db: Database
    base: str
    """A name of the base that requests may use."""
    adapters: tuple[str, ...]
    """Of tenant ``demo``, with ``prod`` at version 1."""
    used_link: str
    """By which the first operator, :data:`FIRST_OPERATOR`, has come."""

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def key(self) -> str:
        """A caller's key of tenant ``demo``."""
        return self.server.key


class Visit(Protocol):
    async def __call__(
        self,
        role: Role | None,
        path: str = "/console/",
        *,
        tenant: str = "demo",
        theme: str = "light",
        width: int = 0,
        known: bool = False,
    ) -> Page:
        """A page in a browser of its own, signed in as a fresh user, at ``path``.

        ``known``: as the user of that role who came before, still signed in, which spares two pages and two hashes.
        """


@dataclass(frozen=True)
class _Started:
    server: Server
    data: Path
    base: str
    adapters: tuple[str, ...]


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Started]:
    """On the demo base where it has been fetched already, else on a tiny random one."""
    data = tmp_path_factory.mktemp("browser") / "data"
    kept = Path(os.environ.get("STENCILPRESS_TEST_DATA", ROOT / ".test-data")) / "v1"
    models, settings = data / "v1" / "models", {"dtype": "float32", "gateways": "1"}
    models.mkdir(parents=True)
    if (kept / "models" / BASE / "config.json").exists():
        (models / BASE).symlink_to((kept / "models" / BASE).absolute(), target_is_directory=True)
        with serving(data, max_model_len="1024", **settings) as running:
            yield _Started(running, data, BASE, DEMO_ADAPTERS)
        return
    base = save_base(data.parent / "base")
    with serving(data, model=str(base), base_id="acme/Tiny-Llama", **settings) as running:
        for seed, name in enumerate(TINY_ADAPTERS, 1):
            folder = save_adapter(data.parent / name, base, seed=seed)
            stencilpress("adapter", "add", str(folder), "--tenant", "demo", "--name", name, data=data)
        yield _Started(running, data, "base", TINY_ADAPTERS)


def stencilpress(*arguments: str, data: Path) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "stencilpress.cli", *arguments, "--data", str(data)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture(scope="session")
def playwright() -> Any:
    """What drives a browser; skipped where that or the browser is missing."""
    if not Path(BROWSER).exists():
        pytest.skip(f"no browser at {BROWSER}; STENCILPRESS_BROWSER names another")
    return pytest.importorskip("playwright.async_api", reason="playwright is not installed")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium(playwright: Any) -> AsyncIterator[Browser]:
    """One browser process."""
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield browser
        await browser.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def site(chromium: Browser, started: _Started) -> AsyncIterator[Site]:
    """The server, after its first operator has followed the link that it printed."""
    link = None
    async with asyncio.timeout(30):  # it is ready a moment before it says so
        while link is None:
            text = await asyncio.to_thread(started.server.log.read_text)
            link = re.search(r"^  console +(\S+/console/setup/\S+)$", text, re.MULTILINE)
            await asyncio.sleep(0.05)
    page = await chromium.new_page()
    await page.goto(link[1])
    await page.get_by_label("E-mail address").fill(FIRST_OPERATOR)
    await page.get_by_label("Password", exact=True).fill(PASSWORD)
    await page.get_by_label("The password again").fill(PASSWORD)
    await page.get_by_role("button", name="Set the password").click()
    await page.wait_for_url("**/console/sign-in")
    await page.close()
    async with Database(f"sqlite:///{started.data / 'v1' / 'catalog.db'}") as db:
        yield Site(started.server, db, started.base, started.adapters, link[1])


@dataclass
class _Troubles:
    """What went wrong in the pages of one test."""

    found: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.found.append(f"{page.url}: {error}"))
        page.on("console", self._heard)
        page.on("response", self._answered)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.found.append(f"{message.location.get('url')}: {message.text}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400 and (response.status not in EXPECTED_STATUSES or "/static/" in response.url):
            self.found.append(f"{response.url}: {response.status}")


@pytest.fixture(scope="session")
def known_cookies() -> dict[tuple[Role, str], Any]:
    """Of users of a role and tenant who are signed in, and stay so."""
    return {}


@pytest_asyncio.fixture(loop_scope="session")
async def visit(chromium: Browser, site: Site, known_cookies: dict[tuple[Role, str], Any]) -> AsyncIterator[Visit]:
    troubles, contexts = _Troubles(), contextlib.AsyncExitStack()

    async def open_page(
        role: Role | None,
        path: str = "/console/",
        *,
        tenant: str = "demo",
        theme: str = "light",
        width: int = 0,
        known: bool = False,
    ) -> Page:
        size: Any = {"width": width or 1280, "height": 800}
        scheme: Any = theme
        context = await chromium.new_context(base_url=site.url, viewport=size, color_scheme=scheme)
        contexts.push_async_callback(context.close)
        context.set_default_timeout(20_000)
        page = await context.new_page()
        troubles.watch(page)
        if role is not None and known and (role, tenant) in known_cookies:
            await context.add_cookies(known_cookies[role, tenant])
        elif role is not None:
            await _sign_in(page, (await make_user(site.db, role, tenant)).email)
            if known:
                known_cookies[role, tenant] = await context.cookies()
        await page.goto(path)
        assert "/sign-in" not in page.url or role is None
        return page

    async with contexts:
        yield open_page
    assert troubles.found == []


async def _sign_in(page: Page, email: str) -> None:
    await page.goto("/console/sign-in")
    await page.get_by_label("E-mail address").fill(email)
    await page.get_by_label("Password").fill(PASSWORD)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url(lambda url: "/sign-in" not in url)
