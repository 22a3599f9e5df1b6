"""The soak in small: a few kills among clients that stay and leave. ``python -m bench soak`` is the large one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.soak import SLOTS, soak

pytestmark = pytest.mark.timeout(180)


async def test_after_kills_no_slot_is_held_and_every_admitted_request_has_its_row(tmp_path: Path) -> None:
    books = await soak(tmp_path, requests=150, kills=3, quotas="embedded", seed=7)
    assert books.faults == []
    assert books.slots == SLOTS
    assert books.kills.total() == 3
    assert len(books.whole) > 20
    assert sum(told for told, _ in books.whole) == sum(of_row for _, of_row in books.whole)
