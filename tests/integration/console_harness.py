"""A gateway with the console, and browsers without a browser: clients with cookies of their own.

``async with running_console(folder) as gateway`` runs it; ``await signed_in(gateway, Role.ADMIN)`` is a
:class:`Browser` of a fresh user of tenant ``demo``; ``Browser(gateway)`` is nobody's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from stencilpress.gateway.access import Role
from stencilpress.gateway.accounts.passwords import Passwords
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.users import User, add_user, set_password
from stencilpress.web.app import mount_console
from tests.integration.gateway_harness import Gateway, running_gateway

PASSWORD = "correct horse battery staple"
_HASHES: dict[str, str] = {}


@asynccontextmanager
async def running_console(folder: Path, **options: Any) -> AsyncIterator[Gateway]:
    """As ``running_gateway``, with the console mounted."""
    async with running_gateway(folder, mounts=[mount_console], **options) as gateway:
        yield gateway


@dataclass
class Answer:
    """A page, or what stood in its place."""

    status: int
    text: str
    headers: Mapping[str, str]

    @property
    def location(self) -> str:
        return self.headers["Location"]

    @property
    def csrf(self) -> str:
        """The token that the page's forms carry."""
        found = re.search(r'<meta name="csrf" content="([^"]+)">', self.text)
        assert found, self.text[:500]
        return found[1]

    @property
    def words(self) -> str:
        """The text that a person reads."""
        return visible_text(self.text)


@dataclass
class Browser:
    """Keeps cookies, follows nothing by itself, and sends forms as pages do."""

    gateway: Gateway
    user: User | None = None
    http: aiohttp.ClientSession = field(init=False)

    def __post_init__(self) -> None:
        self.http = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        self.gateway.stack.push_async_callback(self.http.close)

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        url = URL(self.gateway.url + path, encoded=True)
        async with self.http.request(method, url, allow_redirects=False, **options) as answer:
            endless = answer.content_type == "text/event-stream"
            return Answer(answer.status, "" if endless else await answer.text(), answer.headers)

    async def get(self, path: str, *, status: int = 200) -> Answer:
        answer = await self.request("GET", path)
        assert answer.status == status, (path, answer.status, answer.text[:2000])
        return answer

    async def follow(self, path: str) -> Answer:
        """The page that a path leads to in the end."""
        answer = await self.request("GET", path)
        for _ in range(5):
            if answer.status != 303:
                break
            answer = await self.request("GET", answer.location)
        assert answer.status == 200, (answer.status, answer.text[:2000])
        return answer

    async def csrf(self) -> str:
        """The token of this browser's forms."""
        return (await self.follow("/console/account")).csrf

    async def submit(self, path: str, status: int = 303, **fields: str | Sequence[str]) -> Answer:
        """Send a form with the token."""
        pairs = [("csrf", await self.csrf())]
        for name, value in fields.items():
            pairs += [(name, each) for each in ([value] if isinstance(value, str) else value)]
        answer = await self.request("POST", path, data=pairs, headers={"Origin": self.gateway.url})
        assert answer.status == status, (path, answer.status, answer.words)
        return answer

    async def api(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        """Call ``/console/api`` as a script of a page does; its JSON."""
        headers = {"x-csrf-token": await self.csrf(), "Origin": self.gateway.url}
        url = f"{self.gateway.url}/console/api{path}"
        async with self.http.request(method, url, json=body, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json(content_type=None)

    async def sign_in(self, email: str, password: str = PASSWORD, status: int = 303, back: str = "") -> Answer:
        return await self.submit("/console/sign-in", status, email=email, password=password, next=back)


async def make_user(db: Database, role: Role, tenant: str = "demo", email: str = "", password: str = PASSWORD) -> User:
    """A user who can sign in."""
    email = email or f"{role.value}-{secrets.token_hex(4)}@example.com"
    user = await add_user(db, tenant, email, role)
    await set_password(db, user.public_id, await _hashed(password))
    return user


async def _hashed(password: str) -> str:
    """Hundreds of users have the one password: it is hashed, as slowly as it must be, once."""
    if password not in _HASHES:
        passwords = Passwords()
        try:
            _HASHES[password] = await passwords.hash(password)
        finally:
            passwords.close()
    return _HASHES[password]


async def signed_in(gateway: Gateway, role: Role, tenant: str = "demo", email: str = "") -> Browser:
    """The browser of a fresh user of a tenant."""
    user = await make_user(gateway.services.db, role, tenant, email)
    await gateway.services.changes.poll()
    browser = Browser(gateway, user)
    await browser.sign_in(user.email)
    return browser


def visible_text(html: str) -> str:
    """The text nodes of a page, spaces folded."""
    reader = _TextReader()
    reader.feed(html)
    return " ".join(" ".join(reader.parts).split())


class _TextReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)
