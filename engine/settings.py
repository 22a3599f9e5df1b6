"""Settings of the engine, read once from ``STENCILPRESS_*`` variables, and the reader that all processes use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

PREFIX = "STENCILPRESS_"

Positive = Annotated[int, Meta(ge=1)]
MOST_PLACES = 65_536
"""Of requests or adapters in one step. Some tables have a place for each: far more would take the machine's memory."""
MOST_TOKENS = 1 << 20
MOST_BYTES = 1 << 50
Places = Annotated[int, Meta(ge=0, le=MOST_PLACES)]
Bytes = Annotated[int, Meta(ge=0, le=MOST_BYTES)]
"""0 stands for what suits the device."""

DEVICE_DEFAULTS = {
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_loras": 16},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_loras": 128},
}
MAX_ENGINES = 64
LogFormat = Literal["text", "json"]


class SettingsError(ValueError):
    """A variable with a bad value; the text names the variable."""


T = TypeVar("T", bound=msgspec.Struct)


def read_settings(kind: type[T], environ: Mapping[str, str]) -> T:
    """Build a settings struct: field ``max_loras`` comes from ``STENCILPRESS_MAX_LORAS``.

    Unset and empty variables take the default. Raises :class:`SettingsError` naming the variable.
    """
    given = {f: environ[PREFIX + f.upper()] for f in kind.__struct_fields__ if environ.get(PREFIX + f.upper())}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        for field in kind.__struct_fields__:
            text = text.replace(f"`$.{field}`", PREFIX + field.upper()).replace(f"`{field}`", PREFIX + field.upper())
        raise SettingsError(text) from None


def engine_sockets(first: Path, engines: int) -> list[Path]:
    """The sockets of several engines beside each other: ``engine.sock``, ``engine-2.sock`` and so on."""
    return [first if n == 1 else first.with_name(f"{first.stem}-{n}{first.suffix}") for n in range(1, engines + 1)]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set on an engine. Names that are well known in the field are kept."""

    model_dir: str
    """Folder of the base model, as `stencilpress pull` leaves it."""
    adapters_dir: str
    """Folder of adapter blobs, one sub-folder per digest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """Longest prompt plus answer in tokens; 0 takes the model's own context."""
    max_num_seqs: Places = 0
    """Requests that run at once; 0 takes what suits the device (:data:`DEVICE_DEFAULTS`)."""
    max_num_batched_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] = 0
    """Tokens of one step; 0 likewise."""
    max_waiting: Positive = 1024
    """Requests that may wait; one more makes whoever has most waiting lose its last one, with `overloaded`."""
    max_loras: Places = 0
    """Distinct adapters in one step; 0 likewise."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 64
    max_cpu_loras: Positive = 256
    """Adapters whose images stay in host memory."""
    max_cpu_lora_bytes: Bytes = 0
    """Bytes of host memory that they take at most; 0 sets no limit beside `max_cpu_loras`."""
    adapter_pool_bytes: Bytes = 0
    """Bytes of the pool that adapters may take; 0 leaves them and the KV cache to compete for all of it."""
    prefix_caching: bool = True
    """Keep keys and values of earlier prompts for requests of the same tenant and adapter that begin alike."""
    pool_bytes: Bytes = 0
    """Bytes of the unified pool; 0 takes a default that fits the device."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads of the forward; 0 takes all cores with passive waiting."""
    hang_limit_s: Annotated[float, Meta(ge=0)] = 0.0
    """Longest time between two turns of the loop before the supervisor kills it; 0 takes 60 s on a CPU, else 30 s."""
    log_format: LogFormat = "text"
    engine_fd: int = -1
    """Listening Unix socket, inherited from the supervisor."""
    heartbeat_fd: int = -1
    """Shared memory for the sign of life, inherited from the supervisor."""
    lifeline_fd: int = -1
    """Read end of a pipe that closes when the supervisor is gone."""
    generation: Annotated[int, Meta(ge=0)] = 0
    """Counts the engine's restarts; stale messages carry an older one."""


def suit_device(settings: EngineSettings, device_type: str) -> EngineSettings:
    """The settings with the device's defaults in place of zeros."""
    zeros = {name: value for name, value in DEVICE_DEFAULTS[device_type].items() if not getattr(settings, name)}
    return msgspec.structs.replace(settings, **zeros)
