"""The commands that serve: ``serve`` runs all processes, ``engine`` and ``gateway`` one kind each, for containers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from stencilpress.commands import F, Place, place_options, schema_refusals_told, setting
from stencilpress.engine.settings import MAX_ENGINES, PREFIX, EngineSettings, read_settings
from stencilpress.kernel_cache import cache_folders, remove_outdated

if TYPE_CHECKING:
    from stencilpress.bases import Base
    from stencilpress.demo import Demo
    from stencilpress.gateway.settings import GatewaySettings

DEMO_MODEL = "smollm2-135m-instruct"
ENGINE_OPTIONS = {
    "device": "auto, cpu or cuda.",
    "dtype": "auto, bfloat16, float16 or float32; auto takes the model's own.",
    "max_model_len": "Longest prompt plus answer in tokens; 0 takes the model's context.",
    "max_num_seqs": "Requests that run at once; 0 takes 64 on a CPU, 256 on a GPU.",
    "max_num_batched_tokens": "Tokens of one step; 0 takes 512 on a CPU, 8192 on a GPU.",
    "max_waiting": "Requests that may wait; tenants have fair parts of the places.",
    "max_loras": "Distinct adapters in one step; 0 takes 16 on a CPU, 128 on a GPU.",
    "max_lora_rank": "Largest rank of an adapter.",
    "max_cpu_loras": "Adapters whose images stay in host memory.",
    "max_cpu_lora_bytes": "Bytes of host memory that they take; 0 sets no limit.",
    "adapter_pool_bytes": "Bytes of the pool that adapters may take; 0 leaves all of it to both.",
    "prefix_caching": "Keep keys and values of prompts for the tenant's next ones; 0 switches it off.",
    "pool_bytes": "Bytes of the pool of KV and adapter pages; 0 takes a default that fits.",
    "threads": "CPU threads of the forward; 0 takes all cores.",
    "hang_limit_s": "A process whose loop does not turn for so long is killed; 0: 60 for an engine on a CPU, else 30.",
}
"""The engine's settings that an operator may set; the commands take them as options too."""


def _engine_options(command: F) -> F:
    defaults = {field.name: str(field.default) for field in msgspec.structs.fields(EngineSettings)}
    for name, text in reversed(ENGINE_OPTIONS.items()):
        flag = f"--{name.replace('_', '-')}"
        command = setting(flag, metavar="VALUE", help=f"{text}  [default: {defaults[name]}]")(command)
    return command


