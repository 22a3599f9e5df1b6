"""People in the catalog: who is who, links that work once, and attempts that are counted for all gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from stencilpress.gateway.access import Actor, Role
from stencilpress.gateway.accounts import sign_in as signing
from stencilpress.gateway.accounts.links import OPERATORS, find_link, first_path, invite, reset_link, use_link
from stencilpress.gateway.accounts.passwords import MAX_WAITING, Passwords, check_password
from stencilpress.gateway.accounts.sign_in import ACCOUNT_ATTEMPTS, SignInError, sign_in
from stencilpress.gateway.catalog import users
from stencilpress.gateway.catalog.account_models import AttemptRow, OneTimeLinkRow
from stencilpress.gateway.catalog.audit import list_audit
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant, disable_tenant
from stencilpress.gateway.catalog.users import (
    User,
    add_user,
    bind_subject,
    change_role,
    check_email,
    disable_user,
    find_account,
    get_user,
    list_users,
    set_password,
)
from stencilpress.gateway.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
)

PASSWORD = "correct horse battery staple"


@pytest.fixture
async def passwords() -> AsyncIterator[Passwords]:
    hasher = Passwords()
    yield hasher
    hasher.close()


async def tenant_admin(db: Database, name: str = "acme") -> Actor:
    return Actor("user:admin@acme.example", Role.ADMIN, (await create_tenant(db, name)).id)


async def user_with_password(db: Database, passwords: Passwords, email: str = "ada@example.com") -> User:
    await create_tenant(db, "acme")
    user = await add_user(db, "acme", email, Role.ADMIN)
    await set_password(db, user.public_id, await passwords.hash(PASSWORD))
    return user


async def test_an_address_has_one_user_whatever_its_case(db: Database) -> None:
    await create_tenant(db, "acme")
    user = await add_user(db, "acme", " Ada@Example.COM ", Role.VIEWER)
    assert user.email == "ada@example.com"
    await create_tenant(db, "other")
    with pytest.raises(ConflictError, match="belongs to a user already"):
        await add_user(db, "other", "ADA@example.com", Role.VIEWER)
    account = await find_account(db, email="aDa@example.com")
    assert account is not None
    assert account.user == user
    [entry] = await list_audit(db, target=f"user:{user.public_id}")
    assert (entry.action, entry.tenant) == ("user.create", "acme")


@pytest.mark.parametrize(
    "email",
    [
        "",
        "ada",
        "ada@",
        "@example.com",
        "a b@example.com",
        "ada@exa\nmple.com",
        "<i>@example.com",
        "x" * 250 + "@e.com",
    ],
)
def test_what_is_no_address_is_refused(email: str) -> None:
    with pytest.raises(InvalidRequestError, match="email"):
        check_email(email)


async def test_a_user_is_added_to_a_tenant_in_force(db: Database) -> None:
    with pytest.raises(NotFoundError):
        await add_user(db, "nobody", "a@example.com", Role.VIEWER)
    await create_tenant(db, "acme")
    await disable_tenant(db, "acme")
    with pytest.raises(ConflictError):
        await add_user(db, "acme", "a@example.com", Role.VIEWER)


async def test_an_admin_has_no_power_over_operators_and_other_tenants(db: Database) -> None:
    admin = await tenant_admin(db)
    await create_tenant(db, "other")
    operator = await add_user(db, "acme", "op@example.com", Role.OPERATOR)
    foreign = await add_user(db, "other", "foreign@example.com", Role.VIEWER)
    own = await add_user(db, "acme", "own@example.com", Role.VIEWER, actor=admin)
    with pytest.raises(PermissionDeniedError):
        await add_user(db, "acme", "more@example.com", Role.OPERATOR, actor=admin)
    with pytest.raises(PermissionDeniedError):
        await change_role(db, own.public_id, Role.OPERATOR, actor=admin)
    with pytest.raises(InvalidRequestError):
        await change_role(db, own.public_id, Role.CALLER)
    for hidden in (operator, foreign):
        for work in (get_user, disable_user, reset_link):
            with pytest.raises(NotFoundError):
                await work(db, hidden.public_id, actor=admin)
    assert await list_users(db, "acme", actor=admin) == (own,)
    assert [user.email for user in await list_users(db)] == [
        "foreign@example.com",
        "op@example.com",
        "own@example.com",
    ]


async def test_an_invitation_sets_a_password_once(db: Database, passwords: Passwords) -> None:
    await create_tenant(db, "acme")
    user, path = await invite(db, "acme", "ada@example.com", Role.VIEWER)
    token = path.rpartition("/")[2]
    assert not user.has_password
    assert (await find_link(db, token)).email == user.email
    with pytest.raises(InvalidRequestError, match="password"):
        await use_link(db, passwords, token, "short", "", source="")
    assert await use_link(db, passwords, token, PASSWORD, "someone@else.example", source="") == user.email
    for _ in range(2):
        with pytest.raises(NotFoundError):
            await use_link(db, passwords, token, PASSWORD, "", source="")
    assert (await sign_in(db, passwords, user.email, PASSWORD, "10.0.0.1")).public_id == user.public_id


async def test_one_link_redeemed_twice_at_once_works_once(db: Database, passwords: Passwords) -> None:
    await create_tenant(db, "acme")
    _, path = await invite(db, "acme", "ada@example.com", Role.VIEWER)
    token = path.rpartition("/")[2]
    tries = [use_link(db, passwords, token, f"{PASSWORD} {number}", "", source="") for number in range(3)]
    done = await asyncio.gather(*tries, return_exceptions=True)
    assert [type(one) for one in done].count(str) == 1
    assert [type(one) for one in done].count(NotFoundError) == 2


@pytest.mark.parametrize("token", ["", "x" * 43, "../etc", "x" * 10_000])
async def test_a_link_that_never_was_is_gone(db: Database, token: str) -> None:
    with pytest.raises(NotFoundError):
        await find_link(db, token)


async def test_links_expire_and_give_way_to_newer_ones(db: Database, passwords: Passwords) -> None:
    user = await user_with_password(db, passwords)
    _, first = await reset_link(db, user.public_id)
    _, second = await reset_link(db, user.public_id)
    with pytest.raises(NotFoundError):
        await find_link(db, first.rpartition("/")[2])
    token = second.rpartition("/")[2]
    assert (await find_link(db, token)).kind == "reset"
    async with db.write() as session:
        await session.execute(update(OneTimeLinkRow).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    with pytest.raises(NotFoundError):
        await use_link(db, passwords, token, PASSWORD, "", source="")


async def test_who_sent_the_invitation_does_not_share_the_account_that_another_service_binds(
    db: Database, passwords: Passwords
) -> None:
    user = await user_with_password(db, passwords)
    _, path = await reset_link(db, user.public_id)
    operator = await add_user(db, "acme", "op@example.com", Role.OPERATOR)
    await set_password(db, operator.public_id, await passwords.hash(PASSWORD))
    for one in (user, operator):
        await bind_subject(db, one.public_id, f"https://login.example {one.public_id}")
    with pytest.raises(SignInError):
        await sign_in(db, passwords, user.email, PASSWORD, "10.0.0.1")
    with pytest.raises(NotFoundError):
        await use_link(db, passwords, path.rpartition("/")[2], PASSWORD, "", source="")
    await sign_in(db, passwords, operator.email, PASSWORD, "10.0.0.1")


async def test_a_tenant_has_so_many_users(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await create_tenant(db, "acme")
    monkeypatch.setattr(users, "MAX_USERS", 2)
    for number in range(2):
        await add_user(db, "acme", f"u{number}@example.com", Role.VIEWER)
    with pytest.raises(ConflictError, match="2 users already"):
        await add_user(db, "acme", "more@example.com", Role.VIEWER)


async def test_a_disabled_user_cannot_come_back_by_a_link(db: Database, passwords: Passwords) -> None:
    user = await user_with_password(db, passwords)
    _, path = await reset_link(db, user.public_id)
    await disable_user(db, user.public_id)
    with pytest.raises(NotFoundError):
        await use_link(db, passwords, path.rpartition("/")[2], PASSWORD, "", source="")


async def test_the_first_user_is_made_by_a_link_and_only_the_first(db: Database, passwords: Passwords) -> None:
    first, second = [(await first_path(db, None)).rpartition("/")[2] for _ in range(2)]
    with pytest.raises(InvalidRequestError, match="email"):
        await use_link(db, passwords, first, PASSWORD, "nonsense", source="")
    assert await use_link(db, passwords, first, PASSWORD, "op@example.com", source="10.0.0.1") == "op@example.com"
    with pytest.raises(NotFoundError):
        await use_link(db, passwords, second, PASSWORD, "more@example.com", source="")
    account = await find_account(db, email="op@example.com")
    assert account is not None
    assert (account.user.role, account.user.tenant) == (Role.OPERATOR, OPERATORS)
    assert await first_path(db, None) == "/console/"
    actions = [(entry.action, entry.actor) for entry in await list_audit(db, target=f"user:{account.user.public_id}")]
    assert actions == [("user.password", "user:op@example.com"), ("user.create", "user:op@example.com")]


async def test_a_first_link_comes_too_late_once_there_are_users(db: Database, passwords: Passwords) -> None:
    token = (await first_path(db, None)).rpartition("/")[2]
    await add_user(db, OPERATORS, "cli@example.com", Role.OPERATOR)
    with pytest.raises(ConflictError):
        await use_link(db, passwords, token, PASSWORD, "late@example.com", source="")
    assert await find_account(db, email="late@example.com") is None


async def test_without_its_tenant_there_is_no_first_link(db: Database) -> None:
    await first_path(db, None)
    await delete_tenant(db, OPERATORS)
    assert await first_path(db, None) == "/console/"


async def test_refusals_are_the_same_and_cost_the_same(
    db: Database, passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await user_with_password(db, passwords)
    await add_user(db, "acme", "invited@example.com", Role.VIEWER)
    gone = await add_user(db, "acme", "disabled@example.com", Role.VIEWER)
    await set_password(db, gone.public_id, await passwords.hash(PASSWORD))
    await disable_user(db, gone.public_id)
    verified: list[str] = []
    compare = passwords._matches

    def counted(kept: str, given: str) -> bool:
        verified.append(given)
        return compare(kept, given)

    monkeypatch.setattr(passwords, "_matches", counted)
    tries = [(user.email, "wrong " * 3), ("nobody@example.com", PASSWORD)]
    tries += [("invited@example.com", PASSWORD), (gone.email, PASSWORD), ("", ""), ("x" * 5000, "y" * 5000)]
    for count, (email, password) in enumerate(tries, 1):
        with pytest.raises(SignInError) as refused:
            await sign_in(db, passwords, email, password, "10.0.0.1")
        assert str(refused.value) == str(SignInError())
        assert len(verified) == count


async def test_attempts_of_an_account_are_limited_whatever_the_address(db: Database, passwords: Passwords) -> None:
    user = await user_with_password(db, passwords)
    for number in range(ACCOUNT_ATTEMPTS):
        with pytest.raises(SignInError):
            await sign_in(db, passwords, user.email.upper(), "wrong", f"10.0.0.{number}")
    for number in range(3):
        with pytest.raises(RateLimitError) as limited:
            await sign_in(db, passwords, user.email, PASSWORD, f"10.0.1.{number}")
        assert 0 < int(limited.value.headers["Retry-After"]) <= signing.WINDOW.total_seconds()
    entries = [entry for entry in await list_audit(db) if entry.action == "user.attempts_refused"]
    assert [(entry.target, entry.tenant) for entry in entries] == [(f"user:{user.public_id}", "acme")]
    async with db.write() as session:
        await session.execute(update(AttemptRow).values(window_ends_at=datetime.now(UTC)))
    assert await sign_in(db, passwords, user.email, PASSWORD, "10.0.0.1") == await get_user(db, user.public_id)


async def test_attempts_of_an_address_are_limited_whatever_the_account(
    db: Database, passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "ADDRESS_ATTEMPTS", 3)
    user = await user_with_password(db, passwords)
    for number in range(3):
        await sign_in(db, passwords, user.email, PASSWORD, f"2001:db8::{number}")
        with pytest.raises(SignInError):
            await sign_in(db, passwords, f"{number}@example.com", "wrong", f"2001:db8::{number}")
    with pytest.raises(RateLimitError):
        await sign_in(db, passwords, user.email, PASSWORD, "2001:db8::ffff")
    assert await sign_in(db, passwords, user.email, PASSWORD, "2001:db8:1::1") == await get_user(db, user.public_id)


async def test_attempts_at_the_same_moment_count(
    db: Database, passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing, "ACCOUNT_ATTEMPTS", 3)
    tries = [sign_in(db, passwords, "ada@example.com", "wrong", "10.0.0.1") for _ in range(8)]
    kinds = [type(one) for one in await asyncio.gather(*tries, return_exceptions=True)]
    assert (kinds.count(SignInError), kinds.count(RateLimitError)) == (3, 5)


async def test_success_forgives_an_account(db: Database, passwords: Passwords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "ACCOUNT_ATTEMPTS", 2)
    user = await user_with_password(db, passwords)
    for _ in range(2):
        with pytest.raises(SignInError):
            await sign_in(db, passwords, user.email, "wrong", "10.0.0.1")
        await sign_in(db, passwords, user.email, PASSWORD, "10.0.0.1")


async def test_a_hash_of_older_parameters_is_made_anew(
    db: Database, passwords: Passwords, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = await user_with_password(db, passwords)
    before = await find_account(db, email=user.email)
    monkeypatch.setattr("stencilpress.gateway.accounts.passwords.MEMORY_KIB", 8 << 10)
    later = Passwords()
    try:
        await sign_in(db, later, user.email, PASSWORD, "10.0.0.1")
        after = await find_account(db, email=user.email)
        assert before is not None
        assert after is not None
        assert after.password_hash != before.password_hash
        assert "m=8192" in str(after.password_hash)
        await sign_in(db, later, user.email, PASSWORD, "10.0.0.1")
    finally:
        later.close()


async def test_hashes_are_argon2id_and_few_run_at_once(passwords: Passwords) -> None:
    assert (await passwords.hash(PASSWORD)).startswith("$argon2id$v=19$m=19456,t=2,p=1$")
    waiting = [passwords.hash(PASSWORD) for _ in range(MAX_WAITING + 5)]
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(one) for one in done].count(OverloadedError) == 5
    assert (await passwords.hash(PASSWORD)).startswith("$argon2id$")


@pytest.mark.parametrize(
    "password", ["short", "x" * 257, "a" * 12, "abababababab", "ada@example.com", "ADA@example.com"]
)
def test_a_password_that_is_no_good_is_refused(password: str) -> None:
    with pytest.raises(InvalidRequestError, match="password"):
        check_password(password, "ada@example.com")


async def test_a_password_is_the_same_however_it_was_typed(passwords: Passwords) -> None:
    composed, decomposed = "Gr\u00fc\u00dfe aus Wien!", "Gru\u0308\u00dfe aus Wien!"
    assert await passwords.verify(await passwords.hash(check_password(composed)), decomposed)
