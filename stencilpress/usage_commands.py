"""``stencilpress usage``: what tenants used. The admin API has the same verbs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

import click

from stencilpress.console import Place, json_option, place_options, show, with_catalog

if TYPE_CHECKING:
    from stencilpress.gateway.catalog.session import Database
    from stencilpress.gateway.catalog.usage import UsageSum
    from stencilpress.gateway.usage.record import UsageRow

PERIODS = ("minute", "hour", "day")
_SUMS = (
    "adapter",
    "requests",
    "failures",
    "prompt_tokens",
    "completion_tokens",
    "cold_starts",
    "ttft_ms",
    "inter_token_ms",
)
_REQUESTS = (
    "admitted_at",
    "request_id",
    "key_id",
    "adapter",
    "version",
    "status",
    "prompt_tokens",
    "completion_tokens",
    "ttft_ms",
    "duration_ms",
)
_limit_option = click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Rows.")


@click.group()
def usage() -> None:
    """What tenants used."""


@usage.command("list")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@click.option("--period", type=click.Choice(PERIODS), default="day", show_default=True, help="The roll-ups added up.")
@click.option("--last", type=click.IntRange(1, 400), default=30, show_default=True, help="Number of periods.")
@_limit_option
@json_option
def usage_list(
    place: Place, tenant_name: str, period: Literal["minute", "hour", "day"], last: int, limit: int, as_json: bool
) -> None:
    """Sums by adapter with percentiles of latencies, in milliseconds."""
    from stencilpress.gateway.api.admin.usage import UsageView
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.catalog.usage import SECONDS
    from stencilpress.gateway.catalog.usage_reports import usage_by_adapter

    end = datetime.now(UTC)
    start = end - last * timedelta(seconds=SECONDS[period])

    async def work(db: Database) -> list[tuple[str, UsageSum]]:
        owner = await get_tenant(db, tenant_name, deleted=True)
        return await usage_by_adapter(db, owner.id, period, start, end, limit=limit)

    show([UsageView.of(one) for one in with_catalog(place, work)], as_json, _SUMS)


@usage.command("requests")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@_limit_option
@json_option
def usage_requests(place: Place, tenant_name: str, limit: int, as_json: bool) -> None:
    """Single requests, newest first, as long as they are kept."""
    from stencilpress.gateway.api.admin.usage import RequestView
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.catalog.usage_reports import list_requests

    async def work(db: Database) -> tuple[UsageRow, ...]:
        owner = await get_tenant(db, tenant_name, deleted=True)
        return await list_requests(db, owner.id, limit=limit)

    show([RequestView.of(one) for one in with_catalog(place, work)], as_json, _REQUESTS)
