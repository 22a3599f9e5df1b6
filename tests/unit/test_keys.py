"""API keys: one answer to everything that is no good key, and no secret at rest."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sqlite3
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import update

from stencilpress.gateway.catalog.credentials import get_key, insert_key, list_keys, revoke_key
from stencilpress.gateway.catalog.models import KeyRow
from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant, disable_tenant
from stencilpress.gateway.changes import STALE_S, Changes
from stencilpress.gateway.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PastExpiryError,
    UnavailableError,
)
from stencilpress.gateway.keys import IssuedKey, KeyRing, change_key, issue_key


@pytest.fixture
async def issued(db: Database) -> IssuedKey:
    await create_tenant(db, "acme")
    return await issue_key(db, "acme", "ci")


class Clock:
    """A time that stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


async def ring_of(db: Database, clock: Clock | None = None) -> KeyRing:
    """A ring that has heard from the catalog once and will not ask again by itself."""
    changes = Changes(db, clock or Clock())
    await changes.poll()
    return KeyRing(db, changes)


async def refusal(ring: KeyRing, token: str) -> bytes:
    with pytest.raises(AuthenticationError) as caught:
        await ring.authenticate(token)
    return caught.value.body()


async def test_a_key_names_its_tenant_and_nobody_elses(db: Database, issued: IssuedKey) -> None:
    other = await create_tenant(db, "other")
    foreign = await issue_key(db, "other")
    ring = await ring_of(db)
    mine = await ring.authenticate(issued.token)
    theirs = await ring.authenticate(foreign.token)
    assert (mine.tenant, mine.key_id) == ("acme", issued.key.public_id)
    assert (theirs.tenant_id, theirs.salt) == (other.id, other.prefix_salt)
    assert mine.salt != theirs.salt


async def expired_key(db: Database, tenant: str) -> IssuedKey:
    """A key that was good once."""
    issued = await issue_key(db, tenant, expires_at=datetime.now(UTC) + timedelta(hours=1))
    async with db.write() as session:
        mine = update(KeyRow).where(KeyRow.public_id == issued.key.public_id)
        await session.execute(mine.values(expires_at=datetime.now(UTC)))
    return issued


async def test_every_bad_key_gets_the_same_answer(db: Database, issued: IssuedKey) -> None:
    await create_tenant(db, "gone")
    disabled, expired = await issue_key(db, "gone"), await expired_key(db, "acme")
    revoked = await issue_key(db, "acme")
    await disable_tenant(db, "gone")
    await revoke_key(db, revoked.key.public_id)
    prefix, public_id, secret = issued.token.split("_")
    flipped = secret[:-1] + ("A" if secret[-1] != "A" else "B")
    bad = [
        "",
        "sk-wrong",
        "' OR '1'='1",
        f"{prefix}_{public_id}_' OR 1=1 --{secret[12:]}",
        f"{prefix}_{'%' * 12}_{secret}",
        f"{prefix}_{public_id}_{flipped}",
        f"{prefix}_{'0' * 12}_{secret}",
        issued.token + "\n",
        issued.token + "\0",
        issued.token.upper(),
        "x" * 1_000_000,
        "sp_" + "é" * 12 + "_" + secret,
        disabled.token,
        expired.token,
        revoked.token,
    ]
    ring = await ring_of(db)
    assert len({await refusal(ring, token) for token in bad}) == 1
    assert (await ring.authenticate(issued.token)).tenant == "acme"


async def test_a_hash_copied_to_another_row_opens_nothing(db: Database, issued: IssuedKey) -> None:
    _, public_id, secret = issued.token.split("_")
    stolen = hashlib.sha256(f"{public_id}_{secret}".encode()).digest()
    await insert_key(db, dataclasses.replace(issued.key, public_id="a" * 12), stolen)
    await refusal(await ring_of(db), f"sp_{'a' * 12}_{secret}")


def stored_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


