"""The catalog as a file: one JSON object a line, so that any size passes through little memory.

The first line is a header, the last one the number of rows; between them are the rows of :data:`EXPORTED`, parents
first. Ids that the database gives out are given out anew on import, so a file fits beside what is there. It holds the
hashes of keys and passwords and the tenants' salts: it is as secret as the database. Blobs of adapters are not in it;
what of their files is each version's own, is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import JSON, Column, func, insert, select
from sqlalchemy import Table as SqlTable
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.blobs import is_digest
from stencilpress.gateway.catalog.alert_models import AlertRuleRow
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.limits import check_flat
from stencilpress.gateway.catalog.models import AdapterRow, AliasMoveRow, Table, TenantRow
from stencilpress.gateway.catalog.schema import newest_revision
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.version_files import distrust_blobs
from stencilpress.gateway.errors import ConflictError, InvalidRequestError

FORMAT = "stencilpress-catalog"
EXPORTED = (
    "tenants",
    "users",
    "api_keys",
    "adapters",
    "versions",
    "version_files",
    "alias_moves",
    "aliases",
    "canaries",
    "adapter_shares",
    "smoke_suites",
    "alert_rules",
    "alert_webhooks",
)
"""In this order: what a row refers to comes before it."""
NOT_EXPORTED = (
    "audit_log",
    "usage_requests",
    "usage_rollups",
    "usage_version_rollups",
    "usage_tenant_rollups",
    "usage_ranks",
    "quota_refusals",
    "engine_samples",
    "smoke_runs",
    "catalog_stamps",
    "job_leases",
    "alert_incidents",
    "alert_deliveries",
    "console_sessions",
    "one_time_links",
    "sign_in_attempts",
)
"""The history of this installation, and what only means something beside its gateways. People sign in anew."""
LOOSE_REFERENCES: Mapping[tuple[str, str], int | None] = {("aliases", "move_id"): 0, ("alias_moves", "parent_id"): None}
"""Columns that name a row of ``alias_moves`` without a foreign key, with what stands there for none."""
BATCH_ROWS = 500
_NO_DIGEST = "0" * 64
"""Stands in for that of rows that have none."""


_MOVE_ID: Any = AliasMoveRow.__table__.columns["id"]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="header", tag_field="kind"):
    format: str
    schema: str
    exported_at: datetime


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="row", tag_field="kind"):
    table: str
    row: dict[str, Any]


class Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="end", tag_field="kind"):
    rows: int


class Imported(msgspec.Struct, frozen=True):
    """What an import added: rows by table; the tenants that it left as they are; the blobs that its versions need."""

    rows: dict[str, int]
    skipped: list[str]
    digests: list[str]


async def export_catalog(db: Database) -> AsyncIterator[bytes]:
    """The file's lines, of one moment. The database's view is held until the last: take them without delay."""
    yield _line(Header(FORMAT, newest_revision(), datetime.now(UTC)))
    count = 0
    async with db.read() as session:
        for table in _tables():
            rows = await session.stream(select(table).order_by(*table.primary_key.columns))
            async for row in rows.mappings():
                yield _line(Row(str(table.name), {str(name): value for name, value in row.items()}))
                count += 1
    yield _line(Footer(count))


async def import_catalog(
    db: Database, lines: AsyncIterator[bytes], *, skip_existing: bool = False, actor: Actor = SYSTEM
) -> Imported:
    """Add the rows of a file, all or none. With ``skip_existing`` tenants whose name is taken are left as they are.

    Raises :class:`InvalidRequestError` for what is no whole file of this schema, :class:`ConflictError` for what exists
    already.
    """
    try:
        async with db.write() as session:
            arrival = _Arrival(session, skip_existing)
            last_id = await session.scalar(select(func.max(AdapterRow.id))) or 0
            await arrival.take_all(lines)
            await distrust_blobs(session, last_id)
            done = arrival.result()
            audit(session, actor, "catalog.import", Target("catalog", "", None), after={"rows": done.rows})
    except IntegrityError:
        raise ConflictError("The file has a row that the catalog has already, or one that its rules forbid.") from None
    return done


@dataclass
class _Arrival:
    """One import under way."""

    session: AsyncSession
    skip_existing: bool
    counts: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)
    _ids: dict[Column[Any], dict[int, int | None]] = field(default_factory=dict)
    """For columns that the database fills: from the file's number to ours, None for a row that was skipped."""
    _waiting: list[dict[str, Any]] = field(default_factory=list)
    _waiting_for: SqlTable | None = None

    async def take_all(self, lines: AsyncIterator[bytes]) -> None:
        tables = {table.name: table for table in _tables()}
        count, ended = 0, False
        _check_header(await anext(lines, b""))
        async for line in lines:
            read = _read(line, Row | Footer)
            if ended:
                raise _bad_file("goes on after its end")
            if isinstance(read, Footer):
                ended = read.rows == count
                if not ended:
                    raise _bad_file(f"has {count} rows instead of {read.rows}")
                continue
            if read.table not in tables:
                raise _bad_file(f"has rows of {read.table[:64]!r}")
            await self._take(tables[read.table], read.row)
            count += 1
        if not ended:
            raise _bad_file("ends early")
        await self._flush()

    def result(self) -> Imported:
        return Imported(self.counts, self.skipped, sorted(self.digests))

    async def _take(self, table: SqlTable, raw: Mapping[str, Any]) -> None:
        row = self._renumbered(table, _converted(table, raw))
        own = _given_by_database(table)
        if row is None or await self._stands(table, row):
            if own is not None:
                self._ids.setdefault(own, {})[raw[own.name]] = None
            return
        self.counts[table.name] = self.counts.get(table.name, 0) + 1
        if "digest" in row:
            self.digests.add(row["digest"])
        if own is not None:
            await self._flush()
            del row[own.name]
            added = await self.session.scalar(insert(table).values(row).returning(own))
            self._ids.setdefault(own, {})[raw[own.name]] = added
            return
        if table is not self._waiting_for or len(self._waiting) >= BATCH_ROWS:
            await self._flush()
        self._waiting_for = table
        self._waiting.append(row)

    async def _flush(self) -> None:
        if self._waiting_for is not None and self._waiting:
            await self.session.execute(insert(self._waiting_for), self._waiting)
        self._waiting, self._waiting_for = [], None

    def _renumbered(self, table: SqlTable, row: dict[str, Any]) -> dict[str, Any] | None:
        """With our ids for the file's; None if the row belongs to one that was skipped."""
        for column in table.columns:
            theirs, loose = row[column.name], (table.name, column.name)
            if loose in LOOSE_REFERENCES:
                ours = self._ids.get(_MOVE_ID, {}).get(theirs, LOOSE_REFERENCES[loose])
            elif (origin := _origin(column)) is None or theirs is None:
                continue
            elif theirs not in self._ids.get(origin, {}):
                raise _bad_file(f"has a row of {table.name} whose {column.name} it has no row for")
            elif (ours := self._ids[origin][theirs]) is None:
                return None
            row = {**row, column.name: ours}
        return row

    async def _stands(self, table: SqlTable, row: Mapping[str, Any]) -> bool:
        """Whether a row is to give way to one that is here: a tenant of its name, a rule of all tenants of its kind."""
        if table is TenantRow.__table__:
            return await self._exists(row["name"])
        if not self.skip_existing or table is not AlertRuleRow.__table__ or row["tenant_id"] is not None:
            return False
        same = (AlertRuleRow.tenant_id.is_(None), AlertRuleRow.kind == row["kind"])
        return await self.session.scalar(select(AlertRuleRow.id).where(*same)) is not None

    async def _exists(self, name: str) -> bool:
        if not self.skip_existing or not await self.session.scalar(select(TenantRow.id).where(TenantRow.name == name)):
            return False
        self.skipped.append(name)
        return True


