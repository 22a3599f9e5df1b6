"""The ``stencilpress`` command.

Exit codes: 0 done, 1 refused (stderr says why; intake's findings one a line), 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stencilpress import __version__
from stencilpress.admin import adapter, key, tenant
from stencilpress.console import Commands, F, Place, place_options, schema_refusals_told, setting
from stencilpress.engine.settings import PREFIX, EngineSettings, read_settings

if TYPE_CHECKING:
    from stencilpress.bases import Base
    from stencilpress.demo import Demo

DEMO_MODEL = "smollm2-135m-instruct"
ENGINE_OPTIONS = {
    "device": "auto, cpu or cuda.",
    "dtype": "auto, bfloat16, float16 or float32; auto takes the model's own.",
    "max_model_len": "Longest prompt plus answer in tokens; 0 takes the model's context.",
    "max_num_seqs": "Requests that run at once.",
    "max_num_batched_tokens": "Tokens of one step.",
    "max_waiting": "Requests that may wait; one more is refused.",
    "max_loras": "Distinct adapters in one step.",
    "max_lora_rank": "Largest rank of an adapter.",
    "max_cpu_loras": "Adapters whose images stay in host memory.",
    "pool_bytes": "Bytes of the pool of KV and adapter pages; 0 takes a default that fits.",
    "threads": "CPU threads of the forward; 0 takes all cores.",
}
"""The engine's settings that an operator may set; ``serve`` takes them as options too."""


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Serve thousands of LoRA adapters from one shared base model."""


main.add_command(tenant)
main.add_command(key)
main.add_command(adapter)


def _engine_options(command: F) -> F:
    defaults = {field.name: str(field.default) for field in msgspec.structs.fields(EngineSettings)}
    for name, text in reversed(ENGINE_OPTIONS.items()):
        flag = f"--{name.replace('_', '-')}"
        command = setting(flag, metavar="VALUE", help=f"{text}  [default: {defaults[name]}]")(command)
    return command


@main.command()
@place_options
@setting("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@setting("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@setting("--model", default=DEMO_MODEL, show_default=True, help="A pulled model, or what `pull` takes.")
@setting("--base-id", help="With a local folder: the id that adapters name as their base.")
@setting("--gateways", type=click.IntRange(1, 64), default=1, show_default=True, help="Gateway processes.")
@setting("--demo/--no-demo", default=True, show_default=True, help="Enrol the demo tenant and the shipped adapters.")
@_engine_options
def serve(
    place: Place,
    host: str,
    port: int,
    model: str,
    base_id: str | None,
    gateways: int,
    demo: bool,
    **engine: str | None,
) -> None:
    """Serve a base model and its adapters until Ctrl-C.

    Options can also be set by variables: --max-loras by STENCILPRESS_MAX_LORAS.
    """
    from stencilpress.demo import banner
    from stencilpress.gateway.blobs import StorageFullError
    from stencilpress.gateway.intake import IntakeError
    from stencilpress.gateway.settings import GatewaySettings
    from stencilpress.supervisor import ServeError, ServeSettings, run

    given = {PREFIX + name.upper(): value for name, value in engine.items() if value is not None}
    environment = {**os.environ, **given, f"{PREFIX}DATABASE_URL": place.database_url}
    environment[f"{PREFIX}ADAPTERS_DIR"] = str(place.data.adapters.absolute())
    for compiler in ("NUMBA", "TRITON"):
        environment.setdefault(f"{compiler}_CACHE_DIR", str((place.data.kernels / compiler.lower()).absolute()))
    environment[f"{PREFIX}MODEL_DIR"] = "pulled below"
    settings = read_settings(EngineSettings, environment)  # a bad value is refused before a long download
    read_settings(GatewaySettings, {**environment, f"{PREFIX}ENGINE_SOCKET": "made below", f"{PREFIX}HTTP_FD": "-1"})
    base = _bring_in(place, model, base_id)
    environment[f"{PREFIX}MODEL_DIR"] = str(base.folder.absolute())
    serving = ServeSettings(data_dir=place.data.root, host=host, port=port, gateways=gateways, environment=environment)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        visitor = asyncio.run(_prepare(place, base, settings, demo))
        run(serving, lambda url: click.echo(banner(url, base, visitor)))
    except (ServeError, IntakeError, StorageFullError) as error:
        raise click.ClickException(str(error)) from error


def _bring_in(place: Place, model: str, base_id: str | None) -> Base:
    from stencilpress.bases import Base, find_base

    return find_base(place.data.models, model) or Base.of(_pull(place, model, base_id))


async def _prepare(place: Place, base: Base, settings: EngineSettings, demo: bool) -> Demo | None:
    """Bring the catalog's schema and the adapters' images up to date, and enrol the demo."""
    from stencilpress.demo import enrol_demo
    from stencilpress.gateway.blobs import BlobStore
    from stencilpress.gateway.catalog.schema import migrate as run_migrations
    from stencilpress.gateway.catalog.session import Database
    from stencilpress.gateway.enrol import Enrolment

    blobs = BlobStore(place.data.path)
    await blobs.clean()
    async with Database(place.database_url) as db:
        with schema_refusals_told():
            await run_migrations(db)
        enrolment = Enrolment(db, blobs, base.folder, base.names, dtype=settings.dtype, max_rank=settings.max_lora_rank)
        async for digest, error in enrolment.rebuild_images():
            outcome = f"cannot be served: {'; '.join(error.findings)}" if error else "converted for this base's dtype"
            _progress(f"adapter {digest[:12]} {outcome}")
        return await enrol_demo(db, blobs, enrolment, base, place.data.demo_key, _progress) if demo else None


def _progress(text: str) -> None:
    click.echo(text, err=True)


@main.command()
@place_options
@click.argument("source")
@click.option("--base-id", help="With a local folder: the id that adapters name as their base.")
@click.option("--revision", help="With a repository: a branch, tag or commit.")
def pull(place: Place, source: str, base_id: str | None, revision: str | None) -> None:
    """Bring a base model into the data folder.

    SOURCE is smollm2-135m-instruct, OWNER/NAME of a Hugging Face repository, or a local folder.
    """
    click.echo(_pull(place, source, base_id, revision))


def _pull(place: Place, source: str, base_id: str | None, revision: str | None = None) -> Path:
    from stencilpress.pull import PullError
    from stencilpress.pull import pull as pull_model

    try:
        return pull_model(source, place.data.models, base_id=base_id, revision=revision)
    except PullError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"the model cannot be stored in {place.data.models}: {error.strerror or error}"
        ) from error


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