_host = setting("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
_port = setting("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
_model = setting("--model", default=DEMO_MODEL, show_default=True, help="A pulled model, or what `pull` takes.")
_base_id = setting("--base-id", help="With a local folder: the id that adapters name as their base.")
_gateways = setting(
    "--gateways", type=click.IntRange(1, 64), default=1, show_default=True, help="Gateway processes, on one port."
)
_engines = setting(
    "--engines", type=click.IntRange(1, MAX_ENGINES), help="Engine processes; default: one for each of --devices, or 1."
)
_devices = setting("--devices", default="", help="GPUs, one per engine, as CUDA_VISIBLE_DEVICES names them: 0,1.")


@click.command()
@place_options
@_host
@_port
@_model
@_base_id
@_gateways
@_engines
@_devices
@setting("--demo/--no-demo", default=True, show_default=True, help="Enrol the demo tenant and the shipped adapters.")
@_engine_options
def serve(
    place: Place,
    host: str,
    port: int,
    model: str,
    base_id: str | None,
    gateways: int,
    engines: int | None,
    devices: str,
    demo: bool,
    **engine: str | None,
) -> None:
    """Serve a base model and its adapters until Ctrl-C.

    Options can also be set by variables: --max-loras by STENCILPRESS_MAX_LORAS.
    """
    from stencilpress.demo import banner
    from stencilpress.supervisor import ServeSettings, claimed

    chosen = _Chosen.of(place, engine)
    shares = engine_devices(engines, devices, chosen.engine.device, os.environ)
    with _start_refusals_told():
        serving = ServeSettings(
            data_dir=place.data.root,
            host=host,
            port=port,
            gateways=gateways,
            engines=engines or max(1, len(shares)),
            devices=shares,
            environment=chosen.environment,
            tls=bool(chosen.gateway.tls_certificate),
            drain_s=chosen.gateway.drain_s,
        )
        with claimed(serving) as server:
            remove_outdated(place.data.kernels.absolute())
            base = _bring_in(place, model, base_id)
            chosen.environment[f"{PREFIX}MODEL_DIR"] = str(base.folder.absolute())
            cold = bool(chosen.gateway.cold_store_url)
            visitor, path = asyncio.run(_prepare(place, base, chosen.engine, cold=cold, demo=demo, migrate=True))
            place_of = chosen.gateway.console_url.rstrip("/")
            server.run(lambda url: click.echo(banner(url, base, visitor, (place_of or url) + path)))


@click.command()
@place_options
@click.option(
    "--socket",
    required=True,
    type=click.Path(path_type=Path),
    envvar=f"{PREFIX}ENGINE_SOCKET",
    show_envvar=True,
    help="Unix socket to make; further engines' stand beside it.",
)
@_model
@_engines
@_devices
@_engine_options
def engine(place: Place, socket: Path, model: str, engines: int | None, devices: str, **options: str | None) -> None:
    """Run engines alone, for gateways in other containers that share the socket's folder.

    The model must have been pulled. Gateway and engine run as the same user.
    """
    from stencilpress.supervisor import ServeSettings, run

    chosen = _Chosen.of(place, options)
    base = _pulled(place, model)
    shares = engine_devices(engines, devices, chosen.engine.device, os.environ)
    with _start_refusals_told():
        run(
            ServeSettings(
                data_dir=place.data.root,
                host="",
                port=0,
                gateways=0,
                engines=engines or max(1, len(shares)),
                devices=shares,
                engine_socket=socket.absolute(),
                environment={**chosen.environment, f"{PREFIX}MODEL_DIR": str(base.folder.absolute())},
            )
        )


@click.command()
@place_options
@setting("--engine-socket", required=True, type=click.Path(path_type=Path), help="The socket of `stencilpress engine`.")
@_host
@_port
@_model
@_gateways
@setting("--engines", type=click.IntRange(1, MAX_ENGINES), default=1, show_default=True, help="Engines to use.")
@setting("--demo/--no-demo", default=False, show_default=True, help="Enrol the demo tenant and the shipped adapters.")
@_engine_options
def gateway(
    place: Place,
    engine_socket: Path,
    host: str,
    port: int,
    model: str,
    gateways: int,
    engines: int,
    demo: bool,
    **options: str | None,
) -> None:
    """Run gateways alone, in front of engines that `stencilpress engine` runs.

    The model must have been pulled and the catalog migrated. Give engine options the values that the engines have.
    """
    from stencilpress.demo import banner
    from stencilpress.supervisor import ServeSettings, claimed

    chosen = _Chosen.of(place, options)
    base = _pulled(place, model)
    environment = {**chosen.environment, f"{PREFIX}MODEL_DIR": str(base.folder.absolute())}
    environment[f"{PREFIX}ENGINES"] = str(engines)
    with _start_refusals_told():
        serving = ServeSettings(
            data_dir=place.data.root,
            host=host,
            port=port,
            gateways=gateways,
            engines=0,
            engine_socket=engine_socket.absolute(),
            environment=environment,
            tls=bool(chosen.gateway.tls_certificate),
            drain_s=chosen.gateway.drain_s,
        )
        with claimed(serving) as server:
            cold = bool(chosen.gateway.cold_store_url)
            visitor, path = asyncio.run(_prepare(place, base, chosen.engine, cold=cold, demo=demo, migrate=False))
            place_of = chosen.gateway.console_url.rstrip("/")
            server.run(lambda url: click.echo(banner(url, base, visitor, (place_of or url) + path)))


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The children's environment, and what they will read in it: a bad value is refused before a long download."""

    environment: dict[str, str]
    engine: EngineSettings
    gateway: GatewaySettings

    @classmethod
    def of(cls, place: Place, options: Mapping[str, str | None]) -> _Chosen:
        """Also sets up this process's log."""
        from stencilpress.engine.logs import configure_logs
        from stencilpress.gateway.keeper import check_names
        from stencilpress.gateway.server import Cors, tls_context
        from stencilpress.gateway.settings import GatewaySettings

        given = {PREFIX + name.upper(): value for name, value in options.items() if value is not None}
        environment = {**os.environ, **given, f"{PREFIX}DATABASE_URL": place.database_url}
        environment[f"{PREFIX}ADAPTERS_DIR"] = str(place.data.adapters.absolute())
        for variable, folder in cache_folders(place.data.kernels.absolute()).items():
            environment.setdefault(variable, str(folder))
        later = {f"{PREFIX}{name}": "set below" for name in ("MODEL_DIR", "ENGINE_SOCKET")}
        engine = read_settings(EngineSettings, {**environment, **later})
        gateway = read_settings(GatewaySettings, {**environment, **later, f"{PREFIX}HTTP_FD": "-1"})
        Cors(gateway.cors_origins)  # these refuse what no gateway could use
        tls_context(gateway)
        check_names(gateway)
        configure_logs(gateway.log_format)
        return cls(environment, engine, gateway)


def engine_devices(engines: int | None, devices: str, device: str, environ: Mapping[str, str]) -> Sequence[str]:
    """The accelerator of each engine, or none where there is nothing to share out. Raises ``click.UsageError``."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if devices:
        shares = [name.strip() for name in devices.split(",")]
        if not all(shares) or len(shares) != (engines or len(shares)):
            raise click.UsageError(f"--devices {devices!r} must name one device for each of {engines or 'the'} engines")
        return shares
    if device == "cpu" or (engines or 1) == 1:
        return ()
    shares = visible.split(",") if visible else [str(number) for number in range(engines or 1)]
    if len(shares) < (engines or 1):
        raise click.UsageError(f"--engines {engines} is more than CUDA_VISIBLE_DEVICES={visible} has")
    return shares[:engines]


@contextmanager
def _start_refusals_told() -> Iterator[None]:
    """Turn what stops a start into what click prints."""
    from stencilpress.gateway.blobs import StorageFullError
    from stencilpress.gateway.intake import IntakeError
    from stencilpress.supervisor import ServeError

    try:
        yield
    except (ServeError, IntakeError, StorageFullError) as error:
        raise click.ClickException(str(error)) from error


def _bring_in(place: Place, model: str, base_id: str | None) -> Base:
    from stencilpress.bases import Base, find_base

    return find_base(place.data.models, model) or Base.of(pull_base(place, model, base_id))


def _pulled(place: Place, model: str) -> Base:
    from stencilpress.bases import find_base

    base = find_base(place.data.models, model)
    if base is None:
        raise click.ClickException(f"the model {model} is not in {place.data.models}: run `stencilpress pull` first")
    return base


async def _prepare(
    place: Place, base: Base, settings: EngineSettings, *, cold: bool, demo: bool, migrate: bool
) -> tuple[Demo | None, str]:
    """Bring the catalog's schema and the adapters' images up to date, and enrol the demo.

    Also the path at which people begin with the console. ``cold``: there is a cold tier.
    """
    from stencilpress.demo import TENANT, enrol_demo
    from stencilpress.gateway.accounts.links import first_path
    from stencilpress.gateway.blobs import BlobStore
    from stencilpress.gateway.catalog.schema import check_schema
    from stencilpress.gateway.catalog.schema import migrate as run_migrations
    from stencilpress.gateway.catalog.session import Database
    from stencilpress.gateway.enrol import Enrolment

    blobs = BlobStore(place.data.path)
    await blobs.clean()
    async with Database(place.database_url) as db:
        with schema_refusals_told():
            await (run_migrations(db) if migrate else check_schema(db))
        enrolment = Enrolment(db, blobs, base.folder, base.names, dtype=settings.dtype, max_rank=settings.max_lora_rank)
        async for digest, error in enrolment.rebuild_images(cold=cold):
            outcome = f"cannot be served: {'; '.join(error.findings)}" if error else "converted for this base's dtype"
            _progress(f"adapter {digest[:12]} {outcome}")
        visitor = await enrol_demo(db, blobs, enrolment, base, place.data.demo_key, _progress) if demo else None
        return visitor, await first_path(db, None if visitor is None else TENANT)


def _progress(text: str) -> None:
    click.echo(text, err=True)


def pull_base(place: Place, model: str, base_id: str | None, revision: str | None = None) -> Path:
    """Pull a base into the data folder. Raises ``click.ClickException``."""
    from stencilpress.pull import PullError
    from stencilpress.pull import pull as pull_model

    try:
        return pull_model(model, place.data.models, base_id=base_id, revision=revision)
    except PullError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"the model cannot be stored in {place.data.models}: {error.strerror or error}"
        ) from error
