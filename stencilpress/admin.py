"""The commands that keep the catalog: tenants, keys, adapters."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stencilpress.console import Place, json_option, place_options, setting, show, with_catalog
from stencilpress.engine.settings import PREFIX, EngineSettings, read_settings

if TYPE_CHECKING:
    from stencilpress.bases import Base
    from stencilpress.gateway.catalog.records import Adapter, AddedVersion, Key, Tenant, Version
    from stencilpress.gateway.catalog.session import Database
    from stencilpress.gateway.keys import IssuedKey

MAX_DAYS = 36_500
_tenant_option = click.option("--tenant", "tenant_name", required=True, metavar="NAME", help="Whose adapter.")


@click.group()
def tenant() -> None:
    """Customers and their limits."""


@tenant.command("add")
@place_options
@click.argument("name")
@click.option("--max-rank", type=int, help="Largest rank of an adapter.")
@click.option("--max-adapters", type=int, help="Number of adapters.")
@click.option("--max-adapter-bytes", type=int, help="Size of one version.")
@click.option("--target-module", "target_modules", multiple=True, help="Allow only this projection; may be repeated.")
@click.option("--weight", type=float, help="Share beside other tenants when the engine is full; 1 is usual.")
def tenant_add(place: Place, name: str, target_modules: tuple[str, ...], **limits: float | None) -> None:
    """Add a tenant."""
    from stencilpress.gateway.catalog.records import TenantLimits
    from stencilpress.gateway.catalog.tenants import create_tenant

    given: dict[str, Any] = {field: value for field, value in limits.items() if value is not None}
    chosen = TenantLimits(target_modules=target_modules or None, **given)
    made = with_catalog(place, lambda db: create_tenant(db, name, chosen))
    click.echo(f"added tenant {made.name}")


@tenant.command("list")
@place_options
@json_option
def tenant_list(place: Place, as_json: bool) -> None:
    """List the tenants."""
    from stencilpress.gateway.catalog.tenants import list_tenants

    show([_tenant_fields(one) for one in with_catalog(place, list_tenants)], as_json)


@tenant.command("disable")
@place_options
@click.argument("name")
def tenant_disable(place: Place, name: str) -> None:
    """Refuse a tenant's keys and uploads from now on."""
    from stencilpress.gateway.catalog.tenants import disable_tenant

    with_catalog(place, lambda db: disable_tenant(db, name))
    click.echo(f"disabled tenant {name}")


def _tenant_fields(one: Tenant) -> dict[str, Any]:
    limits = one.limits
    return {
        "name": one.name,
        "created_at": one.created_at,
        "disabled_at": one.disabled_at,
        "max_rank": limits.max_rank,
        "max_adapters": limits.max_adapters,
        "max_adapter_bytes": limits.max_adapter_bytes,
        "target_modules": limits.target_modules,
        "weight": limits.weight,
    }


@click.group()
def key() -> None:
    """API keys of a tenant."""


@key.command("create")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@click.option("--label", default="", help="What the key is for.")
@click.option("--expires-in-days", type=click.IntRange(1, MAX_DAYS), help="Default: never.")
def key_create(place: Place, tenant_name: str, label: str, expires_in_days: int | None) -> None:
    """Make a key and print it, this once; it cannot be shown again."""
    from stencilpress.gateway.keys import issue_key

    expires_at = None if expires_in_days is None else datetime.now(UTC) + timedelta(days=expires_in_days)
    issued: IssuedKey = with_catalog(place, lambda db: issue_key(db, tenant_name, label, expires_at))
    click.echo(issued.token)


@key.command("list")
@place_options
@click.argument("tenant_name", metavar="TENANT")
@json_option
def key_list(place: Place, tenant_name: str, as_json: bool) -> None:
    """List a tenant's keys, without their secrets."""
    from stencilpress.gateway.catalog.credentials import list_keys

    show([_key_fields(one) for one in with_catalog(place, lambda db: list_keys(db, tenant_name))], as_json)


@key.command("revoke")
@place_options
@click.argument("key_id", metavar="ID")
def key_revoke(place: Place, key_id: str) -> None:
    """Refuse a key from now on; gateways follow within a second. ID is the middle part of the key."""
    from stencilpress.gateway.catalog.credentials import revoke_key

    revoked = with_catalog(place, lambda db: revoke_key(db, key_id))
    click.echo(f"revoked key {revoked.public_id} of tenant {revoked.tenant}")


