"""What the ``prod`` of adapters serves, for lists of them: one question for a whole page."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import and_, select

from stencilpress.gateway.catalog.models import AliasRow, CanaryRow, VersionRow
from stencilpress.gateway.catalog.records import Canary
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.names import DEFAULT_ALIAS


@dataclass(frozen=True, slots=True)
class Serving:
    """The version that requests for an adapter's name get, and the canary beside it."""

    number: int
    digest: str
    ranks: tuple[int, ...]
    target_modules: tuple[str, ...]
    size_bytes: int
    canary: Canary | None


async def serving_versions(db: Database, adapter_ids: Collection[int]) -> dict[int, Serving]:
    """By adapter; one whose ``prod`` points at nothing is left out."""
    query = (
        select(VersionRow, CanaryRow.version, CanaryRow.percent)
        .join(AliasRow, and_(AliasRow.adapter_id == VersionRow.adapter_id, AliasRow.version == VersionRow.number))
        .outerjoin(CanaryRow, and_(CanaryRow.adapter_id == AliasRow.adapter_id, CanaryRow.alias == AliasRow.name))
        .where(AliasRow.name == DEFAULT_ALIAS, VersionRow.adapter_id.in_(adapter_ids))
    )
    async with db.read() as session:
        return {
            row.adapter_id: Serving(
                number=row.number,
                digest=row.digest,
                ranks=tuple(row.ranks),
                target_modules=tuple(row.target_modules),
                size_bytes=row.size_bytes,
                canary=None if version is None else Canary(version, percent),
            )
            for row, version, percent in await session.execute(query)
        }
