"""Catalogs with today's schema: migrated once in a process and copied from then on.

What migrations do is for tests/integration/test_migrations.py; all other tests begin with what they leave behind.
"""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.session import Database


def lay_catalog(path: Path) -> str:
    """Write a new SQLite catalog that holds nothing but the schema; returns its URL."""
    path.write_bytes(_migrated_sqlite())
    return f"sqlite:///{path}"


def migrate_apart(url: str) -> None:
    """Bring a database to today's schema, on a loop of its own: the caller may be within one."""

    async def run() -> None:
        async with Database(url) as database:
            await migrate(database)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, run()).result()


@cache
def _migrated_sqlite() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.db"
        migrate_apart(f"sqlite:///{path}")
        return path.read_bytes()
