"""The database behind the catalog: one engine, short read and write transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import Any

from sqlalchemy import URL, event, make_url, select
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from stencilpress.engine.settings import SettingsError
from stencilpress.gateway.catalog.stamps import stamp_touched
from stencilpress.gateway.errors import InvalidRequestError, UnavailableError

BUSY_TIMEOUT_MS = 5000
"""How long a statement waits for a lock or a connection before the catalog counts as unavailable."""
STATEMENT_TIMEOUT_MS = 10_000
MIGRATING = "The catalog lacks a table or a column: its schema is being migrated, or is not this version's."
UNSTORABLE = "A value is too large, or holds a character that cannot be stored."
_UNWRITABLE = frozenset({"22000", "22003", "22008", "22021", "22P05"})
"""Of SQLSTATE: what asyncpg cannot write for the server, numbers and times out of range, and characters that no text of
PostgreSQL holds, such as NUL."""
_NO_SUCH_THING = frozenset({"3F000", "42P01", "42703"})
"""Of SQLSTATE: a schema, a table or a column is not there. For SQLite that is an ordinary operational error."""
_WRITES = "stencilpress_writes"
_SQLITE_FILE = "sqlite:///"


class Database:
    """Sessions on SQLite or PostgreSQL. Open one per process and close it at the end.

    A session lives for one transaction: take what is needed, leave the block, then stream. Raises
    :class:`UnavailableError` when the database does not answer, from any block, and :class:`InvalidRequestError` for a
    value that it cannot hold.
    """

    def __init__(self, url: str) -> None:
        """``url`` is ``sqlite:///path`` or ``postgresql://…``. Raises :class:`SettingsError` for another kind."""
        self._engine = _create_engine(_driver_url(url))
        reading, writing = self._engine, self._engine
        if self.is_postgresql:
            reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        else:
            writing = self._engine.execution_options(**{_WRITES: True})
        self._read_sessions = async_sessionmaker(reading, expire_on_commit=False)
        self._write_sessions = async_sessionmaker(writing, expire_on_commit=False)

    @property
    def is_postgresql(self) -> bool:
        return self._engine.dialect.name == "postgresql"

    def read(self) -> AbstractAsyncContextManager[AsyncSession]:
        """One read-only transaction with a consistent view."""
        return _transaction(self._read_sessions)

    def write(self) -> AbstractAsyncContextManager[AsyncSession]:
        """One transaction, committed at the end of the block. On SQLite it holds the write lock from the start."""
        return _transaction(self._write_sessions)

    async def ping(self) -> None:
        """Raises :class:`UnavailableError` unless the database answers."""
        async with self.read() as session:
            await session.execute(select(1))

    async def close(self) -> None:
        await self._engine.dispose()

    async def __aenter__(self) -> Database:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _driver_url(url: str) -> URL:
    if url.startswith(_SQLITE_FILE):  # taken as it is, since a path may hold a question mark
        return URL.create("sqlite+aiosqlite", database=url.removeprefix(_SQLITE_FILE))
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise SettingsError("STENCILPRESS_DATABASE_URL is no URL such as postgresql://host/name") from None
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    name = parsed.get_backend_name()
    if name not in drivers:
        raise SettingsError(f"STENCILPRESS_DATABASE_URL: {name!r} is not supported; use sqlite or postgresql")
    return parsed.set(drivername=drivers[name])


def _create_engine(url: URL) -> AsyncEngine:
    if url.get_backend_name() == "postgresql":
        limits = {
            "statement_timeout": str(STATEMENT_TIMEOUT_MS),
            "lock_timeout": str(BUSY_TIMEOUT_MS),
            "max_parallel_workers_per_gather": "0",  # of tens of milliseconds no part is worth another process
        }
        arguments = {"server_settings": limits, "timeout": BUSY_TIMEOUT_MS / 1000}
        return create_async_engine(
            url, connect_args=arguments, pool_timeout=BUSY_TIMEOUT_MS / 1000, pool_pre_ping=True, hide_parameters=True
        )
    arguments = {"factory": _SqliteConnection}
    engine = create_async_engine(url, connect_args=arguments, pool_timeout=BUSY_TIMEOUT_MS / 1000, hide_parameters=True)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


class _SqliteConnection(sqlite3.Connection):
    """Ends its transaction when it is closed.

    SQLite keeps a closed connection, and its locks, for as long as a statement of it lives that was not read to its
    end. A task that is cancelled within a transaction leaves such a statement to the garbage collector: until that
    comes by, nobody could write.
    """

    def close(self) -> None:
        with suppress(sqlite3.Error):  # it is closed already, or has no transaction that can still be ended
            self.rollback()
        super().close()


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver must not start transactions: _begin_sqlite does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # an acknowledged upload or revocation survives a power cut
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    """Writers take the lock first: a reader that turns writer half-way cannot wait and would fail."""
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@asynccontextmanager
async def _transaction(sessions: async_sessionmaker[AsyncSession]) -> AsyncIterator[AsyncSession]:
    async with _outages_named(), sessions() as session, session.begin():
        yield session
        await stamp_touched(session)


@asynccontextmanager
async def _outages_named() -> AsyncIterator[None]:
    """Turn what drivers raise when a database is away, locked or slow into one error."""
    try:
        yield
    except (IntegrityError, ProgrammingError, DataError) as error:
        if _sqlstate(error) not in _NO_SUCH_THING:
            raise
        raise UnavailableError(MIGRATING) from error
    except (OverflowError, UnicodeEncodeError) as error:  # SQLite's driver looks before it sends
        raise InvalidRequestError(UNSTORABLE) from error
    except (DBAPIError, PoolTimeout, OSError) as error:
        if isinstance(error, DBAPIError) and _is_of_a_value(error):
            raise InvalidRequestError(UNSTORABLE) from error
        raise UnavailableError("The catalog is not available; try again shortly.") from error


def _is_of_a_value(error: DBAPIError) -> bool:
    """Whether the database is well and there is merely no way to write a value that was asked for."""
    return _sqlstate(error) in _UNWRITABLE


def _sqlstate(error: DBAPIError) -> str | None:
    cause = error.orig.__cause__ if error.orig is not None else None
    return getattr(cause, "sqlstate", None)
