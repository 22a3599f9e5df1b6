"""Long lists of adapters: what a tenant's requests may name, and for operators those of all tenants, found by the
beginning of a name, in one of several orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import selectinload

from stencilpress.gateway.catalog.models import AdapterRow, AliasRow, ShareRow, TenantRow, VersionRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.names import DEFAULT_ALIAS

Sort = Literal["tenant", "name", "newest"]
Position = tuple[str, str, int]
"""Where a page ended: tenant, name, id."""
_LAST = "\x7f"
"""Behind every character of a name, which are ASCII."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One adapter of the list; the newest version that is not deleted, if there is one, and how many there are."""

    id: int
    tenant_id: int
    tenant: str
    name: str
    created_at: datetime
    deleted_at: datetime | None
    versions: int
    newest: int | None
    digest: str | None
    ranks: tuple[int, ...]
    target_modules: tuple[str, ...]
    size_bytes: int
    aliases: dict[str, int]

    @property
    def position(self) -> Position:
        return (self.tenant, self.name, self.id)


@dataclass(frozen=True, slots=True)
class Served:
    """An adapter that a tenant's requests may name, its own or one that is ``shared`` with it; ``version`` is its
    ``prod``."""

    name: str
    version: int
    created_at: datetime
    shared: bool


async def list_served(db: Database, tenant_id: int, base_id: str) -> tuple[Served, ...]:
    """Those that serve a version for this base, by name, its own first. Columns alone: a tenant may have thousands."""
    shared = select(ShareRow.adapter_id).where(ShareRow.tenant_id == tenant_id)
    mine = AdapterRow.tenant_id == tenant_id
    query = (
        select(AdapterRow.name, AliasRow.version, AdapterRow.created_at, AdapterRow.tenant_id)
        .join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
        .join(AliasRow, (AliasRow.adapter_id == AdapterRow.id) & (AliasRow.name == DEFAULT_ALIAS))
        .join(VersionRow, (VersionRow.adapter_id == AdapterRow.id) & (VersionRow.number == AliasRow.version))
        .where(or_(mine, AdapterRow.id.in_(shared) & TenantRow.deleted_at.is_(None)), AdapterRow.deleted_at.is_(None))
        .where(VersionRow.deleted_at.is_(None), VersionRow.base_id == base_id)
        .order_by(AdapterRow.name)
    )
    async with db.read() as session:
        rows = (await session.execute(query)).all()
    found = [Served(name, version, created_at, owner != tenant_id) for name, version, created_at, owner in rows]
    return tuple(sorted(found, key=lambda one: one.shared))


async def list_all_adapters(
    db: Database,
    *,
    tenant: str = "",
    name: str = "",
    sort: Sort = "tenant",
    deleted: bool = False,
    after: Position | None = None,
    limit: int = 50,
    tenant_id: int | None = None,
) -> tuple[Listed, ...]:
    """Those whose tenant's name and own name begin so, from behind ``after``; with ``tenant_id`` of that tenant."""
    query = _adapters(deleted=deleted)
    if tenant_id is not None:
        query = query.where(AdapterRow.tenant_id == tenant_id)
    for column, prefix in ((TenantRow.name, tenant), (AdapterRow.name, name)):
        if prefix:
            query = query.where(column >= prefix, column < prefix + _LAST)
    async with db.read() as session:
        return await _read(session, _in_order(query, sort, after).limit(limit))


async def list_named(db: Database, names: Sequence[tuple[str, str]]) -> tuple[Listed, ...]:
    """Adapters by their tenants' names and their own, in that order; what does not exist any more is left out."""
    query = _adapters(deleted=False).where(tuple_(TenantRow.name, AdapterRow.name).in_(names))
    async with db.read() as session:
        found = {(one.tenant, one.name): one for one in await _read(session, query)}
    return tuple(found[name] for name in names if name in found)


def _adapters(*, deleted: bool) -> Select[Any]:
    query: Any = select(AdapterRow, TenantRow.name).join(TenantRow, TenantRow.id == AdapterRow.tenant_id)
    if not deleted:
        query = query.where(AdapterRow.deleted_at.is_(None), TenantRow.deleted_at.is_(None))
    return cast("Select[Any]", query.options(selectinload(AdapterRow.aliases)))


async def _read(session: AsyncSession, query: Select[Any]) -> tuple[Listed, ...]:
    rows: list[tuple[AdapterRow, str]] = [tuple(row) for row in await session.execute(query)]
    counts, newest = await _versions(session, [adapter.id for adapter, _ in rows])
    return tuple(_listed(row, owner, counts.get(row.id, 0), newest.get(row.id)) for row, owner in rows)


def _in_order(query: Select[Any], sort: Sort, after: Position | None) -> Select[Any]:
    if sort == "newest":
        ordered = query.order_by(AdapterRow.id.desc())
        return ordered if after is None else ordered.where(AdapterRow.id < after[2])
    columns: tuple[ColumnElement[Any], ...] = (TenantRow.name, AdapterRow.name)  # type: ignore[assignment]
    if sort == "name":
        columns = columns[::-1]
    ordered = query.order_by(*columns)
    if after is None:
        return ordered
    return ordered.where(tuple_(*columns) > (after[:2] if sort == "tenant" else after[1::-1]))


async def _versions(session: AsyncSession, ids: list[int]) -> tuple[dict[int, int], dict[int, VersionRow]]:
    """How many versions each adapter has, and its newest one."""
    mine = and_(VersionRow.adapter_id.in_(ids), VersionRow.deleted_at.is_(None))
    grouped = select(VersionRow.adapter_id, func.count(), func.max(VersionRow.number)).where(mine)
    found = [tuple(row) for row in await session.execute(grouped.group_by(VersionRow.adapter_id))]
    keys = [(adapter_id, number) for adapter_id, _, number in found]
    last = select(VersionRow).where(tuple_(VersionRow.adapter_id, VersionRow.number).in_(keys))
    newest = {row.adapter_id: row for row in await session.scalars(last)}
    return {adapter_id: count for adapter_id, count, _ in found}, newest


def _listed(row: AdapterRow, tenant: str, versions: int, newest: VersionRow | None) -> Listed:
    return Listed(
        id=row.id,
        tenant_id=row.tenant_id,
        tenant=tenant,
        name=row.name,
        created_at=row.created_at,
        deleted_at=row.deleted_at,
        versions=versions,
        newest=newest.number if newest is not None else None,
        digest=newest.digest if newest is not None else None,
        ranks=tuple(newest.ranks) if newest is not None else (),
        target_modules=tuple(newest.target_modules) if newest is not None else (),
        size_bytes=newest.size_bytes if newest is not None else 0,
        aliases={alias.name: alias.version for alias in row.aliases},
    )
