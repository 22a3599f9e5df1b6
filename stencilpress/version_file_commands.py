"""``stencilpress version``: what lies in the files of versions, in the data folder of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stencilpress.commands import Place, json_option, place_options, show, show_one, tell
from stencilpress.version_commands import base_of, blob_of, tenant_option, version, version_command, with_tenant

if TYPE_CHECKING:
    from stencilpress.gateway.catalog.records import KeptFiles, Tenant, Version
    from stencilpress.gateway.catalog.session import Database

__all__ = ["version"]
"""The group, which has these commands as well once this is imported."""


@version_command("contents")
def version_contents(place: Place, ref: str, tenant_name: str, as_json: bool) -> None:
    """Show the projections that a version adapts, with their ranks; as JSON its config, too."""
    from stencilpress.gateway.lifecycle.contents import read_contents

    version, files = _stored(place, ref, tenant_name)
    found = asyncio.run(read_contents(version, files, blob_of(place, version.digest)))
    if as_json:
        show_one(found, as_json)
        return
    show(found.modules, as_json)


def _stored(place: Place, ref: str, tenant_name: str) -> tuple[Version, KeptFiles]:
    """A version with what the catalog keeps of its files."""
    from stencilpress.gateway.catalog.adapters import get_adapter
    from stencilpress.gateway.catalog.records import find_version_of
    from stencilpress.gateway.catalog.version_files import find_files
    from stencilpress.gateway.names import parse_version_ref

    name, number = parse_version_ref(ref)

    async def work(db: Database, owner: Tenant) -> tuple[Version, KeptFiles]:
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
    base = base_of(place, left[0].base_id)
    blobs = [(files, blob_of(place, version.digest)) for version, files in (left, right)]
    sides = [Side(blob, config_of(files, blob)) for files, blob in blobs]
    try:
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

    version, files = _stored(place, ref, tenant_name)
    blob = blob_of(place, version.digest)
    sizes: dict[str, int] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            found = open_file(name, files, blob)
            if found is None:
                raise click.ClickException(f"the files of {ref} were not kept; adding the same files again keeps them")
            with (folder / name).open("xb") as target:
                target.writelines(found.chunks)
            sizes[name] = found.size_bytes
    except OSError as error:
        raise click.ClickException(f"{error.filename or folder}: {error.strerror}") from error
    tell(f"wrote {' and '.join(sizes)} to {folder}", {"folder": str(folder), "files": sizes}, as_json)
