"""Leases in SQL: of several gateways one runs a periodic job.

A lease keeps two from working at once in the ordinary case; a holder that is stopped for longer than its lease may
still wake up beside its successor, so a job must also be right when it runs twice (a transaction of its own does it).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from stencilpress.gateway.catalog.models import JobLeaseRow
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.errors import UnavailableError

LEAST_LEASE_S = 30.0
"""Longer than any pause of a process that still runs."""

logger = logging.getLogger(__name__)


def lease_s(interval_s: float) -> float:
    """How long to hold a lease between two runs: a holder that dies is replaced after that."""
    return max(3 * interval_s, LEAST_LEASE_S)


async def acquire(db: Database, name: str, holder: str, ttl_s: float) -> bool:
    """Take or prolong the lease ``name`` for ``ttl_s``; False if somebody else holds it.

    By the database's clock, so hosts need not agree on theirs. Raises :class:`UnavailableError`.
    """
    async with db.write() as session:
        now = await _now(db, session)
        values = {"holder": holder, "expires_at": now + timedelta(seconds=ttl_s)}
        free = or_(JobLeaseRow.holder == holder, JobLeaseRow.expires_at <= now)
        taken = update(JobLeaseRow).where(JobLeaseRow.name == name, free).values(values).returning(JobLeaseRow.name)
        if await session.scalar(taken) is not None:
            return True
        insert = postgresql.insert if db.is_postgresql else sqlite.insert
        new = insert(JobLeaseRow).values(name=name, **values).on_conflict_do_nothing().returning(JobLeaseRow.name)
        return await session.scalar(new) is not None


async def release(db: Database, name: str, holder: str) -> None:
    """Let another holder take over at once."""
    async with db.write() as session:
        now = await _now(db, session)
        mine = (JobLeaseRow.name == name, JobLeaseRow.holder == holder)
        await session.execute(update(JobLeaseRow).where(*mine).values(expires_at=now))


async def give_back(db: Database, name: str, holder: str) -> None:
    """:func:`release` at the end of a process, which a catalog that is away does not hold up."""
    try:
        await release(db, name, holder)
    except UnavailableError:
        logger.warning("the lease of job %s is left to expire", name)


async def run_periodically(
    db: Database, name: str, holder: str, interval_s: float, job: Callable[[], Awaitable[object]]
) -> None:
    """Run ``job`` every ``interval_s`` while this process holds the lease, for ever. Failures are logged and retried.

    A holder that dies is replaced after three intervals or half a minute. Cancelling gives the lease back.
    """
    try:
        while True:
            try:
                if await acquire(db, name, holder, lease_s(interval_s)):
                    await job()
            except UnavailableError as error:
                logger.warning("job %s waits for the catalog: %s", name, error)
            except Exception:
                logger.exception("job %s failed", name)
            await asyncio.sleep(interval_s)
    finally:
        await give_back(db, name, holder)


async def _now(db: Database, session: AsyncSession) -> datetime:
    if not db.is_postgresql:
        return datetime.now(UTC)  # one host, one clock
    return await session.scalar(select(func.clock_timestamp())) or datetime.now(UTC)
