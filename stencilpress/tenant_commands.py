"""``stencilpress tenant``: customers and their plans. The admin API has the same verbs."""

from __future__ import annotations

from typing import Any

import click

from stencilpress.commands import (
    OR_NONE_COUNT,
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

LIMIT_OPTIONS: dict[str, tuple[Any, str]] = {
    "max_rank": (int, "Largest rank of an adapter."),
    "max_adapters": (int, "Number of adapters."),
    "max_versions": (int, "Number of versions of one adapter."),
    "max_adapter_bytes": (int, "Size of one version."),
    "stored_bytes": (int, "Size of all versions together."),
    "weight": (float, "Share of a full engine beside other tenants; 1 is usual."),
    "max_tokens": (OR_NONE_COUNT, "Longest answer that a request may ask for, or none."),
    "default_max_tokens": (OR_NONE_COUNT, "Longest answer of a request that does not say, or none."),
    "requests_per_minute": (OR_NONE_COUNT, "Requests in a minute, or none."),
    "tokens_per_minute": (OR_NONE_COUNT, "Prompt and answer tokens in a minute, or none."),
    "concurrent_streams": (OR_NONE_COUNT, "Requests in progress at once, or none."),
    "tokens_per_day": (OR_NONE_COUNT, "Tokens from midnight to midnight, or none."),
    "tokens_per_month": (OR_NONE_COUNT, "Tokens of a calendar month, or none."),
    "time_zone": (str, "Whose midnight: an IANA name such as Europe/Vienna."),
}
"""Fields of a plan that ``add`` and ``set`` take as options."""
_COLUMNS = (
    "name",
    "created_at",
    "disabled_at",
    "deleted_at",
    "max_rank",
    "max_adapters",
    "stored_bytes",
    "requests_per_minute",
    "tokens_per_day",
    "concurrent_streams",
    "weight",
)
"""Of the table; JSON and ``tenant show`` have all."""


@click.group()
def tenant() -> None:
    """Customers and their limits."""


def _limit_options(command: F) -> F:
    command = click.option("--quota-shadow/--no-quota-shadow", default=None, help="Report refusals, refuse nothing.")(
        command
    )
    command = click.option(
        "--target-module", "target_modules", multiple=True, help="Allow only this projection; may be repeated."
    )(command)
    for name, (kind, text) in reversed(LIMIT_OPTIONS.items()):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command


def _given(limits: dict[str, Any]) -> dict[str, Any]:
    """The fields that the options name; ``none`` is None there, an option that is left out is not."""
    chosen = {name: value for name, value in limits.items() if value is not None and value != ()}
    return {name: None if value == OR_NONE_COUNT.NONE else value for name, value in chosen.items()}


@tenant.command("add")
@place_options
@click.argument("name")
@_limit_options
@json_option
def tenant_add(place: Place, name: str, as_json: bool, **limits: Any) -> None:
    """Add a tenant. Limits that are left out take their defaults."""
    from stencilpress.gateway.api.admin.views import TenantView
    from stencilpress.gateway.catalog.limits import changed
    from stencilpress.gateway.catalog.records import TenantLimits
    from stencilpress.gateway.catalog.tenants import create_tenant

    chosen = changed(TenantLimits(), _given(limits))
    made = with_catalog(place, lambda db: create_tenant(db, name, chosen, actor=operator_here()))
    tell(f"added tenant {made.name}", TenantView.of(made), as_json)


@tenant.command("list")
@place_options
@click.option("--prefix", default="", help="Only names that begin so.")
@click.option("--deleted", is_flag=True, help="Deleted ones too.")
@json_option
def tenant_list(place: Place, prefix: str, deleted: bool, as_json: bool) -> None:
    """List the tenants by name."""
    from stencilpress.gateway.api.admin.views import TenantView
    from stencilpress.gateway.catalog.tenants import list_tenants

    found = with_catalog(place, lambda db: list_tenants(db, prefix=prefix, deleted=deleted))
    show([TenantView.of(one) for one in found], as_json, _COLUMNS)


@tenant.command("show")
@place_options
@click.argument("name")
@json_option
def tenant_show(place: Place, name: str, as_json: bool) -> None:
    """Show a tenant with all its limits."""
    from stencilpress.gateway.api.admin.views import TenantView
    from stencilpress.gateway.catalog.tenants import get_tenant

    show_one(TenantView.of(with_catalog(place, lambda db: get_tenant(db, name, deleted=True))), as_json)


@tenant.command("set")
@place_options
@click.argument("name")
@_limit_options
@click.option("--all-target-modules", is_flag=True, help="Allow every projection again.")
@json_option
def tenant_set(place: Place, name: str, all_target_modules: bool, as_json: bool, **limits: Any) -> None:
    """Change a tenant's limits; what is left out stays. Gateways follow within a second."""
    from stencilpress.gateway.api.admin.views import TenantView
    from stencilpress.gateway.catalog.tenants import change_tenant

    changes = _given(limits)
    if all_target_modules:
        if "target_modules" in changes:
            raise click.UsageError("--all-target-modules and --target-module exclude each other")
        changes["target_modules"] = None
    if not changes:
        raise click.UsageError("nothing to change: name at least one limit")
    made = with_catalog(place, lambda db: change_tenant(db, name, changes, actor=operator_here()))
    tell(f"changed {', '.join(changes)} of tenant {made.name}", TenantView.of(made), as_json)


@tenant.command("disable")
@place_options
@click.argument("name")
@json_option
def tenant_disable(place: Place, name: str, as_json: bool) -> None:
    """Refuse a tenant's keys and uploads from now on."""
    _mark(place, name, "disable", "disabled", as_json)


@tenant.command("enable")
@place_options
@click.argument("name")
@json_option
def tenant_enable(place: Place, name: str, as_json: bool) -> None:
    """Take a disabled tenant's keys and uploads again."""
    _mark(place, name, "enable", "enabled", as_json)


@tenant.command("delete")
@place_options
@click.argument("name")
@json_option
def tenant_delete(place: Place, name: str, as_json: bool) -> None:
    """Delete a tenant with its keys and adapters. Nothing is erased, and its name stays taken."""
    _mark(place, name, "delete", "deleted", as_json)


@tenant.command("restore")
@place_options
@click.argument("name")
@json_option
def tenant_restore(place: Place, name: str, as_json: bool) -> None:
    """Bring a deleted tenant back as it was."""
    _mark(place, name, "restore", "restored", as_json)


@tenant.command("purge")
@place_options
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def tenant_purge(place: Place, name: str, yes: bool, as_json: bool) -> None:
    """Erase a deleted tenant for good. Its name is free again; the audit log and the sums of its usage stay."""
    from msgspec import convert

    from stencilpress.gateway.api.admin.views import Purged
    from stencilpress.gateway.catalog.erasure import purge_tenant

    if not yes:
        click.confirm(f"Erase all of tenant {name}? This cannot be undone.", abort=True, err=True)
    erased = with_catalog(place, lambda db: purge_tenant(db, name, actor=operator_here()))
    tell(f"purged tenant {name}", convert(erased, Purged, from_attributes=True), as_json)


def _mark(place: Place, name: str, verb: str, done: str, as_json: bool) -> None:
    from stencilpress.gateway.api.admin.views import TenantView
    from stencilpress.gateway.catalog import tenants

    mark = getattr(tenants, f"{verb}_tenant")
    made = with_catalog(place, lambda db: mark(db, name, actor=operator_here()))
    tell(f"{done} tenant {name}", TenantView.of(made), as_json)
