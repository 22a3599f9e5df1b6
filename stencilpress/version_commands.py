"""``stencilpress version``: what a version is and brings along, and its files in the data folder of this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
    from stencilpress.bases import Base
    from stencilpress.gateway.catalog.records import SmokeRun, StoredFiles, Tenant, Version
    from stencilpress.gateway.catalog.session import Database

T = TypeVar("T")

ENGINE_LIMIT_S = 30.0
"""How long a command waits for a running server's engine."""

tenant_option = click.option("--tenant", "tenant_name", required=True, metavar="NAME", help="Whose adapter.")


def with_tenant(place: Place, name: str, work: Callable[[Database, Tenant], Awaitable[T]]) -> T:
    """Run one piece of work on a tenant's part of the catalog."""
    from stencilpress.gateway.catalog.tenants import get_tenant

    async def run(db: Database) -> T:
        return await work(db, await get_tenant(db, name))

    return with_catalog(place, run)


def ref_command(group: click.Group, metavar: str, name: str) -> Callable[[F], F]:
    """A command of a group on something of a tenant, named by its only argument, that can print JSON."""

    def make(command: F) -> F:
        ref = click.argument("ref", metavar=metavar)
        made: F = group.command(name)(place_options(ref(tenant_option(json_option(command)))))  # type: ignore[assignment]
        return made

    return make


@click.group()
def version() -> None:
    """Versions of an adapter."""


_version_command = partial(ref_command, version, "NAME@NUMBER")


@_version_command("show")
def version_show(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Show a version with what it brings along for requests that leave it out."""
    show_one(_view(place, ref, tenant_name), as_json)


def _view(place: Place, ref: str, tenant_name: str, *, deleted: bool = False) -> Any:
    from stencilpress.gateway.api.admin.adapter_views import VersionView
    from stencilpress.gateway.catalog.adapters import get_adapter
    from stencilpress.gateway.catalog.records import find_version_of
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)
    adapter = with_tenant(place, tenant_name, lambda db, owner: get_adapter(db, owner.id, name, deleted=deleted))
    return VersionView.of(find_version_of(adapter, number), adapter)


@version.command("defaults")
@place_options
@click.argument("ref", metavar="NAME@NUMBER")
@click.argument("file", type=click.File("rb"))
@tenant_option
@json_option
def version_defaults(place: Place, ref: str, file: Any, tenant_name: str, as_json: bool) -> None:
    """Set what a version brings along, from a JSON file (`-` is standard input); `{}` takes all away."""
    from stencilpress.gateway.api.admin.dispatch import decode_body
    from stencilpress.gateway.catalog.adapters import set_defaults
    from stencilpress.gateway.defaults import VersionDefaults
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)
    defaults = decode_body(file.read(), VersionDefaults)
    actor = operator_here()
    with_tenant(place, tenant_name, lambda db, owner: set_defaults(db, owner.id, name, number, defaults, actor=actor))
    tell(f"set the defaults of {ref}", _view(place, ref, tenant_name), as_json)


@_version_command("delete")
def version_delete(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Take a version out of use; it can be restored until it is purged. Refused while an alias points at it."""
    from stencilpress.gateway.catalog.lifecycle import delete_version
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)
    actor = operator_here()
    with_tenant(place, tenant_name, lambda db, owner: delete_version(db, owner.id, name, number, actor=actor))
    tell(f"deleted {ref}", _view(place, ref, tenant_name, deleted=True), as_json)


@_version_command("restore")
def version_restore(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Bring a deleted version back."""
    from stencilpress.gateway.catalog.lifecycle import restore_version
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)
    actor = operator_here()
    with_tenant(place, tenant_name, lambda db, owner: restore_version(db, owner.id, name, number, actor=actor))
    tell(f"restored {ref}", _view(place, ref, tenant_name), as_json)


@_version_command("contents")
def version_contents(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Show the projections that a version adapts, with their ranks; as JSON its config, too."""
    from stencilpress.gateway.lifecycle.contents import read_contents

    stored, files = _stored(place, ref, tenant_name)
    with _file_errors_told(_blob_of(place, stored.digest)) as blob:
        found = asyncio.run(read_contents(stored, files, blob))
    if as_json:
        show_one(found, as_json)
        return
    show(found.modules, as_json)


@contextmanager
def _file_errors_told(folder: Path) -> Iterator[Path]:
    """Files that are missing, damaged or in the way as what click prints; ``folder`` where no name is told."""
    try:
        yield folder
    except TimeoutError:  # an OSError that is about no file
        raise
    except OSError as error:
        raise click.ClickException(f"{error.filename or folder}: {error.strerror}") from error


def _stored(place: Place, ref: str, tenant_name: str) -> tuple[Version, StoredFiles]:
    """A version with what the catalog keeps of its files."""
    from stencilpress.gateway.catalog.adapters import get_adapter
    from stencilpress.gateway.catalog.records import find_version_of
    from stencilpress.gateway.catalog.version_files import find_files
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)

    async def work(db: Database, owner: Tenant) -> tuple[Version, StoredFiles]:
        found = find_version_of(await get_adapter(db, owner.id, name), number)
        return found, await find_files(db, owner.id, name, number)

    return with_tenant(place, tenant_name, work)


