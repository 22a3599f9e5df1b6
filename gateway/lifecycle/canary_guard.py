"""The guard of canaries: a job that takes back those that are worse than their guards allow."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from stencilpress.gateway.access import SYSTEM
from stencilpress.gateway.catalog.aliases import withdraw_canary
from stencilpress.gateway.catalog.canaries import Comparison, RunningCanary, compare_guarded
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.usage_sums import UsageSum
from stencilpress.gateway.errors import ConflictError, NotFoundError
from stencilpress.gateway.lifecycle.canary import Judgement, Side, Verdict, judge

logger = logging.getLogger(__name__)


async def guard_canaries(db: Database, now: datetime | None = None) -> list[RunningCanary]:
    """Look at every guarded canary once; returns those that were taken back.

    By compare-and-set on the move that was judged: what somebody moved meanwhile stays as it is, and of two gateways
    one succeeds. Raises :class:`UnavailableError`.
    """
    taken_back = []
    for comparison in await compare_guarded(db, now or datetime.now(UTC)):
        verdict = verdict_of(comparison)
        if verdict.judgement is Judgement.BAD and await _take_back(db, comparison.running, verdict):
            taken_back.append(comparison.running)
    return taken_back


def verdict_of(one: Comparison) -> Verdict:
    """What a canary's guard says."""
    return judge(one.running.canary.guard, _side(one.current), _side(one.canary))


async def _take_back(db: Database, one: RunningCanary, verdict: Verdict) -> bool:
    reason = f"canary {one.canary.version}: {verdict.reason}"
    try:
        await withdraw_canary(
            db, one.tenant_id, one.adapter, one.alias, move_id=one.move_id, reason=reason, actor=SYSTEM
        )
    except (ConflictError, NotFoundError) as error:  # moved, deleted or disabled meanwhile
        logger.info("canary of %s@%s stays: %s", one.adapter, one.alias, error.message)
        return False
    logger.warning("canary of tenant %d, %s@%s was taken back: %s", one.tenant_id, one.adapter, one.alias, reason)
    return True


def _side(usage: UsageSum) -> Side:
    return Side(usage.requests, usage.failures, usage.ttft)
