"""``stencilpress key``: API keys. The admin API has the same verbs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
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

MAX_DAYS = 36_500
ROLES = ("operator", "admin", "viewer", "caller")
_COLUMNS = ("id", "role", "label", "last_four", "created_at", "expires_at", "revoked_at", "models", "routes")


@click.group()
def key() -> None:
    """API keys of a tenant."""


def _scope_options(command: F) -> F:
    routes = click.option("--route", "routes", multiple=True, help="Confine it to this route; may be repeated.")
    models = click.option("--model", "models", multiple=True, help="Confine it to this adapter; may be repeated.")
    return models(routes(command))


@key.command("create")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@click.option("--role", type=click.Choice(ROLES), default="caller", show_default=True, help="What it may do.")
@click.option("--label", default="", help="What the key is for.")
@click.option("--expires-in-days", type=click.IntRange(1, MAX_DAYS), help="Default: never.")
@_scope_options
@json_option
def key_create(
    place: Place,
    tenant_name: str,
    role: str,
    label: str,
    expires_in_days: int | None,
    models: tuple[str, ...],
    routes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a key and print it, this once; it cannot be shown again."""
    from stencilpress.gateway.access import Role, Scopes
    from stencilpress.gateway.api.admin.views import IssuedKeyView
    from stencilpress.gateway.keys import issue_key

    scopes = Scopes(models or None, routes or None)
    expires_at = None if expires_in_days is None else _in_days(expires_in_days)
    issued = with_catalog(
        place,
        lambda db: issue_key(db, tenant_name, label, expires_at, role=Role(role), scopes=scopes, actor=operator_here()),
    )
    tell(issued.token, IssuedKeyView.of_issued(issued), as_json)


@key.command("list")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@json_option
def key_list(place: Place, tenant_name: str, as_json: bool) -> None:
    """List a tenant's keys, newest first, without their secrets."""
    from stencilpress.gateway.api.admin.views import KeyView
    from stencilpress.gateway.catalog.credentials import list_keys

    found = with_catalog(place, lambda db: list_keys(db, tenant_name, actor=operator_here()))
    show([KeyView.of(one) for one in found], as_json, _COLUMNS)


@key.command("show")
@place_options
@click.argument("key_id", metavar="ID")
@json_option
def key_show(place: Place, key_id: str, as_json: bool) -> None:
    """Show one key, without its secret. ID is the middle part of the key."""
    from stencilpress.gateway.api.admin.views import KeyView
    from stencilpress.gateway.catalog.credentials import get_key

    show_one(KeyView.of(with_catalog(place, lambda db: get_key(db, key_id, actor=operator_here()))), as_json)


@key.command("set")
@place_options
@click.argument("key_id", metavar="ID")
@click.option("--label", help="What the key is for.")
@click.option("--expires-in-days", type=OR_NONE_COUNT, help="From now; none: never.")
@_scope_options
@click.option("--all-models", is_flag=True, help="Confine it to no adapter.")
@click.option("--all-routes", is_flag=True, help="Confine it to no route.")
@json_option
def key_set(
    place: Place,
    key_id: str,
    label: str | None,
    expires_in_days: int | str | None,
    models: tuple[str, ...],
    routes: tuple[str, ...],
    all_models: bool,
    all_routes: bool,
    as_json: bool,
) -> None:
    """Change a key's label, expiry or scopes; what is left out stays."""
    from stencilpress.gateway.api.admin.views import KeyView
    from stencilpress.gateway.keys import change_key

    changes: dict[str, Any] = {} if label is None else {"label": label}
    if expires_in_days is not None:
        changes["expires_at"] = _in_days(expires_in_days) if isinstance(expires_in_days, int) else None
    for field, names, every in (("models", models, all_models), ("routes", routes, all_routes)):
        if names and every:
            raise click.UsageError(f"--all-{field} and --{field.removesuffix('s')} exclude each other")
        if names or every:
            changes[field] = names or None
    if not changes:
        raise click.UsageError("nothing to change: name at least one field")
    changed = with_catalog(place, lambda db: change_key(db, key_id, changes, actor=operator_here()))
    tell(f"changed {', '.join(changes)} of key {changed.public_id}", KeyView.of(changed), as_json)


@key.command("rotate")
@place_options
@click.argument("key_id", metavar="ID")
@click.option(
    "--overlap-minutes",
    type=click.IntRange(0, 43_200),
    default=60,
    show_default=True,
    help="How long the old secret is taken as well.",
)
@json_option
def key_rotate(place: Place, key_id: str, overlap_minutes: int, as_json: bool) -> None:
    """Give a key a new secret and print it, this once; its id, role and scopes stay."""
    from stencilpress.gateway.api.admin.views import IssuedKeyView
    from stencilpress.gateway.keys import rotate_key

    overlap = timedelta(minutes=overlap_minutes)
    issued = with_catalog(place, lambda db: rotate_key(db, key_id, overlap, actor=operator_here()))
    tell(issued.token, IssuedKeyView.of_issued(issued), as_json)


@key.command("revoke")
@place_options
@click.argument("key_id", metavar="ID")
@json_option
def key_revoke(place: Place, key_id: str, as_json: bool) -> None:
    """Refuse a key from now on; gateways follow within a second. ID is the middle part of the key."""
    from stencilpress.gateway.api.admin.views import KeyView
    from stencilpress.gateway.catalog.credentials import revoke_key

    revoked = with_catalog(place, lambda db: revoke_key(db, key_id, actor=operator_here()))
    tell(f"revoked key {revoked.public_id} of tenant {revoked.tenant}", KeyView.of(revoked), as_json)


def _in_days(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)
