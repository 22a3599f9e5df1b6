"""``stencilpress backup`` and ``stencilpress restore``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stencilpress.commands import Place, place_options

if TYPE_CHECKING:
    from stencilpress.backup import Summary

SQLITE_FILE = "sqlite:///"


@click.command()
@place_options
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--without-catalog", is_flag=True, help="Adapters alone: needed when the catalog is in PostgreSQL.")
def backup(place: Place, target: Path, without_catalog: bool) -> None:
    """Copy catalog and adapters into one file, while a server may run, and check it."""
    from stencilpress.backup import BackupError, back_up

    if not without_catalog and not place.database_url.startswith(SQLITE_FILE):
        raise click.UsageError("the catalog is in PostgreSQL: copy it with pg_dump first, then give --without-catalog")
    catalog = None if without_catalog else Path(place.database_url.removeprefix(SQLITE_FILE))
    try:
        summary = back_up(place.data, catalog, target)
    except BackupError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_told(summary, target))


@click.command()
@place_options
@click.argument("source", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--check", "only_check", is_flag=True, help="Read and check the file; change nothing.")
def restore(place: Place, source: Path, only_check: bool) -> None:
    """Unpack a backup into an empty data folder."""
    from stencilpress.backup import BackupError, check
    from stencilpress.backup import restore as unpack

    if not only_check and place.database_url not in (place.data.database_url, ""):
        click.echo("the catalog of the backup is put into the data folder, not into --database-url", err=True)
    try:
        summary = check(source) if only_check else unpack(source, place.data)
    except BackupError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_told(summary, source))


def _told(summary: Summary, file: Path) -> str:
    catalog = "catalog" if summary.has_catalog else "no catalog"
    text = f"{catalog}, {summary.adapters} adapter versions, {summary.bytes} bytes"
    return f"{file} holds {text}; sha256 of all: {summary.sha256}"
