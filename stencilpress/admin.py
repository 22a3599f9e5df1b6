"""``stencilpress adapter``: adapters, their versions and aliases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stencilpress.console import Place, json_option, place_options, setting, show, with_catalog
from stencilpress.engine.settings import PREFIX, EngineSettings, read_settings

if TYPE_CHECKING:
    from stencilpress.bases import Base
    from stencilpress.gateway.catalog.records import Adapter, AddedVersion, Version
    from stencilpress.gateway.catalog.session import Database

MAX_DAYS = 36_500
_tenant_option = click.option("--tenant", "tenant_name", required=True, metavar="NAME", help="Whose adapter.")


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
