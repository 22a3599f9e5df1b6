"""Adapters that operators want at hand: pinned in the engines' memory, or preloaded into it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, or_, select

from stencilpress.engine.messages import MAX_KEPT
from stencilpress.gateway.access import SYSTEM, Actor
from stencilpress.gateway.catalog.audit import Target, audit
from stencilpress.gateway.catalog.models import AdapterRow, AliasRow, CanaryRow, TenantRow, VersionRow
from stencilpress.gateway.catalog.records import Keeping
from stencilpress.gateway.catalog.rows import locked_adapter
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.names import DEFAULT_ALIAS


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that requests for a kept adapter get."""

    digest: str
    kept: Keeping


async def set_kept(
    db: Database, tenant_id: int, name: str, kept: Keeping | None, *, actor: Actor = SYSTEM
) -> Keeping | None:
    """Pin an adapter, preload it, or neither; returns what holds now: a pinned one is preloaded already.

    Raises :class:`NotFoundError`, :class:`InvalidRequestError` when no more may be kept.
    """
    async with db.write() as session:
        adapter = await locked_adapter(session, tenant_id, name)
        before = adapter.kept
        if kept == before or (kept == "preload" and before == "pin"):
            return before
        if kept is not None:
            count = await session.scalar(select(func.count()).where(AdapterRow.kept == kept)) or 0
            if count >= MAX_KEPT:
                text = f"name: {count} adapters are kept so, of at most {MAX_KEPT}; let go of another first"
                raise InvalidRequestError(text, param="name", code="limit_exceeded")
        adapter.kept = kept
        audit(session, actor, "adapter.keep", Target("adapter", name, tenant_id), {"kept": before}, {"kept": kept})
    return kept


async def kept_versions(db: Database, base_id: str) -> tuple[KeptVersion, ...]:
    """What ``prod`` of each kept adapter stands for now, its canary included, of adapters for one base.

    It is the engines' business, so all tenants' are found; those of tenants that are disabled or deleted are not.
    """
    pointed = (
        select(pointer.version).where(pointer.adapter_id == AdapterRow.id, column == DEFAULT_ALIAS)
        for pointer, column in ((AliasRow, AliasRow.name), (CanaryRow, CanaryRow.alias))
    )
    query = select(VersionRow.digest, AdapterRow.kept).join(AdapterRow, VersionRow.adapter_id == AdapterRow.id)
    query = query.join(TenantRow, TenantRow.id == AdapterRow.tenant_id).where(
        AdapterRow.kept.is_not(None),
        AdapterRow.deleted_at.is_(None),
        VersionRow.deleted_at.is_(None),
        VersionRow.base_id == base_id,
        TenantRow.deleted_at.is_(None),
        TenantRow.disabled_at.is_(None),
        or_(*(VersionRow.number.in_(numbers) for numbers in pointed)),
    )
    async with db.read() as session:
        rows = await session.execute(query.order_by(AdapterRow.id, VersionRow.number))
        return tuple(KeptVersion(digest, kept) for digest, kept in rows if kept is not None)
