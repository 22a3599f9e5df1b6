"""Runs migrations on the connection that gateway/catalog/schema.py hands over, inside its one transaction.

A killed migration leaves nothing behind: both engines roll their DDL back. Waiting for locks is bounded, so
that a migration behind a busy table fails instead of queueing every other statement behind itself.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from stencilpress.gateway.catalog.models import Table

LOCK_TIMEOUT_MS = 5000
STATEMENT_TIMEOUT_MS = 300_000
ADVISORY_LOCK = 7_361_642_911
"""Any number of ours: two processes that start together migrate one after the other."""


def run(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS}"))
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"))
    context.configure(
        connection=connection,
        target_metadata=Table.metadata,
        transactional_ddl=True,  # Alembic assumes the contrary of SQLite
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
