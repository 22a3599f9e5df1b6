"""Room in the pool while a step is in flight: pages that come back with it, and cached ones that are there at once."""

from __future__ import annotations

import pytest

from stencilpress.engine.prefix import Chain, PrefixCache, Space
from tests.unit.library import Library

CACHED, RUNNING = 5, 3


@pytest.fixture
def library() -> Library:
    """A full pool: idle pages of a prefix, and those of a request that has ended while a step reads them."""
    library = Library(pages=CACHED + RUNNING)
    prefixes = PrefixCache(library.pool, library.room, 1)
    chain: Chain | None = prefixes.open(Space("", 1, b"salt"), [])
    assert chain is not None
    for page in library.pool.allocate(CACHED, (1, 1)) or ():
        prefixes.add(chain, [1], page)
    prefixes.close(chain)
    pages = library.pool.allocate(RUNNING, (1, 2)) or ()
    library.pool.begin(1)
    library.pool.release(pages)
    assert (library.pool.free, library.pool.quarantined) == (0, RUNNING)
    return library


def test_a_newcomer_takes_cached_pages_rather_than_wait_for_the_step_in_flight(library: Library) -> None:
    assert library.residency.make_room(2, 1)
    assert library.pool.free == 2
    library.pool.retire(1)
    assert library.pool.free == 2 + RUNNING


def test_who_has_to_wait_for_the_step_anyway_takes_no_more_than_it_lacks_then(library: Library) -> None:
    assert not library.residency.make_room(CACHED + 1, 1), "not yet"
    assert library.room.cached.size == RUNNING - 1
    library.pool.retire(1)
    assert library.residency.make_room(CACHED + 1, 1)
    assert library.room.cached.size == RUNNING - 1


def test_the_next_token_takes_a_cached_page_rather_than_wait_for_the_step_in_flight(library: Library) -> None:
    library.residency.make_way()
    assert library.pool.free == 1, "of a pool of less than 512 pages"


def test_an_adapter_takes_the_pages_of_those_that_only_newer_requests_want() -> None:
    """The newest first; whether or not adapters have pages of their own."""
    for most in (4, 100):
        library = Library(pages=4, max_adapter_pages=most)
        for arrival, digest in enumerate("ab", 1):
            library.residency.want(digest, arrival)
            library.turn()
        library.residency.want("c", 0)
        library.turn()
        assert [digest for digest in "abc" if library.residency.ready(digest)] == ["a", "c"]
