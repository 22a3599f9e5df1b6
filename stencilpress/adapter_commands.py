"""``stencilpress adapter``: adapters, their versions and aliases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import click

from stencilpress.alias_commands import move
from stencilpress.commands import (
    Place,
    json_option,
    operator_here,
    place_options,
    setting,
    show,
    show_one,
    tell,
    with_catalog,
)
from stencilpress.engine.settings import PREFIX, EngineSettings, read_settings
from stencilpress.version_commands import tenant_option, with_tenant

if TYPE_CHECKING:
    from stencilpress.bases import Base
    from stencilpress.gateway.api.admin.adapter_views import AdapterView
    from stencilpress.gateway.catalog.adapter_lists import Listed
    from stencilpress.gateway.catalog.records import Adapter, AddedVersion, Keeping, SmokeSuite, Tenant, Version
    from stencilpress.gateway.catalog.session import Database


@click.group()
def adapter() -> None:
    """Adapters, their versions and aliases."""


@adapter.command("add")
@place_options
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@tenant_option
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
    """Check a PEFT adapter, a folder or a zip or tar of one, and add it as the next version of an adapter."""
    from stencilpress.gateway.blobs import BlobStore, StorageFullError
    from stencilpress.gateway.catalog.tenants import get_tenant
    from stencilpress.gateway.enrol import Enrolment
    from stencilpress.gateway.intake import IntakeError

    settings = read_settings(EngineSettings, {**os.environ, f"{PREFIX}MODEL_DIR": "-", f"{PREFIX}ADAPTERS_DIR": "-"})
    base, is_folder = _base(place, path, model), path.is_dir()

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
        add = enrolment.add_folder if is_folder else enrolment.add_archive
        return await add(
            path, name, owner.id, owner.limits, assert_base=assert_base, promote=promote, actor=operator_here()
        )

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
@tenant_option
@json_option
def adapter_list(place: Place, tenant_name: str, as_json: bool) -> None:
    """List a tenant's adapters with their versions and aliases."""
    from stencilpress.gateway.catalog.adapters import list_adapters
    from stencilpress.gateway.catalog.tenants import get_tenant

    async def work(db: Database) -> tuple[Adapter, ...]:
        return await list_adapters(db, (await get_tenant(db, tenant_name)).id)

    show([_version_fields(one, version) for one in with_catalog(place, work) for version in one.versions], as_json)


@adapter.command("all")
@place_options
@click.option("--tenant", "tenant", default="", help="Only tenants whose names begin so.")
@click.option("--name", default="", help="Only adapters whose names begin so.")
@click.option("--sort", type=click.Choice(("tenant", "name", "newest")), default="tenant", show_default=True)
@click.option("--deleted", is_flag=True, help="Deleted ones too.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Rows.")
@json_option
def adapter_all(
    place: Place,
    tenant: str,
    name: str,
    sort: Literal["tenant", "name", "newest"],
    deleted: bool,
    limit: int,
    as_json: bool,
) -> None:
    """List the adapters of all tenants in short."""
    from stencilpress.gateway.api.admin.all_adapters import ListedAdapterView
    from stencilpress.gateway.catalog.adapter_lists import list_all_adapters

    async def work(db: Database) -> tuple[Listed, ...]:
        return await list_all_adapters(db, tenant=tenant, name=name, sort=sort, deleted=deleted, limit=limit)

    columns = ("tenant", "name", "versions", "newest", "ranks", "target_modules", "size_bytes", "aliases")
    show([ListedAdapterView.of(one) for one in with_catalog(place, work)], as_json, columns)


@adapter.command("show")
@place_options
@click.argument("name")
@tenant_option
@click.option("--deleted", is_flag=True, help="Deleted ones too.")
@json_option
def adapter_show(place: Place, name: str, tenant_name: str, deleted: bool, as_json: bool) -> None:
    """Show an adapter with its versions and aliases."""
    view = _view(place, name, tenant_name, deleted=deleted)
    if as_json:
        show_one(view, as_json)
        return
    show(view.versions, as_json, ("version", "aliases", "ranks", "target_modules", "size_bytes", "deleted_at"))
    show(view.aliases, as_json, ("alias", "version", "canary"))


@adapter.command("delete")
@place_options
@click.argument("name")
@tenant_option
@json_option
def adapter_delete(place: Place, name: str, tenant_name: str, as_json: bool) -> None:
    """Take an adapter out of use with all of it; it can be restored until it is purged."""
    from stencilpress.gateway.catalog.lifecycle import delete_adapter

    with_tenant(place, tenant_name, lambda db, owner: delete_adapter(db, owner.id, name, actor=operator_here()))
    tell(f"deleted adapter {name}", _view(place, name, tenant_name, deleted=True), as_json)


@adapter.command("restore")
@place_options
@click.argument("name")
@tenant_option
@json_option
def adapter_restore(place: Place, name: str, tenant_name: str, as_json: bool) -> None:
    """Bring a deleted adapter back as it was."""
    from stencilpress.gateway.catalog.lifecycle import restore_adapter

    with_tenant(place, tenant_name, lambda db, owner: restore_adapter(db, owner.id, name, actor=operator_here()))
    tell(f"restored adapter {name}", _view(place, name, tenant_name), as_json)


def _view(place: Place, name: str, tenant_name: str, *, deleted: bool = False) -> AdapterView:
    from stencilpress.gateway.api.admin.adapter_views import AdapterView
    from stencilpress.gateway.catalog.adapters import get_adapter

    return AdapterView.of(
        with_tenant(place, tenant_name, lambda db, owner: get_adapter(db, owner.id, name, deleted=deleted))
    )


