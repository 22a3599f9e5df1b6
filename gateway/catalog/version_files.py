"""What of its uploaded files each version has for itself: blobs are shared by all who upload the same content.

Nothing that one uploader wrote may come from another's files, so what is not in the digest is kept here.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import AdapterRow, VersionFilesRow, VersionRow
from stencilpress.gateway.catalog.records import StoredFiles, VersionFiles
from stencilpress.gateway.catalog.session import Database


async def keep_files(session: AsyncSession, version: VersionRow, files: VersionFiles | None) -> None:
    """Keep a version's files unless it has some: those that it came with stay."""
    if files is None:
        return
    row = await session.get(VersionFilesRow, (version.adapter_id, version.number))
    if row is None:
        row = VersionFilesRow(adapter_id=version.adapter_id, version=version.number)
        session.add(row)
    if row.config is None:
        row.config, row.weights_header = files.config, files.weights_header


async def find_files(db: Database, tenant_id: int, adapter: str, number: int) -> StoredFiles:
    """What a version was uploaded as; None where that was not kept, and for another tenant's."""
    query = select(VersionFilesRow).join(AdapterRow, AdapterRow.id == VersionFilesRow.adapter_id)
    query = query.where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == adapter)
    async with db.read() as session:
        row = await session.scalar(query.where(VersionFilesRow.version == number))
    if row is None:
        return None
    if row.config is None or row.weights_header is None:
        return "in blob"
    return VersionFiles(row.config, row.weights_header)


async def distrust_blobs(session: AsyncSession, last_adapter_id: int) -> None:
    """Of adapters that came from elsewhere, those with ids above ``last_adapter_id``: what was the first with its
    content there need not be it here, where others have it too."""
    mine, other = VersionRow.__table__.alias("mine"), VersionRow.__table__.alias("other")
    same: ColumnElement[bool] = and_(
        mine.c.adapter_id == VersionFilesRow.adapter_id,
        mine.c.number == VersionFilesRow.version,
        other.c.digest == mine.c.digest,
        other.c.adapter_id <= last_adapter_id,
    )
    doomed = delete(VersionFilesRow).where(VersionFilesRow.config.is_(None))
    await session.execute(doomed.where(VersionFilesRow.adapter_id > last_adapter_id, exists().where(same)))
