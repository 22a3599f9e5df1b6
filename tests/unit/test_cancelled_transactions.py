"""A task that is cancelled within a transaction, by a client that leaves or by a shutdown, holds nobody up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event

from stencilpress.gateway.catalog.leases import acquire
from stencilpress.gateway.catalog.session import Database


@contextmanager
def cancelled_at(kind: str) -> Iterator[None]:
    """The first statement of its kind is cancelled: its task, as soon as it waits for the driver."""
    left = [kind]

    def cancel(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if left and statement.startswith(left[0]):
            left.clear()
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)

    event.listen(Engine, "before_cursor_execute", cancel)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", cancel)
    assert not left


@pytest.mark.parametrize("kind", ["BEGIN", "UPDATE", "INSERT"])
async def test_it_leaves_no_lock_behind(db: Database, kind: str) -> None:
    if kind == "BEGIN" and db.is_postgresql:
        pytest.skip("its driver begins without a statement")
    with cancelled_at(kind):
        task = asyncio.create_task(acquire(db, "job", "first", 60))
        await asyncio.wait([task])
    assert task.cancelled()
    assert await acquire(db, "job", "second", 60), "nothing was written, and whoever comes next can write"
    del task  # until here: what it was cancelled in may be held for as long as somebody looks at it
