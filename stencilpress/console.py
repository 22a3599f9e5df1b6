"""What the commands share: where they work, how they refuse, how they print.

Everything heavy is imported by the function that needs it, so that help is quick.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from stencilpress.engine.settings import PREFIX, SettingsError
from stencilpress.settings import DataFolder, DataFolderError, default_data_dir

if TYPE_CHECKING:
    from stencilpress.gateway.catalog.session import Database

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command works."""

    data: DataFolder
    database_url: str


def place_options(command: F) -> F:
    """``--data`` and ``--database-url``; the command gets one :class:`Place` as its first argument."""

    @functools.wraps(command)
    def with_place(data: Path | None, database_url: str, **arguments: Any) -> Any:
        folder = DataFolder(data or default_data_dir(os.environ, Path.home()))
        folder.prepare()
        return command(Place(folder, database_url or folder.database_url), **arguments)

    folder_type = click.Path(file_okay=False, path_type=Path)
    data = setting("--data", type=folder_type, help="The data folder; default: ~/.local/share/stencilpress.")
    url = setting(
        "--database-url", default="", help="The catalog, if not in the data folder: postgresql://… or sqlite:///…."
    )
    return cast(F, data(url(with_place)))


def setting(*names: str, **options: Any) -> Callable[[F], F]:
    """An option that a ``STENCILPRESS_*`` variable of the same name also sets; help and errors name both."""
    variable = PREFIX + names[0].partition("/")[0].removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=True, **options)


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


class Commands(click.Group):
    """A group that ends a refused command with a clear line and exit code 1, and wrong settings with 2."""

    def invoke(self, ctx: click.Context) -> Any:
        with refusals_told():
            return super().invoke(ctx)


@contextmanager
def refusals_told() -> Iterator[None]:
    """Turn what our own code refuses into what click prints; intake's findings stand one a line."""
    from stencilpress.engine.spec import SpecError
    from stencilpress.gateway.errors import ApiError, InvalidAdapterError, UnavailableError

    try:
        yield
    except InvalidAdapterError as error:
        raise click.ClickException("\n  ".join([error.message, *error.findings])) from error
    except UnavailableError as error:
        cause = getattr(error.__cause__, "orig", error.__cause__)  # the driver's own words
        raise click.ClickException(f"{error} ({str(cause).partition(chr(10))[0]})") from error
    except (ApiError, DataFolderError, SpecError) as error:
        raise click.ClickException(str(error)) from error
    except SettingsError as error:
        raise click.UsageError(str(error)) from error


@asynccontextmanager
async def open_catalog(place: Place) -> AsyncIterator[Database]:
    """The catalog; an empty database gets its schema, another schema than this code's is refused."""
    from stencilpress.gateway.catalog.schema import ensure_schema
    from stencilpress.gateway.catalog.session import Database

    async with Database(place.database_url) as db:
        with schema_refusals_told():
            await ensure_schema(db)
        yield db


@contextmanager
def schema_refusals_told() -> Iterator[None]:
    from stencilpress.gateway.catalog.schema import SchemaError

    try:
        yield
    except SchemaError as error:
        raise click.ClickException(str(error)) from error


def with_catalog(place: Place, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    """Run one piece of work on the catalog."""

    async def run() -> T:
        async with open_catalog(place) as db:
            return await work(db)

    return asyncio.run(run())


def show(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print rows of equal keys: JSON, or columns for people."""
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return
    if not rows:
        return
    table = [[key.upper() for key in rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M")
        case Mapping():
            return " ".join(f"{key}={item}" for key, item in value.items()) or "-"
        case list() | tuple():
            return ",".join(map(str, value)) or "-"
    return str(value)