async def test_the_secret_is_not_in_the_database(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    async with Database(f"sqlite:///{path}") as database:
        await migrate(database)
        await create_tenant(database, "acme")
        issued = await issue_key(database, "acme")
        stored = stored_bytes(tmp_path)
    secret = issued.token.split("_")[2]
    assert issued.key.public_id.encode() in stored
    assert secret.encode() not in stored
    assert secret[:16].encode() not in stored
    with sqlite3.connect(path) as raw:
        kept = raw.execute("SELECT secret_hash, last_four FROM api_keys").fetchone()
    raw.close()
    assert kept == (hashlib.sha256(issued.token.removeprefix("sp_").encode()).digest(), issued.token[-4:])
    assert issued.token not in repr(issued.key)


def test_a_secret_has_256_bits() -> None:
    assert 62**43 > 2**256


async def test_keys_are_long_random_and_different(db: Database) -> None:
    await create_tenant(db, "acme")
    tokens = [(await issue_key(db, "acme")).token for _ in range(8)]
    assert len({token.split("_")[2] for token in tokens}) == len({token.split("_")[1] for token in tokens}) == 8
    assert all(re.fullmatch(r"sp_[a-z0-9]{12}_[A-Za-z0-9]{43}", token) for token in tokens)


async def test_a_known_key_costs_no_sql_until_its_tenant_changes(db: Database, issued: IssuedKey) -> None:
    ring = await ring_of(db)
    await ring.authenticate(issued.token)
    await revoke_key(db, issued.key.public_id)
    await create_tenant(db, "another")
    assert (await ring.authenticate(issued.token)).tenant == "acme"
    await ring._changes.poll()
    await refusal(ring, issued.token)


async def test_without_word_from_the_catalog_a_key_is_remembered_for_a_second(db: Database, issued: IssuedKey) -> None:
    clock = Clock()
    ring = await ring_of(db, clock)
    await ring.authenticate(issued.token)
    await revoke_key(db, issued.key.public_id)
    clock.now = 0.9
    await ring.authenticate(issued.token)
    clock.now = 1.0
    await refusal(ring, issued.token)


async def test_a_cached_key_expires_on_time(db: Database) -> None:
    await create_tenant(db, "acme")
    issued = await issue_key(db, "acme", expires_at=datetime.now(UTC) + timedelta(hours=1))
    ring = await ring_of(db)
    assert (await ring.authenticate(issued.token)).tenant == "acme"
    past = await expired_key(db, "acme")
    await refusal(ring, past.token)


@pytest.mark.parametrize("ago", [timedelta(), timedelta(seconds=1), timedelta(days=9000)])
async def test_nothing_expires_before_it_is_made(db: Database, issued: IssuedKey, ago: timedelta) -> None:
    past = (datetime.now(UTC) - ago).astimezone(timezone(timedelta(hours=9)))
    for asked in (
        issue_key(db, "acme", expires_at=past),
        change_key(db, issued.key.public_id, {"expires_at": past}),
    ):
        with pytest.raises(PastExpiryError, match=r"expires_at: .* it must be later than 20") as caught:
            await asked
        assert (caught.value.status, caught.value.param) == (422, "expires_at")
    assert [key.public_id for key in await list_keys(db, "acme")] == [issued.key.public_id]
    assert (await get_key(db, issued.key.public_id)).expires_at is None


async def test_two_tokens_that_share_their_first_characters_are_two_keys(db: Database, issued: IssuedKey) -> None:
    ring = await ring_of(db)
    await ring.authenticate(issued.token)
    last = "A" if issued.token[-1] != "A" else "B"
    await refusal(ring, issued.token[:-1] + last)


async def test_listing_and_revoking_stay_inside_the_tenant(db: Database, issued: IssuedKey) -> None:
    await create_tenant(db, "other")
    assert [key.public_id for key in await list_keys(db, "acme")] == [issued.key.public_id]
    assert await list_keys(db, "other") == ()
    with pytest.raises(NotFoundError) as foreign:
        await revoke_key(db, issued.key.public_id, tenant="other")
    with pytest.raises(NotFoundError) as unknown:
        await revoke_key(db, issued.key.public_id[::-1], tenant="other")
    assert str(foreign.value).replace(issued.key.public_id, "") == str(unknown.value).replace(
        issued.key.public_id[::-1], ""
    )
    first = await revoke_key(db, issued.key.public_id, tenant="acme")
    again = await revoke_key(db, issued.key.public_id)
    assert first.revoked_at is not None
    assert again.revoked_at == first.revoked_at


async def test_keys_are_refused_for_unknown_and_disabled_tenants_and_long_labels(db: Database) -> None:
    with pytest.raises(NotFoundError):
        await issue_key(db, "nobody")
    await create_tenant(db, "acme")
    with pytest.raises(InvalidRequestError, match="label: 101 characters are more than 100"):
        await issue_key(db, "acme", "x" * 101)
    for label in ("a\0", "a\n", "\ud800"):
        with pytest.raises(InvalidRequestError, match="label: control characters"):
            await issue_key(db, "acme", label)
    for public_id in ("a\0", "", "' OR '1'='1"):
        with pytest.raises(NotFoundError):
            await revoke_key(db, public_id)
    await disable_tenant(db, "acme")
    with pytest.raises(ConflictError):
        await issue_key(db, "acme")


async def test_a_database_that_is_away_refuses_new_keys_and_serves_known_ones(db: Database, issued: IssuedKey) -> None:
    clock = Clock()
    ring = await ring_of(db, clock)
    await ring.authenticate(issued.token)
    async with Database("postgresql://nobody@/none?host=/nonexistent") as away:
        ring._db = ring._changes._db = away
        assert (await ring.authenticate(issued.token)).tenant == "acme"
        with pytest.raises(UnavailableError):
            await ring._changes.poll()
        clock.now = STALE_S
        with pytest.raises(UnavailableError) as caught:
            await ring.authenticate(issued.token)
    assert "nonexistent" not in caught.value.message
