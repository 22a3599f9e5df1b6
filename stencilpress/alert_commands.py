"""``stencilpress alert``: what fires, the rules, and where it is told. The admin API has the same verbs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stencilpress.commands import (
    F,
    Place,
    json_option,
    operator_here,
    place_options,
    show,
    show_one,
    tell,
    with_catalog,
)

if TYPE_CHECKING:
    from stencilpress.gateway.alerts.rules import Kind, Rules
    from stencilpress.gateway.alerts.rules import Place as Scope
    from stencilpress.gateway.api.admin.alert_views import WebhookView
    from stencilpress.gateway.catalog.alert_outbox import Webhook
    from stencilpress.gateway.catalog.alerts import Alert
    from stencilpress.gateway.catalog.session import Database

STATES = ("open", "pending", "firing", "resolved", "all")
SEVERITIES = ("info", "warning", "critical")
_COLUMNS = ("id", "state", "severity", "summary", "description", "since", "acknowledged_by")
_RULE_COLUMNS = ("kind", "adapter", "enabled", "threshold", "unit", "for_s", "clear_s", "min_requests", "severity")
_tenant_option = click.option("--tenant", "tenant_name", metavar="NAME", help="Of this tenant.")
_needed_tenant = click.option("--tenant", "tenant_name", required=True, metavar="NAME", help="Whose webhook.")
_adapter_option = click.option("--adapter", default="", metavar="NAME", help="Of this adapter of the tenant.")


@click.group()
def alert() -> None:
    """Alerts, their rules, and where they are told."""


@alert.command("list")
@place_options
@_tenant_option
@click.option("--state", type=click.Choice(STATES), default="open", show_default=True, help="Only in this state.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Alerts.")
@json_option
def alert_list(place: Place, tenant_name: str | None, state: str, limit: int, as_json: bool) -> None:
    """List alerts, the newest first."""
    from stencilpress.gateway.api.admin.alert_views import AlertView
    from stencilpress.gateway.api.admin.alerts import STATES as BY_NAME
    from stencilpress.gateway.catalog.alerts import list_alerts

    async def work(db: Database) -> tuple[Alert, ...]:
        states = BY_NAME[state]  # type: ignore[index]
        return await list_alerts(db, tenant_id=await _tenant_id(db, tenant_name), states=states, limit=limit)

    show([AlertView.of(one) for one in with_catalog(place, work)], as_json, _COLUMNS)


@alert.command("ack")
@place_options
@click.argument("alert_id", metavar="ID", type=click.IntRange(1))
@_tenant_option
@json_option
def alert_ack(place: Place, alert_id: int, tenant_name: str | None, as_json: bool) -> None:
    """Say that somebody has seen a firing alert."""
    from stencilpress.gateway.api.admin.alert_views import AlertView
    from stencilpress.gateway.catalog.alerts import acknowledge

    async def work(db: Database) -> Alert:
        return await acknowledge(db, alert_id, tenant_id=await _tenant_id(db, tenant_name), actor=operator_here())

    tell(f"acknowledged alert {alert_id}", AlertView.of(with_catalog(place, work)), as_json)


@alert.command("rules")
@place_options
@_tenant_option
@json_option
def alert_rules(place: Place, tenant_name: str | None, as_json: bool) -> None:
    """List the rules as they hold for all, or for a tenant and those of its adapters that have their own."""
    from stencilpress.gateway.alerts.rules import Kind
    from stencilpress.gateway.alerts.rules import Place as Scope
    from stencilpress.gateway.api.admin.alert_views import RuleView
    from stencilpress.gateway.api.admin.alerts import tenant_rules
    from stencilpress.gateway.catalog.alerts import read_rules

    async def work(db: Database) -> tuple[Rules, int | None]:
        tenant_id = await _tenant_id(db, tenant_name)
        return await read_rules(db, tenant_id), tenant_id

    rules, tenant_id = with_catalog(place, work)
    views = (
        [RuleView.of(rules, kind, Scope()) for kind in Kind] if tenant_id is None else tenant_rules(rules, tenant_id)
    )
    show(views, as_json, _RULE_COLUMNS)


def _rule_command(name: str) -> Callable[[F], F]:
    """A command on the rule KIND of a scope that can print JSON."""

    def make(command: F) -> F:
        kind = click.argument("kind_name", metavar="KIND")
        options = _tenant_option(_adapter_option(json_option(command)))
        made: F = alert.command(name)(place_options(kind(options)))  # type: ignore[assignment]
        return made

    return make


@_rule_command("set-rule")
@click.option("--enabled/--disabled", default=None, help="Whether it is judged at all.")
@click.option("--threshold", type=float, help="In the unit of the kind: a share, milliseconds, or bytes.")
@click.option("--for-s", type=int, help="How long it must be so before it fires.")
@click.option("--clear-s", type=int, help="How long it must be well before it is resolved.")
@click.option("--min-requests", type=int, help="Fewer in ten minutes decide nothing.")
@click.option("--severity", type=click.Choice(SEVERITIES), help="How bad it is.")
def alert_set_rule(
    place: Place, kind_name: str, tenant_name: str | None, adapter: str, as_json: bool, **change: Any
) -> None:
    """Change a rule for all, for a tenant, or for an adapter, in place of what was changed there before."""
    from stencilpress.gateway.alerts.rules import RuleChange, Severity
    from stencilpress.gateway.catalog.alerts import set_rule

    severity = change.pop("severity")
    wanted = RuleChange(**change, severity=None if severity is None else Severity(severity))

    async def work(db: Database, kind: Kind, scope: Scope) -> None:
        await set_rule(db, kind, scope, wanted, actor=operator_here())

    _change_rule(place, kind_name, tenant_name, adapter, as_json, work, "changed")


@_rule_command("reset-rule")
def alert_reset_rule(place: Place, kind_name: str, tenant_name: str | None, adapter: str, as_json: bool) -> None:
    """Let the rule of the wider scope hold again."""
    from stencilpress.gateway.catalog.alerts import reset_rule

    async def work(db: Database, kind: Kind, scope: Scope) -> None:
        await reset_rule(db, kind, scope, actor=operator_here())

    _change_rule(place, kind_name, tenant_name, adapter, as_json, work, "reset")


@alert.command("webhook")
@place_options
@_needed_tenant
@json_option
def alert_webhook(place: Place, tenant_name: str, as_json: bool) -> None:
    """Show where a tenant's alerts are sent, with the last notifications."""
    show_one(_webhook_view(place, tenant_name), as_json)


