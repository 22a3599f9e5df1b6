"""``stencilpress usage``: what tenants used. The admin API has the same verbs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

import click

from stencilpress.commands import Place, json_option, place_options, show, show_one, with_catalog

if TYPE_CHECKING:
    from stencilpress.gateway.api.admin.series_views import SeriesView
    from stencilpress.gateway.catalog.session import Database
    from stencilpress.gateway.catalog.tops import By
    from stencilpress.gateway.catalog.usage_sums import UsageSum
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
BY = ("tokens", "requests", "failures", "cold_starts", "hit_rate", "ttft_p99")
_SERIES = (
    "time",
    "requests",
    "failures",
    "cold_starts",
    "prompt_tokens_per_s",
    "completion_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "inter_token_ms_p50",
    "inter_token_ms_p99",
)
_hours_option = click.option(
    "--hours", type=click.FloatRange(0.1, 87_600), default=24.0, show_default=True, help="The span, up to now."
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
    from stencilpress.gateway.catalog.usage_reports import usage_by_adapter
    from stencilpress.gateway.catalog.usage_sums import SECONDS

    end = datetime.now(UTC)
    start = end - last * timedelta(seconds=SECONDS[period])

    async def work(db: Database) -> list[tuple[str, UsageSum]]:
        owner = await get_tenant(db, tenant_name, deleted=True)
        return await usage_by_adapter(db, owner.id, period, start, end, limit=limit)

    show([UsageView.of(one) for one in with_catalog(place, work)], as_json, _SUMS)


@usage.command("days")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@click.option("--last", type=click.IntRange(1, 400), default=30, show_default=True, help="Number of days.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def usage_days(place: Place, tenant_name: str, last: int, as_csv: bool, as_json: bool) -> None:
    """Usage by day (UTC)."""
    from stencilpress.gateway.api.admin.tables import csv_text
    from stencilpress.gateway.api.admin.usage import DaysView
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.catalog.usage_reports import usage_by_day

    today = datetime.now(UTC).date()

    async def work(db: Database) -> DaysView:
        owner = await get_tenant(db, tenant_name, deleted=True)
        return DaysView.of(await usage_by_day(db, owner.id, today - timedelta(days=last - 1), today))

    view = with_catalog(place, work)
    if as_csv:
        click.echo(csv_text(view.table()), nl=False)
    elif as_json:
        show_one(view, as_json)
    else:
        show(view.data, as_json)


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


@usage.command("series")
@place_options
@click.argument("tenant_name", metavar="[TENANT]", required=False)
@click.option("--adapter", help="Only this adapter of the tenant; base for the base alone.")
@click.option("--version", type=click.IntRange(0), help="Only this version of the adapter.")
@_hours_option
@click.option("--points", type=click.IntRange(1, 400), default=24, show_default=True, help="Rows, at most.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
def usage_series(
    place: Place,
    tenant_name: str | None,
    adapter: str | None,
    version: int | None,
    hours: float,
    points: int,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Traffic, tokens and latencies over time, of all tenants or of one."""
    from stencilpress.gateway.api.admin.series import SeriesQuery, series_of
    from stencilpress.gateway.api.admin.tables import csv_text
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.catalog.usage_sums import EVERYBODY

    if tenant_name is None and adapter is not None:
        raise click.UsageError("--adapter needs the tenant that it belongs to")

    async def work(db: Database) -> SeriesView:
        tenant_id = EVERYBODY if tenant_name is None else (await get_tenant(db, tenant_name, deleted=True)).id
        query = SeriesQuery(adapter=adapter, version=version, start=_ago(hours), points=points)
        return await series_of(db, query, tenant_id)

    view = with_catalog(place, work)
    if as_json:
        show_one(view, as_json)
    elif as_csv:
        click.echo(csv_text(view.table()), nl=False)
    else:
        table = view.table()
        show([dict(zip(table.header, row, strict=True)) for row in table.rows], as_json, _SERIES)


@usage.command("top")
@place_options
@click.argument("tenant_name", metavar="[TENANT]", required=False)
@click.option("--by", type=click.Choice(BY), default="tokens", show_default=True, help="The order.")
@click.option("--tenants", is_flag=True, help="Tenants as a whole, instead of adapters.")
@_hours_option
@click.option("--limit", type=click.IntRange(1, 50), default=20, show_default=True, help="Rows.")
@json_option
def usage_top(
    place: Place, tenant_name: str | None, by: By, tenants: bool, hours: float, limit: int, as_json: bool
) -> None:
    """The adapters, or tenants, that come first by a number."""
    from stencilpress.gateway.api.admin.series_views import TopView
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.catalog.tops import top_adapters, top_span, top_tenants

    if tenants and tenant_name is not None:
        raise click.UsageError("--tenants is for all tenants")

    async def work(db: Database) -> TopView:
        span = top_span(_ago(hours), datetime.now(UTC))
        owner = None if tenant_name is None else (await get_tenant(db, tenant_name, deleted=True)).id
        found = await (top_tenants(db, span, by, limit) if tenants else top_adapters(db, span, by, limit, owner))
        return TopView.of(span.start, span.end, found)

    view = with_catalog(place, work)
    if as_json:
        show_one(view, as_json)
        return
    table = view.table()
    show([dict(zip(table.header, row, strict=True)) for row in table.rows], as_json, table.header)


def _ago(hours: float) -> datetime:
    return datetime.now(UTC) - timedelta(hours=hours)
