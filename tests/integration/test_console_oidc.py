"""Signing in through an identity provider: a real one over HTTP, small, that signs with keys of its own."""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from joserfc import jwt
from joserfc.jwk import KeySet, OctKey, RSAKey
from sqlalchemy import delete

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.access import Role
from stencilpress.gateway.accounts import sign_in
from stencilpress.gateway.accounts.oidc import Identity, provider_of, read_grants
from stencilpress.gateway.catalog.account_models import AttemptRow
from stencilpress.gateway.catalog.users import add_user, disable_user, find_account
from stencilpress.gateway.errors import UnavailableError
from tests.integration.console_harness import Answer, Browser, running_console
from tests.integration.gateway_harness import Gateway

CLIENT, SECRET, CALLBACK = "press", "s3cret", "/console/sign-in/oidc/callback"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class FakeProvider:
    """Signs in whoever ``claims`` says, at once. What it hands out may be spoiled by ``spoil``."""

    url: str = ""
    keys: list[RSAKey] = field(default_factory=lambda: [RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})])
    claims: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[dict[str, Any]], Any] = lambda claims: claims
    issuer: str = ""
    methods: tuple[str, ...] = ("client_secret_basic",)
    asked: dict[str, dict[str, str]] = field(default_factory=dict)
    """What was asked for each code that waits."""
    codes: int = 0

    @property
    def email(self) -> str:
        return str(self.claims["email"])

    async def configuration(self, _request: web.Request) -> web.Response:
        ends = {name: f"{self.url}/{name}" for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")}
        methods = {"token_endpoint_auth_methods_supported": list(self.methods)}
        return web.json_response({"issuer": self.issuer or self.url, **ends, **methods})

    async def authorize(self, request: web.Request) -> web.Response:
        asked = dict(request.query)
        assert (asked["response_type"], asked["client_id"], asked["code_challenge_method"]) == ("code", CLIENT, "S256")
        self.codes += 1
        code = f"code-{self.codes}"
        self.asked[code] = asked
        location = f"{asked['redirect_uri']}?code={code}&state={asked['state']}"
        return web.Response(status=302, headers={"Location": location})

    async def token(self, request: web.Request) -> web.Response:
        form = await request.post()
        asked = self.asked.pop(str(form["code"]), None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(str(form["code_verifier"]).encode()).digest())
        if asked is None or challenge.decode().rstrip("=") != asked["code_challenge"] or not self._knows(request, form):
            return web.json_response({"error": "invalid_grant"}, status=400)
        assert form["redirect_uri"] == asked["redirect_uri"]
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": asked["nonce"], **self.claims}
        return web.json_response({"access_token": "opaque", "token_type": "Bearer", "id_token": self._signed(claims)})

    async def jwks(self, _request: web.Request) -> web.Response:
        return web.json_response(KeySet(list(self.keys)).as_dict(private=False))

    def _knows(self, request: web.Request, form: Any) -> bool:
        if self.methods == ("client_secret_post",):
            return bool(form.get("client_secret") == SECRET)
        return request.headers.get("Authorization") == aiohttp.encode_basic_auth(CLIENT, SECRET)

    def _signed(self, claims: dict[str, Any]) -> str:
        spoiled = self.spoil(claims)
        if isinstance(spoiled, str):
            return spoiled
        return jwt.encode({"alg": "RS256", "kid": self.keys[-1].kid}, spoiled, self.keys[-1])


@dataclass(frozen=True)
class Place:
    gateway: Gateway
    provider: FakeProvider


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    """A provider and a gateway that knows it, for the whole file."""
    fake = FakeProvider()
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", fake.configuration)
    app.router.add_get("/authorization_endpoint", fake.authorize)
    app.router.add_post("/token_endpoint", fake.token)
    app.router.add_get("/jwks_uri", fake.jwks)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    settings = {"oidc_issuer": fake.url, "oidc_client_id": CLIENT, "oidc_client_secret": SECRET}
    grants = "press ops=demo:operator, devs=nobody:viewer"
    async with running_console(tmp_path_factory.mktemp("gateway"), oidc_grants=grants, **settings) as gateway:
        yield Place(gateway, fake)
    await runner.cleanup()


@pytest.fixture
def gateway(place: Place) -> Gateway:
    return place.gateway


@pytest.fixture
def provider(place: Place) -> FakeProvider:
    """It knows a person of whom the console has not heard yet."""
    name = secrets.token_hex(4)
    place.provider.claims = {"sub": name, "email": f"{name}@example.com", "email_verified": True, "groups": []}
    place.provider.spoil, place.provider.methods = (lambda claims: claims), ("client_secret_basic",)
    return place.provider


async def go(browser: Browser, back: str = "") -> Answer:
    """To the provider and back, as a browser is led; what the console answers in the end."""
    started = await browser.request("GET", f"/console/sign-in/oidc{back}")
    assert started.status == 303, started.words
    async with aiohttp.ClientSession() as http, http.get(started.location, allow_redirects=False) as answer:
        location = answer.headers["Location"]
    assert location.startswith(browser.gateway.url + CALLBACK)
    return await browser.request("GET", location.removeprefix(browser.gateway.url))


async def is_signed_in(browser: Browser) -> bool:
    return (await browser.request("GET", "/console/account")).status == 200


async def test_an_invited_person_signs_in_and_is_known_again(gateway: Gateway, provider: FakeProvider) -> None:
    db, browser = gateway.services.db, Browser(gateway)
    user = await add_user(db, "demo", provider.email, Role.ADMIN)
    assert "Sign in with your organisation" in (await browser.get("/console/sign-in")).words
    answer = await go(browser, "?next=%2Fconsole%2Faccount")
    assert (answer.status, answer.location) == (303, "/console/account")
    assert user.email in (await browser.get("/console/account")).words
    provider.claims["email"] = "ada@married.example"  # the subject counts from now on
    again = Browser(gateway)
    assert (await go(again)).location == "/console/"
    assert user.email in (await again.get("/console/account")).words
    account = await find_account(db, email=user.email)
    assert account is not None
    assert account.user.public_id == user.public_id
    assert account.user.oidc_subject == f"{provider.url} {provider.claims['sub']}"


@pytest.mark.parametrize("method", ["client_secret_basic", "client_secret_post"])
async def test_the_secret_goes_where_the_provider_wants_it(
    gateway: Gateway, provider: FakeProvider, method: str
) -> None:
    provider.methods = (method,)
    asker, back, verifier = provider_of(gateway.services.settings), gateway.url + CALLBACK, "v" * 43
    assert asker is not None
    url = await asker.sign_in_url(back, "state", "nonce", verifier)
    async with aiohttp.ClientSession() as http, http.get(url, allow_redirects=False) as answer:
        [code] = parse_qs(urlsplit(answer.headers["Location"]).query)["code"]
    identity = await asker.identity(code, back, "nonce", verifier)
    assert identity == Identity(f"{provider.url} {provider.claims['sub']}", provider.email, ())


@pytest.mark.parametrize(
    "claims",
    [
        {"email": "stranger@example.com"},
        {"email_verified": False},
        {"email_verified": "true"},
        {"email": None},
        {"email": "stranger@example.com", "groups": ["devs"]},
        {"email": "stranger@example.com", "groups": "others"},
    ],
)
async def test_whoever_is_not_invited_stays_out(
    gateway: Gateway, provider: FakeProvider, claims: dict[str, Any]
) -> None:
    await add_user(gateway.services.db, "demo", provider.email, Role.ADMIN)
    provider.claims.update(claims)
    browser = Browser(gateway)
    assert (await go(browser)).status == 403
    assert not await is_signed_in(browser)


async def test_a_group_may_come_in_without_an_invitation(gateway: Gateway, provider: FakeProvider) -> None:
    provider.claims["groups"] = ["devs too", "press ops"]
    assert (await go(Browser(gateway))).status == 303
    account = await find_account(gateway.services.db, email=provider.email)
    assert account is not None
    assert (account.user.tenant, account.user.role) == ("demo", Role.OPERATOR)


async def test_a_disabled_user_stays_out(gateway: Gateway, provider: FakeProvider) -> None:
    user = await add_user(gateway.services.db, "demo", provider.email, Role.ADMIN)
    await disable_user(gateway.services.db, user.public_id)
    assert (await go(Browser(gateway))).status == 403


async def test_another_identity_of_the_same_address_stays_out(gateway: Gateway, provider: FakeProvider) -> None:
    await add_user(gateway.services.db, "demo", provider.email, Role.ADMIN)
    assert (await go(Browser(gateway))).status == 303
    provider.claims["sub"] = "somebody-else"
    assert (await go(Browser(gateway))).status == 403


def other_signature(claims: dict[str, Any]) -> str:
    return jwt.encode({"alg": "RS256", "kid": "one"}, claims, RSAKey.generate_key(2048, {"kid": "one"}))


def secret_signature(claims: dict[str, Any]) -> str:
    return jwt.encode({"alg": "HS256"}, claims, OctKey.import_key(SECRET * 6))


SPOILS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "issuer": lambda claims: {**claims, "iss": "https://elsewhere.example"},
    "audience": lambda claims: {**claims, "aud": "another"},
    "audiences without the party": lambda claims: {**claims, "aud": [CLIENT, "another"]},
    "expired": lambda claims: {**claims, "exp": 1},
    "future": lambda claims: {**claims, "iat": claims["iat"] + 3600},
    "nonce": lambda claims: {**claims, "nonce": "x"},
    "no nonce": lambda claims: {name: value for name, value in claims.items() if name != "nonce"},
    "no subject": lambda claims: {name: value for name, value in claims.items() if name != "sub"},
    "long subject": lambda claims: {**claims, "sub": "x" * 300},
    "another key": other_signature,
    "a secret": secret_signature,
    "no signature": lambda _claims: "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZGEtMSJ9.",
    "no token": lambda _claims: "",
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
async def test_a_token_that_is_not_right_signs_nobody_in(
    gateway: Gateway, provider: FakeProvider, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    await add_user(gateway.services.db, "demo", provider.email, Role.ADMIN)
    provider.spoil = spoil
    browser = Browser(gateway)
    answer = await go(browser)
    assert answer.status == 403, answer.words
    assert not await is_signed_in(browser)


async def test_nobody_has_the_provider_asked_without_end(
    gateway: Gateway, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sign_in, "ADDRESS_ATTEMPTS", 2)
    async with gateway.services.db.write() as session:
        await session.execute(delete(AttemptRow))  # of other tests
    await add_user(gateway.services.db, "demo", provider.email, Role.ADMIN)
    for _ in range(3):
        assert (await go(Browser(gateway))).status == 303, "what is right does not count"
    provider.spoil = SPOILS["nonce"]
    assert [(await go(Browser(gateway))).status for _ in range(3)] == [403, 403, 429]


async def test_a_new_key_of_the_provider_is_taken(gateway: Gateway, provider: FakeProvider) -> None:
    await add_user(gateway.services.db, "demo", provider.email, Role.ADMIN)
    assert (await go(Browser(gateway))).status == 303
    provider.keys = [RSAKey.generate_key(2048, {"kid": "two", "use": "sig"})]
    assert (await go(Browser(gateway))).status == 303


async def test_a_code_of_another_browser_or_twice_signs_nobody_in(gateway: Gateway, provider: FakeProvider) -> None:
    await add_user(gateway.services.db, "demo", provider.email, Role.ADMIN)
    attacker, victim = Browser(gateway), Browser(gateway)
    await victim.get("/console/sign-in")
    started = await attacker.request("GET", "/console/sign-in/oidc")
    async with aiohttp.ClientSession() as http, http.get(started.location, allow_redirects=False) as answer:
        back = answer.headers["Location"].removeprefix(gateway.url)
    assert (await victim.request("GET", back)).status == 403
    assert not await is_signed_in(victim)
    assert (await attacker.request("GET", back)).status == 303
    assert (await attacker.request("GET", back)).status == 403
    refused = f"{CALLBACK}?error=access_denied&state={parse_qs(urlsplit(back).query)['state'][0]}"
    assert (await attacker.request("GET", refused)).status == 403


async def test_a_provider_that_is_another_or_away_is_told(
    gateway: Gateway, provider: FakeProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = gateway.services.settings
    monkeypatch.setattr(provider, "issuer", "https://elsewhere.example")
    for issuer in (provider.url, "http://127.0.0.1:9"):
        another = provider_of(msgspec.structs.replace(settings, oidc_issuer=issuer))
        assert another is not None
        with pytest.raises(UnavailableError):
            await another.sign_in_url(gateway.url, "state", "nonce", "verifier")


@pytest.mark.parametrize("text", ["devs", "devs=acme", "devs=acme:caller", "=acme:admin", "devs=:admin"])
async def test_grants_that_are_none_stop_the_start(text: str) -> None:
    with pytest.raises(SettingsError, match="STENCILPRESS_OIDC_GRANTS"):
        read_grants(text)
