"""What has to be done now and then: purge what was deleted long enough ago, and blobs that no version has.

The catalog and the cold tier are shared by all hosts: they are tended by whoever has a lease in SQL. A data folder is
tended by one of the processes that use it, by a lock on a file in it; so what was purged also leaves the other hosts.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from stencilpress.gateway.blobs import BlobStore
from stencilpress.gateway.catalog.erasure import purge_deleted_tenants
from stencilpress.gateway.catalog.leases import acquire, give_back, lease_s
from stencilpress.gateway.catalog.lifecycle import digests_in_use, list_purgeable, purge
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.lifecycle.cold import ColdTier, ColdTierError
from stencilpress.gateway.lifecycle.desk import AdapterDesk

BATCH = 500
"""Digests in one question to the database."""
JOB = "adapter-upkeep"
"""The lease's name."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """How often to look, and what is over. ``tenant_grace`` None erases no tenant, ``local_bytes`` 0 keeps all."""

    every_s: float
    grace: timedelta
    tenant_grace: timedelta | None = None
    local_bytes: int = 0


async def tend_for_ever(desk: AdapterDesk, terms: Terms) -> None:
    """Run :func:`tend` again and again. Cancelling gives the lease back."""
    holder = secrets.token_hex(8)
    try:
        while True:
            await asyncio.sleep(terms.every_s)
            await tend(desk, terms, holder)
    finally:
        await give_back(desk.db, JOB, holder)


async def tend(desk: AdapterDesk, terms: Terms, holder: str) -> None:
    """One round of a process. A database or a store that is away costs this round of its part."""
    with _put_off():
        if await acquire(desk.db, JOB, holder, lease_s(terms.every_s)):
            await tend_catalog(desk, terms)
    with _put_off():
        await tend_folder(desk, terms.local_bytes)


async def tend_catalog(desk: AdapterDesk, terms: Terms) -> None:
    """What all hosts share, in an order that leaves what is purged to the same round's garbage. It may run twice.

    Raises :class:`UnavailableError`, :class:`ColdTierError`.
    """
    await purge_tenants(desk.db, terms.tenant_grace)
    await purge_deleted(desk.db, desk.blobs, terms.grace)
    if desk.cold is not None:
        await collect_cold_garbage(desk.db, desk.cold)


async def tend_folder(desk: AdapterDesk, local_bytes: int) -> None:
    """What lies in the data folder, unless another process is at it.

    Raises :class:`UnavailableError`, :class:`ColdTierError`, ``OSError``.
    """
    lock = await asyncio.to_thread(_try_lock, desk.blobs.adapters.parent / "upkeep.lock")
    if lock is None:
        return
    try:
        await collect_garbage(desk.db, desk.blobs)
        await desk.blobs.clean()
        await desk.uploads.clean()
        if desk.cold is not None:
            await copy_to_cold(desk.db, desk.blobs, desk.cold)
            await make_room(desk.blobs, desk.cold, local_bytes)
    finally:
        os.close(lock)


async def purge_deleted(db: Database, blobs: BlobStore, grace: timedelta) -> int:
    """Forget versions that were deleted ``grace`` ago and on which no request of this host runs any more.

    Their blobs are then garbage; on another host those stay until the requests on them have ended. Returns how many
    versions went.
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


async def purge_tenants(db: Database, grace: timedelta | None) -> None:
    """Erase the tenants that were deleted ``grace`` ago; None erases nobody."""
    if grace is None:
        return
    for erased in await purge_deleted_tenants(db, datetime.now(UTC) - grace):
        logger.info("purged a deleted tenant, now %s", erased.tombstone)


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


async def copy_to_cold(db: Database, blobs: BlobStore, cold: ColdTier) -> int:
    """Copy what the cold tier lacks of this host's versions; returns how many."""
    missing = await asyncio.to_thread(blobs.digests) - await cold.digests()
    copied = 0
    for digest in sorted(await digests_in_use(db, frozenset(missing))):
        await cold.store(digest, blobs.folder(digest))
        copied += 1
    return copied


async def collect_cold_garbage(db: Database, cold: ColdTier) -> int:
    """Remove from the cold tier what no version has, also what was copied or removed by half.

    Rows come before copies, so nothing that is new is taken.
    """
    removed = 0
    for digest in sorted(await cold.digests(whole=False)):
        if not await digests_in_use(db, frozenset({digest})):
            await cold.remove(digest)
            removed += 1
    return removed


async def make_room(blobs: BlobStore, cold: ColdTier, local_bytes: int) -> int:
    """Remove the blobs that were used least recently, are in the cold tier, and are not in use, until the rest fits.

    ``local_bytes`` 0 keeps all. Returns how many went.
    """
    sizes = await asyncio.to_thread(blobs.sizes) if local_bytes else {}
    excess = sum(size for size, _ in sizes.values()) - local_bytes
    removed = 0
    for digest, (size, _) in sorted(sizes.items(), key=lambda item: item[1][1]):
        if excess <= 0:
            break
        with blobs.claim(digest) as claimed:
            if claimed and await cold.has(digest):
                await blobs.remove(digest)
                excess -= size
                removed += 1
    return removed


@contextmanager
def _put_off() -> Iterator[None]:
    try:
        yield
    except (UnavailableError, ColdTierError, OSError) as error:
        logger.warning("upkeep of adapters was put off: %s", error)
    except Exception:
        logger.exception("upkeep of adapters failed")


def _try_lock(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
