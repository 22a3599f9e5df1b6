"""The uploaded config and weights' header of each version: a blob has those of whoever uploaded its content first.

A version that is here already gets a row without files, which says that the blob's are its own, if the catalog shows
that it was the first with its content. The others get none: theirs are gone, and the blob's are somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

BATCH_ROWS = 1000

_adapters = sa.table("adapters", sa.column("id"), sa.column("tenant_id"))
_versions = sa.table(
    "versions", sa.column("adapter_id"), sa.column("number"), sa.column("digest"), sa.column("created_at")
)
_audit = sa.table(
    "audit_log",
    sa.column("id"),
    sa.column("tenant_id"),
    sa.column("action"),
    sa.column("before", sa.JSON),
    sa.column("after", sa.JSON),
)


def upgrade() -> None:
    files = op.create_table(
        "version_files",
        sa.Column("adapter_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("config", sa.LargeBinary),
        sa.Column("weights_header", sa.LargeBinary),
        sa.PrimaryKeyConstraint("adapter_id", "version", name="pk_version_files"),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name="fk_version_files_adapter_id"),
        sa.ForeignKeyConstraint(
            ["adapter_id", "version"],
            ["versions.adapter_id", "versions.number"],
            name="fk_version_files_adapter_id_version",
        ),
        sa.CheckConstraint("(config IS NULL) = (weights_header IS NULL)", name=op.f("ck_version_files_both_or_none")),
    )
    connection = op.get_bind()
    rows = [{"adapter_id": adapter, "version": number} for adapter, number in _first_ones(connection)]
    for start in range(0, len(rows), BATCH_ROWS):
        connection.execute(files.insert(), rows[start : start + BATCH_ROWS])


def downgrade() -> None:
    op.drop_table("version_files")


def _first_ones(connection: sa.Connection) -> Iterator[tuple[int, int]]:
    """The first version of each content, unless one before it may have gone, or it came from another installation."""
    added, purged, imported = _history(connection)
    query = sa.select(_versions, _adapters.c.tenant_id).join_from(
        _versions, _adapters, _adapters.c.id == _versions.c.adapter_id
    )
    order = (_versions.c.digest, _versions.c.created_at, _versions.c.adapter_id, _versions.c.number)
    for digest, group in groupby(connection.execute(query.order_by(*order)), key=lambda row: row.digest):
        rows = list(group)
        tenants = {row.tenant_id for row in rows}
        gone = digest in purged or added.get(digest, set()) - tenants
        if not gone and not (imported and len(rows) > 1):
            yield rows[0].adapter_id, rows[0].number


def _history(connection: sa.Connection) -> tuple[dict[str, set[int]], set[str], bool]:
    """By content the tenants that ever added it; what was purged; whether a catalog was ever imported."""
    added, purged, imported = dict[str, set[int]](), set[str](), False
    actions = ("version.add", "version.purge", "catalog.import")
    columns = (_audit.c.tenant_id, _audit.c.action, _audit.c.before, _audit.c.after)
    for tenant_id, action, before, after in connection.execute(sa.select(*columns).where(_audit.c.action.in_(actions))):
        imported |= action == "catalog.import"
        if action == "version.add" and (digest := _digest(after)):
            added.setdefault(digest, set()).add(tenant_id)
        if action == "version.purge" and (digest := _digest(before)):
            purged.add(digest)
    return added, purged, imported


def _digest(facts: Any) -> str:
    return str(facts.get("digest", "")) if isinstance(facts, dict) else ""
