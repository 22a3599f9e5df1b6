"""The ``stencilpress`` command.

Exit codes: 0 done, 1 refused (stderr says why; intake's findings one a line), 2 wrong usage.
"""

from __future__ import annotations

import asyncio

import click

from stencilpress import __version__
from stencilpress.adapter_commands import adapter
from stencilpress.alert_commands import alert
from stencilpress.alias_commands import alias
from stencilpress.backup_commands import backup, restore
from stencilpress.catalog_commands import audit, catalog
from stencilpress.commands import Commands, Place, place_options, schema_refusals_told
from stencilpress.key_commands import key
from stencilpress.serving import engine, gateway, pull_base, serve
from stencilpress.tenant_commands import tenant
from stencilpress.usage_commands import usage
from stencilpress.user_commands import user
from stencilpress.version_commands import version


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Serve thousands of LoRA adapters from one shared base model."""


for group in (tenant, key, user, adapter, version, alias, usage, alert, audit, catalog):
    main.add_command(group)
main.add_command(serve)
main.add_command(engine)
main.add_command(gateway)
main.add_command(backup)
main.add_command(restore)


@main.command()
@place_options
@click.argument("source")
@click.option("--base-id", help="With a local folder: the id that adapters name as their base.")
@click.option("--revision", help="With a repository: a branch, tag or commit.")
def pull(place: Place, source: str, base_id: str | None, revision: str | None) -> None:
    """Bring a base model into the data folder.

    SOURCE is smollm2-135m-instruct, OWNER/NAME of a Hugging Face repository, or a local folder.
    """
    click.echo(pull_base(place, source, base_id, revision))


@main.command()
@place_options
@click.option("--to", "revision", default="head", show_default=True, help="A schema revision; `base` drops all.")
def migrate(place: Place, revision: str) -> None:
    """Bring the catalog's schema to a revision. `serve` brings it to the newest by itself."""
    from stencilpress.gateway.catalog.schema import migrate as run_migrations
    from stencilpress.gateway.catalog.session import Database

    async def work() -> str:
        async with Database(place.database_url) as db:
            with schema_refusals_told():
                return await run_migrations(db, revision)

    click.echo(f"the catalog's schema is at revision {asyncio.run(work())}")


if __name__ == "__main__":
    main()
