"""What has to be done now and then: purge what was deleted long enough ago, and blobs that no version has."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from stencilpress.gateway.blobs import BlobStore
from stencilpress.gateway.catalog.lifecycle import digests_in_use, list_purgeable, purge
from stencilpress.gateway.catalog.session import Database

BATCH = 500
"""Digests in one question to the database."""

logger = logging.getLogger(__name__)


async def purge_deleted(db: Database, blobs: BlobStore, grace: timedelta) -> int:
    """Forget versions that were deleted ``grace`` ago and on which no request of this host runs any more.

    Their blobs are then garbage. Returns how many versions went.
    """
    before = datetime.now(UTC) - grace
    free = set()
    for digest in sorted(await list_purgeable(db, before)):
        with blobs.claim(digest) as claimed:
            if claimed:
                free.add(digest)
    purged = await purge(db, before, frozenset(free)) if free else 0
    if purged:
        logger.info("purged %d deleted versions", purged)
    return purged


async def collect_garbage(db: Database, blobs: BlobStore) -> int:
    """Remove blobs that no version has, of any tenant, deleted or not; returns how many.

    A blob that is being enrolled is locked until its row is written, and one with requests until they end.
    """
    present = sorted(await asyncio.to_thread(blobs.digests))
    removed = 0
    for start in range(0, len(present), BATCH):
        batch = frozenset(present[start : start + BATCH])
        for digest in sorted(batch - await digests_in_use(db, batch)):
            with blobs.claim(digest) as claimed:
                if claimed and not await digests_in_use(db, frozenset({digest})):
                    await blobs.remove(digest)
                    removed += 1
    if removed:
        logger.info("removed %d blobs that no version has", removed)
    return removed