@alert.command("set-webhook")
@place_options
@click.argument("url")
@_needed_tenant
@click.option("--secret-file", type=click.File("r"), help="A file with the secret that signs; empty for none.")
@click.option("--private", is_flag=True, help="Allow addresses inside, as STENCILPRESS_ALERT_PRIVATE_WEBHOOKS does.")
@json_option
def alert_set_webhook(place: Place, url: str, tenant_name: str, secret_file: Any, private: bool, as_json: bool) -> None:
    """Send a tenant's alerts to URL. Without a file the secret that is set stays."""
    from stencilpress.gateway.alerts.addresses import check_url
    from stencilpress.gateway.catalog.alert_outbox import set_webhook

    secret = None if secret_file is None else secret_file.read().strip()

    async def work(db: Database) -> None:
        check_url(url, private=private)
        await set_webhook(db, await _id_of(db, tenant_name), url, secret, actor=operator_here())

    with_catalog(place, work)
    tell(f"alerts of {tenant_name} are sent to {url}", _webhook_view(place, tenant_name), as_json)


@alert.command("remove-webhook")
@place_options
@_needed_tenant
def alert_remove_webhook(place: Place, tenant_name: str) -> None:
    """Send a tenant's alerts nowhere, nor what still waits."""
    from stencilpress.gateway.catalog.alert_outbox import remove_webhook

    async def work(db: Database) -> None:
        await remove_webhook(db, await _id_of(db, tenant_name), actor=operator_here())

    with_catalog(place, work)
    click.echo(f"alerts of {tenant_name} are sent nowhere")


@alert.command("test-webhook")
@place_options
@_needed_tenant
@click.option("--private", is_flag=True, help="Allow addresses inside, as STENCILPRESS_ALERT_PRIVATE_WEBHOOKS does.")
@json_option
def alert_test_webhook(place: Place, tenant_name: str, private: bool, as_json: bool) -> None:
    """Send a test notification to a tenant's webhook and say how it fared."""
    from stencilpress.gateway.alerts.trial import try_webhook
    from stencilpress.gateway.api.admin.alert_views import Trial
    from stencilpress.gateway.catalog.alert_outbox import get_webhook

    async def work(db: Database) -> Webhook:
        return await get_webhook(db, await _id_of(db, tenant_name))

    hook = with_catalog(place, work)
    error = asyncio.run(try_webhook(hook, f"tenant/{tenant_name}", private=private))
    tell(error or "delivered", Trial(delivered=not error, error=error), as_json)


@alert.command("prometheus-rules")
@place_options
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True), default="-")
def alert_prometheus_rules(place: Place, file: Path) -> None:
    """Write the rules that hold for all as a rules file of Prometheus to FILE, or print them."""
    from stencilpress.gateway.alerts.prometheus import rules_file
    from stencilpress.gateway.catalog.alerts import read_rules

    text = rules_file(with_catalog(place, read_rules))
    if os.fspath(file) == "-":
        click.echo(text, nl=False)
    else:
        file.write_text(text)


def _change_rule(
    place: Place,
    kind_name: str,
    tenant_name: str | None,
    adapter: str,
    as_json: bool,
    work: Callable[[Database, Kind, Scope], Coroutine[Any, Any, None]],
    done: str,
) -> None:
    """Change one rule and print what holds now."""
    from stencilpress.gateway.alerts.rules import Kind
    from stencilpress.gateway.alerts.rules import Place as Scope
    from stencilpress.gateway.api.admin.alert_views import RuleView
    from stencilpress.gateway.catalog.alerts import read_rules

    if kind_name not in set(Kind):
        raise click.BadParameter(f"{kind_name!r} is not one of {', '.join(Kind)}", param_hint="KIND")
    if adapter and tenant_name is None:
        raise click.UsageError("--adapter needs --tenant")

    async def change(db: Database) -> RuleView:
        kind, scope = Kind(kind_name), Scope(await _tenant_id(db, tenant_name), adapter)
        await work(db, kind, scope)
        return RuleView.of(await read_rules(db, scope.tenant_id), kind, scope)

    tell(f"{done} rule {kind_name}", with_catalog(place, change), as_json)


def _webhook_view(place: Place, tenant_name: str) -> WebhookView:
    from stencilpress.gateway.api.admin.alert_views import WebhookView
    from stencilpress.gateway.catalog.alert_outbox import find_webhook, list_deliveries

    async def work(db: Database) -> WebhookView:
        tenant_id = await _id_of(db, tenant_name)
        return WebhookView.of(await find_webhook(db, tenant_id), await list_deliveries(db, tenant_id))

    return with_catalog(place, work)


async def _tenant_id(db: Database, name: str | None) -> int | None:
    return None if name is None else await _id_of(db, name)


async def _id_of(db: Database, name: str) -> int:
    from stencilpress.gateway.catalog.tenants import get_tenant

    return (await get_tenant(db, name)).id
