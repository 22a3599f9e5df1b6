"""What a gateway remembers of the catalog ends with the first change of its tenant, and with silence."""

from __future__ import annotations

import asyncio

import pytest

from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.stamps import touch
from stencilpress.gateway.catalog.tenants import change_tenant, create_tenant, delete_tenant, restore_tenant
from stencilpress.gateway.changes import STALE_S, CatalogCache, Changes
from stencilpress.gateway.errors import UnavailableError
from tests.unit.test_keys import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def changes(db: Database, clock: Clock) -> Changes:
    """After the creation of tenants 1 and 2."""
    await create_tenant(db, "acme")
    await create_tenant(db, "zoo")
    made = Changes(db, clock)
    await made.poll()
    return made


async def test_a_change_ends_what_is_known_of_its_tenant_alone(db: Database, changes: Changes) -> None:
    cache: CatalogCache[str, str] = CatalogCache(changes, 10)
    cache.put("a", 1, changes.seen, "of acme")
    cache.put("z", 2, changes.seen, "of zoo")
    await change_tenant(db, "acme", {"max_rank": 8})
    assert cache.get("a") == "of acme", "nothing is asked on the way"
    await changes.poll()
    assert (cache.get("a"), cache.get("z")) == (None, "of zoo")
    cache.put("a", 1, changes.seen, "again")
    assert cache.get("a") == "again"


async def test_deletions_are_told_apart_from_other_changes(db: Database, changes: Changes) -> None:
    assert changes.retired == 0
    await change_tenant(db, "acme", {"max_rank": 8})
    await changes.poll()
    assert changes.retired == 0
    await delete_tenant(db, "acme")
    await changes.poll()
    retired = changes.retired
    assert retired == changes.seen > 0
    await restore_tenant(db, "acme")
    await changes.poll()
    assert changes.retired == retired < changes.seen
    late = Changes(db)
    await late.poll()
    assert late.retired == retired


async def test_what_was_read_while_it_changed_is_not_kept(db: Database, changes: Changes) -> None:
    cache: CatalogCache[str, str] = CatalogCache(changes, 10)
    before = changes.seen
    await change_tenant(db, "acme", {"max_rank": 8})
    await changes.poll()
    cache.put("a", 1, before, "read before the change")
    assert cache.get("a") is None


async def test_nothing_is_current_before_the_first_word_and_after_silence(db: Database, clock: Clock) -> None:
    changes = Changes(db, clock)
    cache: CatalogCache[str, str] = CatalogCache(changes, 10)
    cache.put("a", 1, changes.seen, "x")
    assert cache.get("a") is None
    await changes.poll()
    assert cache.get("a") == "x"
    clock.now += STALE_S
    assert cache.get("a") is None
    await changes.poll()
    assert cache.get("a") == "x"


async def test_age_counts_from_the_question_not_from_the_answer(db: Database, clock: Clock) -> None:
    """A catalog that answers slowly must not lengthen the time for which a revoked key works."""
    changes = Changes(db, clock)
    cache: CatalogCache[str, str] = CatalogCache(changes, 10)
    read = changes._db.read

    def slow() -> object:
        clock.now += 0.8
        return read()

    changes._db.read = slow  # type: ignore[method-assign, assignment]
    await changes.poll()
    cache.put("a", 1, changes.seen, "x")
    assert cache.get("a") == "x"
    clock.now += 0.2
    assert cache.get("a") is None


async def test_a_change_that_is_not_committed_is_none(db: Database, changes: Changes) -> None:
    before = changes.seen

    async def fail() -> None:
        async with db.write() as session:
            touch(session, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    await changes.poll()
    assert changes.seen == before


async def test_a_reader_that_follows_misses_none_of_many_concurrent_changes(
    db: Database, database_url: str, changes: Changes
) -> None:
    """Stamps become visible in their order, so asking for those above the highest seen is enough."""
    names = [f"t{number}" for number in range(8)]
    tenants = [await create_tenant(db, name) for name in names]
    await changes.poll()
    seen = {tenant.id: changes.seen for tenant in tenants}
    others = [Database(database_url) for _ in range(4)]

    async def watch(work: asyncio.Task[object]) -> None:
        while not work.done():
            await changes.poll()

    async def change_all() -> None:
        await asyncio.gather(*(change_tenant(others[i % 4], name, {"max_rank": 9}) for i, name in enumerate(names)))

    work: asyncio.Task[object] = asyncio.create_task(change_all())
    await watch(work)
    await work
    await changes.poll()
    await asyncio.gather(*(other.close() for other in others))
    assert not any(changes.is_current(tenant, stamp) for tenant, stamp in seen.items())


async def test_following_goes_on_after_an_outage(db: Database, changes: Changes, clock: Clock) -> None:
    asked: list[int] = []
    answered = asyncio.Event()
    poll = changes.poll

    async def sometimes() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise UnavailableError("away")
        await poll()
        if len(asked) > 2:
            answered.set()

    changes.poll = sometimes  # type: ignore[method-assign]
    clock.now += STALE_S
    async with changes.following():
        await answered.wait()
    assert changes.is_current(1, changes.seen)