def _key_fields(one: Key) -> dict[str, Any]:
    return {
        "id": one.public_id,
        "label": one.label,
        "last_four": one.last_four,
        "created_at": one.created_at,
        "expires_at": one.expires_at,
        "revoked_at": one.revoked_at,
    }


@click.group()
def adapter() -> None:
    """Adapters, their versions and aliases."""


@adapter.command("add")
@place_options
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_tenant_option
@click.option("--name", required=True, help="The name that requests use.")
@setting("--model", help="The base, if the adapter does not name a pulled one.")
@click.option("--assert-base", is_flag=True, help="Vouch that an adapter that names no base fits this one.")
@click.option("--promote/--no-promote", default=None, help="Point `prod` at it; default: if it is the first version.")
def adapter_add(
    place: Place,
    path: Path,
    tenant_name: str,
    name: str,
    model: str | None,
    assert_base: bool,
    promote: bool | None,
) -> None:
    """Check a PEFT adapter folder and add it as the next version of an adapter."""
    from stencilpress.gateway.blobs import BlobStore, StorageFullError
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.enrol import Enrolment
    from stencilpress.gateway.intake import IntakeError

    settings = read_settings(EngineSettings, {**os.environ, f"{PREFIX}MODEL_DIR": "-", f"{PREFIX}ADAPTERS_DIR": "-"})
    base = _base(place, path, model)

    async def work(db: Database) -> AddedVersion:
        owner = await get_tenant(db, tenant_name)
        blobs = BlobStore(place.data.path)
        await blobs.clean()  # a server that runs for months does so only at its start
        enrolment = Enrolment(
            db,
            blobs,
            base.folder,
            base.names,
            dtype=settings.dtype,
            max_rank=settings.max_lora_rank,
        )
        return await enrolment.add_folder(path, name, owner.id, owner.limits, assert_base=assert_base, promote=promote)

    try:
        added = with_catalog(place, work)
    except (IntakeError, StorageFullError) as error:
        raise click.ClickException(str(error)) from error
    known = "" if added.created else " (its content was there already)"
    promoted = ", now prod" if added.promoted else ""
    click.echo(f"{added.version.ref}{known}{promoted}")


def _base(place: Place, path: Path, model: str | None) -> Base:
    from stencilpress.bases import BaseError, base_of_adapter, find_base

    try:
        base = base_of_adapter(place.data.models, path) if model is None else find_base(place.data.models, model)
    except BaseError as error:
        raise click.ClickException(str(error)) from error
    if base is None:
        raise click.ClickException(
            f"--model: {model!r} is not in the data folder; bring it in with `stencilpress pull`"
        )
    return base


@adapter.command("list")
@place_options
@_tenant_option
@json_option
def adapter_list(place: Place, tenant_name: str, as_json: bool) -> None:
    """List a tenant's adapters with their versions and aliases."""
    from stencilpress.gateway.catalog.adapters import list_adapters
    from stencilpress.gateway.catalog.tenants import get_tenant

    async def work(db: Database) -> tuple[Adapter, ...]:
        return await list_adapters(db, (await get_tenant(db, tenant_name)).id)

    show([_version_fields(one, version) for one in with_catalog(place, work) for version in one.versions], as_json)


@adapter.command("promote")
@place_options
@click.argument("version", metavar="NAME@NUMBER")
@_tenant_option
@click.option("--alias", default="prod", show_default=True, help="The alias to point at the version.")
def adapter_promote(place: Place, version: str, tenant_name: str, alias: str) -> None:
    """Point an alias at a version; gateways follow within a second, running streams end on the old one."""
    from stencilpress.gateway.catalog.adapters import promote
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(version)

    async def work(db: Database) -> Version:
        return await promote(db, (await get_tenant(db, tenant_name)).id, name, number, alias)

    click.echo(f"{name}@{alias} is {with_catalog(place, work).ref}")


def _version_fields(one: Adapter, version: Version) -> dict[str, Any]:
    return {
        "version": version.ref,
        "aliases": [alias for alias, number in one.aliases.items() if number == version.number],
        "ranks": version.ranks,
        "target_modules": version.target_modules,
        "size_bytes": version.size_bytes,
        "base": version.base_id,
        "base_asserted": version.base_asserted,
        "created_at": version.created_at,
        "digest": version.digest,
    }
