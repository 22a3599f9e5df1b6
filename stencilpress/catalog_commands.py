"""``stencilpress audit`` and ``stencilpress catalog``: the log of changes, and the catalog as a file."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from stencilpress.commands import Place, json_option, operator_here, place_options, show, tell, with_catalog

if TYPE_CHECKING:
    from stencilpress.gateway.catalog.records import AuditEntry
    from stencilpress.gateway.catalog.session import Database
    from stencilpress.gateway.catalog.transfer import Imported

_COLUMNS = ("at", "actor", "role", "tenant", "action", "target", "before", "after", "source")


@click.group()
def audit() -> None:
    """The log of every change."""


@audit.command("list")
@place_options
@click.option("--tenant", "tenant_name", help="Only changes of this tenant, its keys and adapters.")
@click.option("--target", default="", help="Only changes of this, such as key:ab12cd34ef56.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, help="Entries.")
@json_option
def audit_list(place: Place, tenant_name: str | None, target: str, limit: int, as_json: bool) -> None:
    """List changes, newest first."""
    from stencilpress.gateway.api.admin.views import AuditView
    from stencilpress.gateway.catalog.audit import list_audit
    from stencilpress.gateway.catalog.tenants import get_tenant

    async def work(db: Database) -> tuple[AuditEntry, ...]:
        owner = None if tenant_name is None else (await get_tenant(db, tenant_name, deleted=True)).id
        return await list_audit(db, tenant_id=owner, target=target, limit=limit)

    show([AuditView.of(one) for one in with_catalog(place, work)], as_json, _COLUMNS)


@click.group()
def catalog() -> None:
    """The catalog as a file."""


@catalog.command("export")
@place_options
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def catalog_export(place: Place, file: Path) -> None:
    """Write tenants, keys and adapters to FILE, readable by its owner only: it holds the hashes of keys."""
    from stencilpress.gateway.catalog.transfer import export_catalog

    async def work(db: Database, stream: BinaryIO) -> int:
        lines = 0
        async for line in export_catalog(db):
            stream.write(line)
            lines += 1
        return lines

    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:  # noqa: PTH123 - mode
            lines = with_catalog(place, lambda db: work(db, stream))
        fresh.replace(file)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)
    click.echo(f"wrote {lines - 2} rows to {file}")


@catalog.command("import")
@place_options
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--skip-existing", is_flag=True, help="Leave tenants that exist as they are, instead of refusing.")
@json_option
def catalog_import(place: Place, file: Path, skip_existing: bool, as_json: bool) -> None:
    """Add what `catalog export` wrote, all of it or nothing. Adapters' files are copied apart."""
    from stencilpress.gateway.catalog.transfer import import_catalog

    async def work(db: Database) -> Imported:
        return await import_catalog(db, _lines(file), skip_existing=skip_existing, actor=operator_here())

    done = with_catalog(place, work)
    absent = [digest for digest in done.digests if not (place.data.adapters / digest).is_dir()]
    rows = ", ".join(f"{count} {table}" for table, count in done.rows.items())
    tell(f"imported {rows}", done, as_json)
    if done.skipped:
        click.echo(f"left as they are: {', '.join(done.skipped)}", err=True)
    if absent:
        click.echo(
            f"{len(absent)} adapter folders are not in {place.data.adapters}: copy them from where the catalog was",
            err=True,
        )


async def _lines(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        for line in stream:
            yield line