@adapter.command("promote")
@place_options
@click.argument("version", metavar="NAME@NUMBER")
@tenant_option
@click.option("--alias", default="prod", show_default=True, help="The alias to point at the version.")
def adapter_promote(place: Place, version: str, tenant_name: str, alias: str) -> None:
    """Point an alias at a version wherever it is now; `alias move` is the careful way.

    Gateways follow within a second, running streams end on the old one.
    """
    from stencilpress.gateway.catalog.records import AliasTarget, Expected
    from stencilpress.gateway.names import check_alias_name, parse_version_ref

    name, number = parse_version_ref(version)
    check_alias_name(alias)
    moved = move(place, f"{name}@{alias}", tenant_name, AliasTarget(number), Expected())
    click.echo(f"{name}@{alias} is {name}@{moved.target.version}")


@adapter.command("prompts")
@place_options
@click.argument("name")
@tenant_option
@json_option
def adapter_prompts(place: Place, name: str, tenant_name: str, as_json: bool) -> None:
    """Show the smoke prompts that a version must pass before `prod` points at it."""
    from stencilpress.gateway.api.admin.adapter_views import SmokeSuiteView
    from stencilpress.gateway.catalog.lifecycle import get_suite

    suite = with_tenant(place, tenant_name, lambda db, owner: get_suite(db, owner.id, name))
    show_one(SmokeSuiteView.of(suite), as_json)


@adapter.command("set-prompts")
@place_options
@click.argument("name")
@click.argument("file", type=click.File("rb"))
@tenant_option
@json_option
def adapter_set_prompts(place: Place, name: str, file: BinaryIO, tenant_name: str, as_json: bool) -> None:
    """Replace an adapter's smoke prompts, from a JSON file as the admin API takes it (`-` is standard input)."""
    import msgspec

    from stencilpress.gateway.api.admin.adapter_views import SmokePrompts, SmokeSuiteView
    from stencilpress.gateway.api.admin.dispatch import decode_body
    from stencilpress.gateway.catalog.lifecycle import set_suite
    from stencilpress.gateway.lifecycle.smoke import check_prompts

    body: SmokePrompts = decode_body(file.read(), SmokePrompts)

    async def work(db: Database, owner: Tenant) -> SmokeSuite | None:
        await check_prompts(body.prompts)
        return await set_suite(db, owner.id, name, msgspec.to_builtins(body.prompts), actor=operator_here())

    suite = with_tenant(place, tenant_name, work)
    tell(f"{name} has {len(body.prompts)} smoke prompts", SmokeSuiteView.of(suite), as_json)


@adapter.command("shares")
@place_options
@click.argument("name")
@tenant_option
@json_option
def adapter_shares(place: Place, name: str, tenant_name: str, as_json: bool) -> None:
    """List the tenants that may use an adapter beside its owner."""
    from stencilpress.gateway.api.admin.adapter_views import ShareView
    from stencilpress.gateway.catalog.lifecycle import list_shares

    found = with_tenant(place, tenant_name, lambda db, owner: list_shares(db, owner.id, name))
    show([ShareView.of(one) for one in found], as_json)


@adapter.command("share")
@place_options
@click.argument("name")
@click.argument("guest")
@tenant_option
@json_option
def adapter_share(place: Place, name: str, guest: str, tenant_name: str, as_json: bool) -> None:
    """Let the tenant GUEST use an adapter under its name."""
    from stencilpress.gateway.api.admin.adapter_views import ShareView
    from stencilpress.gateway.catalog.lifecycle import share_adapter

    actor = operator_here()
    made = with_tenant(place, tenant_name, lambda db, owner: share_adapter(db, owner.id, name, guest, actor=actor))
    tell(f"shared {name} with {guest}", ShareView.of(made), as_json)


@adapter.command("unshare")
@place_options
@click.argument("name")
@click.argument("guest")
@tenant_option
def adapter_unshare(place: Place, name: str, guest: str, tenant_name: str) -> None:
    """Take a share back."""
    from stencilpress.gateway.catalog.lifecycle import unshare_adapter

    actor = operator_here()
    with_tenant(place, tenant_name, lambda db, owner: unshare_adapter(db, owner.id, name, guest, actor=actor))
    click.echo(f"{name} is no longer shared with {guest}")


@adapter.command("pin")
@place_options
@click.argument("name")
@tenant_option
@json_option
def adapter_pin(place: Place, name: str, tenant_name: str, as_json: bool) -> None:
    """Keep what an adapter's `prod` stands for in the engines' memory, until `unpin`."""
    _keep(place, name, tenant_name, "pin", as_json)


@adapter.command("preload")
@place_options
@click.argument("name")
@tenant_option
@json_option
def adapter_preload(place: Place, name: str, tenant_name: str, as_json: bool) -> None:
    """Have what an adapter's `prod` stands for brought into the engines' memory now, and whenever they start."""
    _keep(place, name, tenant_name, "preload", as_json)


@adapter.command("unpin")
@place_options
@click.argument("name")
@tenant_option
@json_option
def adapter_unpin(place: Place, name: str, tenant_name: str, as_json: bool) -> None:
    """Pin an adapter no longer, nor preload it."""
    _keep(place, name, tenant_name, None, as_json)


def _keep(place: Place, name: str, tenant_name: str, kept: Keeping | None, as_json: bool) -> None:
    from stencilpress.gateway.catalog.kept import set_kept

    actor = operator_here()
    now = with_tenant(place, tenant_name, lambda db, owner: set_kept(db, owner.id, name, kept, actor=actor))
    told = {"pin": "is pinned", "preload": "is preloaded", None: "is neither pinned nor preloaded"}
    tell(f"adapter {name} {told[now]}", _view(place, name, tenant_name), as_json)


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