@version.command("diff")
@place_options
@click.argument("ref", metavar="NAME@NUMBER")
@click.argument("other", type=click.IntRange(1))
@tenant_option
@json_option
def version_diff(place: Place, ref: str, other: int, tenant_name: str, as_json: bool) -> None:
    """Show what differs from a version to the OTHER one: config, modules, and how far each delta has moved."""
    from stencilpress.gateway.lifecycle.diff import Side, diff_versions
    from stencilpress.gateway.lifecycle.originals import config_of
    from stencilpress.gateway.worker_process import WorkerError

    left = _stored(place, ref, tenant_name)
    right = _stored(place, f"{ref.partition('@')[0]}@{other}", tenant_name)
    base = _base_of(place, left[0].base_id)
    blobs = [(files, _blob_of(place, stored.digest)) for stored, files in (left, right)]
    try:
        with _file_errors_told(blobs[0][1].parent):
            sides = [Side(blob, config_of(files, blob)) for files, blob in blobs]
            found = asyncio.run(diff_versions(sides[0], sides[1], base.folder, "auto"))
    except (WorkerError, TimeoutError) as error:
        raise click.ClickException(f"the versions could not be compared: {error}") from error
    if as_json:
        show_one(found, as_json)
        return
    if found.config is not None:
        show(found.config, as_json)
    show(found.deltas, as_json)


@version.command("download")
@place_options
@click.argument("ref", metavar="NAME@NUMBER")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@tenant_option
@json_option
def version_download(place: Place, ref: str, folder: Path, tenant_name: str, as_json: bool) -> None:
    """Write the two files of a version into FOLDER as they were uploaded. No file there is replaced."""
    from stencilpress.gateway.enrol import FILES
    from stencilpress.gateway.lifecycle.originals import open_file

    stored, files = _stored(place, ref, tenant_name)
    blob = _blob_of(place, stored.digest)
    sizes: dict[str, int] = {}
    with _file_errors_told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            found = open_file(name, files, blob)
            if found is None:
                raise click.ClickException(f"the files of {ref} were not kept; adding the same files again keeps them")
            with (folder / name).open("xb") as target:
                target.writelines(found.chunks)
            sizes[name] = found.size_bytes
    tell(f"wrote {' and '.join(sizes)} to {folder}", {"folder": str(folder), "files": sizes}, as_json)


def _blob_of(place: Place, digest: str) -> Path:
    """Where a version's files lie. Raises :class:`click.ClickException` if they are not here."""
    from stencilpress.gateway.blobs import BlobStore

    folder = BlobStore(place.data.path).folder(digest)
    if not folder.is_dir():
        raise click.ClickException(f"adapter {digest[:12]} is not in this data folder")
    return folder


@_version_command("smoke")
def version_smoke(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Ask a version its adapter's smoke prompts, on the running server's engine."""
    from stencilpress.gateway.api.admin.adapter_views import SmokeRunView
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)
    run = with_tenant(place, tenant_name, lambda db, owner: smoke(place, db, owner, name, number))
    tell(f"{ref} {'passed' if run.passed else 'failed'}", SmokeRunView.of(run), as_json)
    if not run.passed:
        raise click.exceptions.Exit(1)


@_version_command("smoke-runs")
def version_smoke_runs(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """List the last runs of the smoke prompts for a version, newest first."""
    from stencilpress.gateway.api.admin.adapter_views import SmokeRunView
    from stencilpress.gateway.catalog.lifecycle import list_runs
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)
    runs = with_tenant(place, tenant_name, lambda db, owner: list_runs(db, owner.id, name, number))
    show([SmokeRunView.of(one) for one in runs], as_json, ("at", "passed", "suite_revision"))


async def smoke(place: Place, db: Database, owner: Tenant, name: str, number: int) -> SmokeRun:
    """Run the suite through a client of the first engine, which must have the version's files to read."""
    from stencilpress.engine.client import EngineClient
    from stencilpress.gateway.catalog.adapters import get_adapter
    from stencilpress.gateway.catalog.records import find_version_of
    from stencilpress.gateway.lifecycle.gatekeeper import run_for
    from stencilpress.gateway.tokenizer import ModelTokenizer

    socket = _engine_socket(place)
    _blob_of(place, find_version_of(await get_adapter(db, owner.id, name), number).digest)
    async with EngineClient(socket) as engine:
        try:
            async with asyncio.timeout(ENGINE_LIMIT_S):
                base_id = (await engine.wait_ready()).base_id
        except TimeoutError:
            raise click.ClickException("the server's engine does not answer") from None
        tokenizer = ModelTokenizer(_base_of(place, base_id).folder)
        return await run_for(db, engine, tokenizer, owner, name, number, base_id, actor=operator_here())


def _engine_socket(place: Place) -> Path:
    """That of the first engine. Raises :class:`click.ClickException` where no server runs."""
    socket = Path(os.environ.get("STENCILPRESS_ENGINE_SOCKET") or place.data.path / "run" / "engine.sock")
    if not socket.exists():
        raise click.ClickException("smoke prompts need a running server on this data folder: `stencilpress serve`")
    return socket


def _base_of(place: Place, base_id: str) -> Base:
    from stencilpress.bases import find_base

    base = find_base(place.data.models, base_id)
    if base is None:
        raise click.ClickException(f"the base {base_id!r} is not in this data folder")
    return base
