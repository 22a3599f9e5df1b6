"""The schema's revision: bring it up to date, take it back, refuse one that this code does not know."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog import account_models, alert_models, models, usage_models
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import UnavailableError

TABLES = (models, account_models, alert_models, usage_models)
"""The modules whose tables are the schema: whoever migrates or exports it has loaded them all."""


class SchemaError(RuntimeError):
    """The database's schema is not the one of this code; the text says which way and what to do."""


async def migrate(db: Database, revision: str = "head") -> str:
    """Bring the schema to a revision, forwards or (``base`` is empty) backwards, in one transaction; returns it.

    Safe to repeat and to run from several processes at once. Raises :class:`SchemaError` if the database is
    newer than this code or the revision is unknown.
    """
    async with db.write() as session:
        connection = await session.connection()
        return await connection.run_sync(_migrate, revision)


async def check_schema(db: Database) -> None:
    """Raises :class:`SchemaError` unless the schema is exactly the one of this code."""
    async with db.read() as session:
        connection = await session.connection()
        await connection.run_sync(_check)


async def require_schema(session: AsyncSession) -> None:
    """At the end of a transaction that derives rows from others: a newer code may derive more of them, from here on.

    What this code did would be missing there for good. Raises :class:`UnavailableError`.
    """
    found = await session.scalar(text("SELECT version_num FROM alembic_version"))
    if found != newest_revision():
        raise UnavailableError(
            f"the catalog has been migrated to {found} meanwhile, this process knows {newest_revision()}"
        )


async def ensure_schema(db: Database) -> None:
    """Create the schema in an empty database; otherwise raises :class:`SchemaError` unless it is this code's."""
    async with db.read() as session:
        connection = await session.connection()
        empty = await connection.run_sync(_is_empty)
    await (migrate(db) if empty else check_schema(db))


@cache
def newest_revision() -> str:
    """The schema of this code."""
    return _revisions(_config())[-1]


def _migrate(connection: Connection, revision: str) -> str:
    config = _config(connection)
    known = _revisions(config)
    if revision not in (*known, "head", "base"):
        raise SchemaError(f"schema revision {revision!r} is unknown; known: {', '.join(known)}")
    wanted = known.index(_resolved(revision, known))
    current = known.index(_current(connection, known))
    step: Callable[[Config, str], None] = command.upgrade if wanted >= current else command.downgrade
    step(config, revision)
    return known[wanted]


def _is_empty(connection: Connection) -> bool:
    return MigrationContext.configure(connection).get_current_revision() is None


def _check(connection: Connection) -> None:
    known = _revisions(_config(connection))
    current = _current(connection, known)
    newest = newest_revision()  # read here, while a process starts, and remembered
    if current != newest:
        raise SchemaError(f"the catalog has schema {current}, this version needs {newest}: run `stencilpress migrate`")


def _current(connection: Connection, known: tuple[str, ...]) -> str:
    current = MigrationContext.configure(connection).get_current_revision() or "base"
    if current not in known:
        raise SchemaError(
            f"the catalog has schema {current}, newer than this version of stencilpress knows ({known[-1]}): "
            "upgrade stencilpress, or restore a backup"
        )
    return current


def _resolved(revision: str, known: tuple[str, ...]) -> str:
    return known[-1] if revision == "head" else revision


def _revisions(config: Config) -> tuple[str, ...]:
    """All revisions from ``base`` (nothing) to the newest; the history has no branches."""
    history = ScriptDirectory.from_config(config).walk_revisions()
    return ("base", *reversed([script.revision for script in history]))


def _config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(str(files("stencilpress.migrations")))).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
