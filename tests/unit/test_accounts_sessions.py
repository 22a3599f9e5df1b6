"""Sessions end when they should, on every gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from stencilpress.gateway.access import SYSTEM, Role
from stencilpress.gateway.accounts.sessions import SEEN_EVERY, SessionRing
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.sessions import (
    MAX_SESSIONS,
    Session,
    end_other_sessions,
    end_session,
    list_sessions,
)
from stencilpress.gateway.catalog.tenants import create_tenant, delete_tenant, disable_tenant
from stencilpress.gateway.catalog.users import User, add_user, change_role, disable_user, set_password
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.errors import NotFoundError

LASTS, IDLE = timedelta(days=7), timedelta(hours=12)


class Gateways:
    """Two gateways on one catalog, each with what it remembers, and a clock of ours."""

    def __init__(self, db: Database, user: User) -> None:
        self.db, self.user = db, user
        self.now = datetime.now(UTC)
        self.changes = [Changes(db), Changes(db)]
        self.rings = [SessionRing(db, changes, LASTS, IDLE, lambda: self.now) for changes in self.changes]

    async def poll(self) -> None:
        for changes in self.changes:
            await changes.poll()

    async def start(self) -> str:
        token = await self.rings[0].start(self.user, "10.0.0.1", "Firefox", actor=SYSTEM)
        await self.poll()
        return token

    async def open(self, token: str) -> list[bool]:
        """Whether each gateway takes the token."""
        return [await ring.find(token) is not None for ring in self.rings]

    async def sessions(self) -> tuple[Session, ...]:
        return await list_sessions(self.db, self.user.public_id)


@pytest.fixture
async def gateways(db: Database) -> Gateways:
    await create_tenant(db, "acme")
    return Gateways(db, await add_user(db, "acme", "ada@example.com", Role.VIEWER))


async def test_a_session_is_found_by_its_token_alone(gateways: Gateways) -> None:
    token = await gateways.start()
    found = await gateways.rings[1].find(token)
    assert found is not None
    assert (found.user, found.session.address, found.session.user_agent) == (gateways.user, "10.0.0.1", "Firefox")
    for wrong in ("", token[:-1], token[::-1], "x" * 10_000, found.session.public_id):
        assert await gateways.rings[1].find(wrong) is None


async def test_a_session_ends_after_its_time_however_busy(gateways: Gateways) -> None:
    token, start = await gateways.start(), gateways.now
    while gateways.now + IDLE / 2 < start + LASTS:
        gateways.now += IDLE / 2
        assert await gateways.open(token) == [True, True]
    gateways.now = start + LASTS
    assert await gateways.open(token) == [False, False]


async def test_a_session_that_rests_ends(gateways: Gateways) -> None:
    token = await gateways.start()
    assert await gateways.open(token) == [True, True]
    gateways.now += IDLE * 0.9
    assert await gateways.rings[0].find(token) is not None
    gateways.now += IDLE * 0.9
    assert await gateways.open(token) == [True, True], "the other gateway hears of it"
    gateways.now += IDLE
    assert await gateways.open(token) == [False, False]


async def test_its_last_use_is_noted_now_and_then(gateways: Gateways) -> None:
    token = await gateways.start()
    start = gateways.now
    gateways.now += SEEN_EVERY / 2
    await gateways.rings[0].find(token)
    assert (await gateways.sessions())[0].last_seen_at == start
    gateways.now += SEEN_EVERY
    await gateways.rings[0].find(token)
    assert (await gateways.sessions())[0].last_seen_at == gateways.now


ENDS: dict[str, Callable[[Database, User], Awaitable[object]]] = {
    "role": lambda db, user: change_role(db, user.public_id, Role.ADMIN),
    "password": lambda db, user: set_password(db, user.public_id, "$argon2id$"),
    "disabled": lambda db, user: disable_user(db, user.public_id),
    "tenant disabled": lambda db, _: disable_tenant(db, "acme"),
    "tenant deleted": lambda db, _: delete_tenant(db, "acme"),
    "others ended": lambda db, user: end_other_sessions(db, user, "another", actor=SYSTEM),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
async def test_a_change_ends_sessions_on_every_gateway(
    gateways: Gateways, end: Callable[[Database, User], Awaitable[object]]
) -> None:
    tokens = [await gateways.start() for _ in range(2)]
    for token in tokens:
        assert await gateways.open(token) == [True, True]
    await end(gateways.db, gateways.user)
    await gateways.poll()
    for token in tokens:
        assert await gateways.open(token) == [False, False]


async def test_a_role_that_stays_ends_nothing(gateways: Gateways) -> None:
    token = await gateways.start()
    await change_role(gateways.db, gateways.user.public_id, Role.VIEWER)
    await gateways.poll()
    assert await gateways.open(token) == [True, True]


async def test_one_session_ends_and_the_others_stay(gateways: Gateways) -> None:
    kept, ended = [await gateways.start() for _ in range(2)]
    found = await gateways.rings[0].find(ended)
    assert found is not None
    await end_session(gateways.db, gateways.user, found.session.public_id, actor=SYSTEM)
    await gateways.poll()
    assert await gateways.open(ended) == [False, False]
    assert await gateways.open(kept) == [True, True]
    stranger = await add_user(gateways.db, "acme", "eve@example.com", Role.ADMIN)
    [mine] = await gateways.sessions()
    with pytest.raises(NotFoundError):
        await end_session(gateways.db, stranger, mine.public_id, actor=SYSTEM)


async def test_the_password_of_this_session_may_change(gateways: Gateways) -> None:
    kept, ended = [await gateways.start() for _ in range(2)]
    found = await gateways.rings[0].find(kept)
    assert found is not None
    user_id, session_id = gateways.user.public_id, found.session.public_id
    await set_password(gateways.db, user_id, "$argon2id$", keep_session=session_id)
    await gateways.poll()
    assert await gateways.open(kept) == [True, True]
    assert await gateways.open(ended) == [False, False]


async def test_a_user_has_so_many_sessions(gateways: Gateways) -> None:
    first = await gateways.start()
    for _ in range(MAX_SESSIONS):
        gateways.now += timedelta(seconds=1)
        last = await gateways.start()
    assert len(await gateways.sessions()) == MAX_SESSIONS
    assert await gateways.open(first) == [False, False]
    assert await gateways.open(last) == [True, True]
    gateways.now += IDLE
    await gateways.start()
    assert len(await gateways.sessions()) == 1, "those that are over are removed"
