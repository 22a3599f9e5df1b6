"""The picture of a pool, drawn in parts, against one that looks at each page."""

from __future__ import annotations

import random
from itertools import groupby

import pytest

from stencilpress.engine.messages import PageOwner, unpack_tokens
from stencilpress.engine.pool import Common, Owner, Pool
from stencilpress.engine.reports import PageMap


def shuffled_pool(chance: random.Random) -> tuple[Pool, dict[tuple[int, int], int]]:
    """Some pages of everything, in no order."""
    pool = Pool(300)
    tenants = {(1, number): number % 3 for number in range(8)}
    held: list[tuple[int, ...]] = []
    for step in range(1, 120):
        pool.begin(step)
        owners: list[Owner] = [*tenants, "a" * 64, "b" * 64, Common.CACHED]
        owner = chance.choice(owners)
        pages = pool.allocate(chance.randint(1, 6), owner)
        if pages is not None:
            held.append(pages)
        if held and chance.random() < 0.6:
            pool.release(held.pop(chance.randrange(len(held))))
        pool.retire(step - 2)
    return pool, tenants


@pytest.mark.parametrize("part", [1, 7, 300, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_a_picture_says_of_each_page_who_holds_it(part: int, seed: int) -> None:
    pool, tenants = shuffled_pool(random.Random(seed))
    resting = pool.resting()
    assert resting

    def owner_of(page: int) -> PageOwner:
        owner = pool.owners()[page]
        if owner is None:
            return PageOwner("quarantined" if page in resting else "free")
        if isinstance(owner, str):
            return PageOwner("adapter", owner)
        return PageOwner("cached") if isinstance(owner, Common) else PageOwner("kv", str(tenants[owner]))

    wanted = [owner_of(page) for page in range(pool.total)]
    picture = PageMap(pool, tenants)
    pool.allocate(pool.free, "c" * 64)  # what happens meanwhile is not in it
    while not picture.advance(part):
        pass
    pages = picture.answer(5)
    runs = unpack_tokens(pages.runs)
    drawn = [pages.owners[index] for index, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]
    assert drawn == wanted
    assert (pages.id, pages.total) == (5, 300)
    assert len(runs) // 2 == len(list(groupby(wanted)))
    assert len(set(pages.owners)) == len(pages.owners)