def _tables() -> list[SqlTable]:
    return [Table.metadata.tables[name] for name in EXPORTED]


def _origin(column: Column[Any]) -> Column[Any] | None:
    """The column of another table, filled by the database, whose number this one holds, be it over several tables."""
    for key in column.foreign_keys:
        target: Column[Any] = key.column
        if target is _given_by_database(target.table):
            return target
        if (origin := _origin(target)) is not None:
            return origin
    return None


def _given_by_database(table: Any) -> Column[Any] | None:
    column: Column[Any] | None = table.autoincrement_column
    return column


def _converted(table: SqlTable, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The row as the database takes it. Raises :class:`InvalidRequestError`."""
    if set(raw) != set(table.columns.keys()):
        raise _bad_file(f"has a row of {table.name} with other columns than {', '.join(table.columns.keys())}")
    try:
        row = {column.name: msgspec.convert(raw[column.name], _type_of(column)) for column in table.columns}
        if table is TenantRow.__table__:
            check_flat(row)
        elif not is_digest(row.get("digest", _NO_DIGEST)):
            raise msgspec.ValidationError("digest: is none")
    except (msgspec.ValidationError, InvalidRequestError) as error:
        raise _bad_file(f"has a row of {table.name} with a wrong value: {error}") from None
    return row


def _type_of(column: Column[Any]) -> Any:
    if isinstance(column.type, JSON):
        return Any
    kind = column.type.python_type
    return kind | None if column.nullable else kind


def _check_header(line: bytes) -> None:
    header = _read(line, Header)
    if header.format != FORMAT:
        raise _bad_file(f"is of the format {header.format[:64]!r}, not {FORMAT!r}")
    if header.schema != newest_revision():
        raise _bad_file(
            f"has schema {header.schema[:64]}, this version has {newest_revision()}: export it again with this version"
        )


def _read(line: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _bad_file("has a line that is not one of its kind") from None


def _bad_file(text: str) -> InvalidRequestError:
    return InvalidRequestError(f"file: {text}", param="file")


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"
