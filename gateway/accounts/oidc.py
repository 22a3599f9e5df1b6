"""Signing in through an OpenID Connect provider: authorization code flow with PKCE, state and nonce.

Of OpenID Connect Core 1.0 it takes discovery, the code flow and the ID token; the checks are authlib's and joserfc's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.access import Actor, Role
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.users import Account, add_user, bind_subject, find_account
from stencilpress.gateway.errors import ApiError, ConflictError, NotFoundError, UnavailableError
from stencilpress.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519")
"""Signatures alone: a token signed with a secret, or not at all, is refused."""
LIMIT_S = 10.0
"""For each question to the provider."""
FRESH_S = 3600.0
"""How long what the provider says of itself is believed; keys that are not known are asked for at once."""
LEEWAY_S = 60
"""By how much clocks may differ."""
MAX_SUBJECT_CHARS = 255


class IdentityError(ApiError):
    """The provider's answer signs nobody in. The text is for the person; the cause is for the log."""

    status = 403
    type = "permission_error"
    code = "identity_refused"


@dataclass(frozen=True, slots=True)
class Grant:
    """Members of a group may come in without an invitation."""

    group: str
    tenant: str
    role: Role


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom an ID token is about. ``email`` is "" unless the provider has verified it."""

    subject: str
    email: str
    groups: tuple[str, ...]


def read_grants(text: str) -> tuple[Grant, ...]:
    """``group=tenant:role`` separated by commas. Raises :class:`SettingsError`."""
    grants: list[Grant] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        group, _, rest = part.rpartition("=")
        tenant, _, role = rest.partition(":")
        if not group or not tenant or role not in ("operator", "admin", "viewer"):
            raise SettingsError(f"STENCILPRESS_OIDC_GRANTS: {part!r} is not group=tenant:role")
        grants.append(Grant(group, tenant, Role(role)))
    return tuple(grants)


def provider_of(settings: GatewaySettings) -> Provider | None:
    """The provider that is configured. Raises :class:`SettingsError`."""
    grants = read_grants(settings.oidc_grants)
    if not settings.oidc_issuer:
        return None
    if not settings.oidc_client_id:
        raise SettingsError("STENCILPRESS_OIDC_ISSUER needs STENCILPRESS_OIDC_CLIENT_ID")
    if not settings.oidc_issuer.startswith(("https://", "http://localhost", "http://127.0.0.1")):
        raise SettingsError("STENCILPRESS_OIDC_ISSUER must begin with https://")
    try:
        import authlib  # noqa: F401
    except ImportError:
        raise SettingsError("STENCILPRESS_OIDC_ISSUER needs `pip install stencilpress[oidc]`") from None
    return Provider(settings, grants)


class Provider:
    """One provider, asked over HTTP."""

    def __init__(self, settings: GatewaySettings, grants: tuple[Grant, ...]) -> None:
        self._settings = settings
        self.grants = grants
        self._facts: tuple[float, Mapping[str, Any]] = (float("-inf"), {})
        self._keys: KeySet | None = None

    async def sign_in_url(self, redirect_uri: str, state: str, nonce: str, verifier: str) -> str:
        """Where the browser goes. Raises :class:`UnavailableError`."""
        from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
        from authlib.oauth2.rfc7636 import create_s256_code_challenge

        facts = await self._discovered()
        url: str = prepare_grant_uri(
            facts["authorization_endpoint"],
            client_id=self._settings.oidc_client_id,
            response_type="code",
            redirect_uri=redirect_uri,
            scope=self._settings.oidc_scope,
            state=state,
            nonce=nonce,
            code_challenge=create_s256_code_challenge(verifier),
            code_challenge_method="S256",
        )
        return url

    async def identity(self, code: str, redirect_uri: str, nonce: str, verifier: str) -> Identity:
        """Whom a code stands for. Raises :class:`IdentityError`, :class:`UnavailableError`."""
        facts = await self._discovered()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "client_id": self._settings.oidc_client_id,
            "code_verifier": verifier,
        }
        headers = {"Accept": "application/json"}
        secret = self._settings.oidc_client_secret
        if secret and facts.get("token_endpoint_auth_methods_supported", ["client_secret_basic"]) == [
            "client_secret_post"
        ]:
            form["client_secret"] = secret
        elif secret:
            headers["Authorization"] = aiohttp.encode_basic_auth(self._settings.oidc_client_id, secret)
        answer = await _ask("POST", facts["token_endpoint"], data=form, headers=headers)
        claims = await self._claims(answer.get("id_token", ""), answer.get("access_token"), nonce, facts)
        return self._to_identity(claims, facts["issuer"])

    async def _claims(self, token: str, access_token: Any, nonce: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """The claims of an ID token that passes all checks. Raises :class:`IdentityError`."""
        from authlib.oidc.core import CodeIDToken
        from joserfc import jwt
        from joserfc.errors import InvalidKeyIdError, JoseError

        expected = {"iss": {"essential": True, "value": facts["issuer"]}}
        expected["aud"] = {"essential": True, "value": self._settings.oidc_client_id}
        params = {"nonce": nonce, "client_id": self._settings.oidc_client_id, "access_token": access_token}
        try:
            try:
                decoded = jwt.decode(token, await self._key_set(facts, fresh=False), algorithms=ALGORITHMS)
            except (InvalidKeyIdError, ValueError):  # a key of which we have not heard yet
                decoded = jwt.decode(token, await self._key_set(facts, fresh=True), algorithms=ALGORITHMS)
            claims = CodeIDToken(decoded.claims, decoded.header, expected, params)
            claims.validate(leeway=LEEWAY_S)
        except (JoseError, ValueError) as error:
            raise IdentityError("The identity provider's answer is not valid; try again.") from error
        return decoded.claims

    async def _key_set(self, facts: Mapping[str, Any], *, fresh: bool) -> KeySet:
        from joserfc.jwk import KeySet

        if self._keys is None or fresh:
            self._keys = KeySet.import_key_set(await _ask("GET", facts["jwks_uri"]))  # type: ignore[arg-type]
        return self._keys

    async def _discovered(self) -> Mapping[str, Any]:
        asked_at, facts = self._facts
        if time.monotonic() - asked_at < FRESH_S:
            return facts
        issuer = self._settings.oidc_issuer.rstrip("/")
        facts = await _ask("GET", f"{issuer}/.well-known/openid-configuration")
        wanted = ("issuer", "authorization_endpoint", "token_endpoint", "jwks_uri")
        if not all(isinstance(facts.get(name), str) for name in wanted) or facts["issuer"].rstrip("/") != issuer:
            raise UnavailableError("The identity provider does not describe itself as it should.")
        self._facts, self._keys = (time.monotonic(), facts), None
        return facts

    def _to_identity(self, claims: Mapping[str, Any], issuer: str) -> Identity:
        subject = f"{issuer} {claims['sub']}"
        if len(subject) > MAX_SUBJECT_CHARS:
            raise IdentityError("The identity provider's name for you is too long.")
        verified = claims.get("email_verified") is True and isinstance(claims.get("email"), str)
        groups = claims.get(self._settings.oidc_groups_claim, [])
        groups = [groups] if isinstance(groups, str) else groups if isinstance(groups, list) else []
        return Identity(subject, claims["email"] if verified else "", tuple(map(str, groups)))


async def account_of(db: Database, identity: Identity, grants: tuple[Grant, ...], *, source: str) -> Account:
    """The user whom an identity means: bound to it before, or of its verified address, or let in by a group.

    Raises :class:`IdentityError`.
    """
    account = await find_account(db, oidc_subject=identity.subject)
    if account is None and identity.email:
        account = await find_account(db, email=identity.email) or await _let_in(db, identity, grants, source)
        if account is not None and account.user.oidc_subject is None:
            actor = Actor(f"user:{account.user.email}", account.user.role, account.user.tenant_id, source=source)
            await bind_subject(db, account.user.public_id, identity.subject, actor=actor)
        elif account is not None:
            raise IdentityError("Another identity signs in as this user already; ask an administrator.")
    if account is None:
        raise IdentityError("Nobody has invited you yet; ask an administrator of your tenant.")
    if not account.in_force:
        raise IdentityError("This account is disabled.")
    return account


async def _let_in(db: Database, identity: Identity, grants: tuple[Grant, ...], source: str) -> Account | None:
    grant = next((grant for grant in grants if grant.group in identity.groups), None)
    if grant is None:
        return None
    try:
        await add_user(
            db, grant.tenant, identity.email, grant.role, actor=Actor("system", Role.OPERATOR, source=source)
        )
    except (NotFoundError, ConflictError) as error:
        raise IdentityError("Your group's tenant does not exist or is disabled; ask an operator.") from error
    return await find_account(db, email=identity.email)


async def _ask(method: str, url: str, **options: Any) -> dict[str, Any]:
    """The JSON object that the provider answers. Raises :class:`IdentityError`, :class:`UnavailableError`."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as http,
            http.request(method, url, allow_redirects=False, **options) as answer,
        ):
            if 400 <= answer.status < 500:
                raise IdentityError("The identity provider did not confirm the sign-in; try again.")
            body = await answer.json(content_type=None) if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UnavailableError("The identity provider does not answer; try again shortly.") from error
    if not isinstance(body, dict):
        raise UnavailableError("The identity provider does not answer as it should; try again shortly.")
    return body
