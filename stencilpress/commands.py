"""What the commands share: where they work, how they refuse, how they print.

Everything heavy is imported by the function that needs it, so that help is quick.
"""

from __future__ import annotations

import asyncio
import functools
import getpass
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, Union, cast

import click

from stencilpress.engine.settings import PREFIX, SettingsError
from stencilpress.settings import DataFolder, DataFolderError, default_data_dir

if TYPE_CHECKING:
    import msgspec

    from stencilpress.gateway.access import Actor
    from stencilpress.gateway.catalog.session import Database

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Row = Union[Mapping[str, Any], "msgspec.Struct"]
"""What is printed: a mapping, or a struct of the admin API."""


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


class CountOrNone(click.ParamType[int | str]):
    """A number of 1 or more, or ``none``, which takes a limit away; the value is then :data:`CountOrNone.NONE`."""

    name = "number|none"
    NONE: Final = "none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == self.NONE:
            return self.NONE
        return int(click.IntRange(1).convert(value, param, ctx))


OR_NONE_COUNT = CountOrNone()


def operator_here() -> Actor:
    """Whoever may run commands on the server, as the audit log names them."""
    from stencilpress.gateway.access import Actor, Role

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in a container
        user = str(os.getuid())
    return Actor(f"cli:{user}", Role.OPERATOR, source=socket.gethostname())


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


def show(rows: Sequence[Row], as_json: bool, columns: Sequence[str] = ()) -> None:
    """Print rows of equal fields: JSON, or some of the columns for people."""
    if as_json:
        _print_json(rows)
        return
    facts = [_fields(row) for row in rows]
    if not facts:
        return
    chosen = columns or tuple(facts[0])
    table = [[name.upper() for name in chosen], *([_cell(row[name]) for name in chosen] for row in facts)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def show_one(row: Row, as_json: bool) -> None:
    """Print one object: JSON, or a field a line."""
    if as_json:
        _print_json(row)
        return
    facts = _fields(row)
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.ljust(width)}  {_cell(value)}")


def tell(text: str, row: Row, as_json: bool) -> None:
    """Print what was done: a line, or what was changed as JSON."""
    if as_json:
        _print_json(row)
    else:
        click.echo(text)


def _print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _fields(row: Row) -> Mapping[str, Any]:
    import msgspec

    return msgspec.structs.asdict(row) if isinstance(row, msgspec.Struct) else row


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M")
        case Mapping():
            return " ".join(f"{key}={_cell(item)}" for key, item in value.items()) or "-"
        case list() | tuple():
            return ",".join(map(str, value)) or "-"
    return str(value)
