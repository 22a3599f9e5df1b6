"""How a canary does beside the version that it is to replace."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from stencilpress.gateway.access import Permission
from stencilpress.gateway.api.admin.adapter_views import CanaryGuardView, CanaryView
from stencilpress.gateway.api.admin.operation import Call, operation
from stencilpress.gateway.api.admin.series_views import UsageTotals
from stencilpress.gateway.catalog.canaries import Comparison, compare_canary
from stencilpress.gateway.lifecycle.canary import Judgement
from stencilpress.gateway.lifecycle.canary_guard import verdict_of


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What both versions of an alias did from `since` on, and what the guard says: `bad` is taken back within a minute.

    `since` is when the alias was moved last, or the begin of the guard's window. Requests of all tenants count that may
    use the adapter.
    """

    adapter: str
    alias: str
    etag: str
    version: int
    canary: int
    percent: int
    guard: CanaryGuardView | None
    since: datetime
    current_total: UsageTotals
    canary_total: UsageTotals
    verdict: Judgement
    reason: str

    @classmethod
    def of(cls, one: Comparison) -> CanaryReport:
        running, verdict = one.running, verdict_of(one)
        view = CanaryView.of(running.canary)
        return cls(
            adapter=running.adapter,
            alias=running.alias,
            etag=f'"{running.move_id}"',
            version=running.version,
            canary=running.canary.version,
            percent=running.canary.percent,
            guard=None if view is None else view.guard,
            since=one.since,
            current_total=UsageTotals.of(one.current),
            canary_total=UsageTotals.of(one.canary),
            verdict=verdict.judgement,
            reason=verdict.reason,
        )


@operation("GET", "/tenants/{tenant}/adapters/{adapter}/aliases/{alias}/canary", Permission.READ)
async def get_canary(call: Call) -> CanaryReport:
    """How an alias's canary does beside its version: errors, first token, gaps, speed, and what its guard says."""
    now = datetime.now(UTC)
    db, tenant_id = call.services.db, call.tenant.id
    return CanaryReport.of(await compare_canary(db, tenant_id, call.path("adapter"), call.path("alias"), now))


OPERATIONS = (get_canary,)
