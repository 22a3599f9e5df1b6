"""The composition root of an engine process: settings and a model folder in, a worker that is ready to run out."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path

import msgspec
import torch

from stencilpress.engine.eviction import Room
from stencilpress.engine.heartbeat import CPU_LIMIT_S, CUDA_LIMIT_S, Heartbeat
from stencilpress.engine.limits import Limits, derive_limits
from stencilpress.engine.link import Link
from stencilpress.engine.loader import Loader
from stencilpress.engine.memory import PoolMemory, allocate_pool
from stencilpress.engine.messages import PROTOCOL_VERSION, Welcome
from stencilpress.engine.model.llama import Weights
from stencilpress.engine.model.weights import load_weights
from stencilpress.engine.pool import Pool
from stencilpress.engine.prefix import PrefixCache
from stencilpress.engine.residency import Capacity, Residency
from stencilpress.engine.scheduler import Scheduler
from stencilpress.engine.settings import EngineSettings, SettingsError, suit_device
from stencilpress.engine.spec import ModelSpec, PageGeometry, page_geometry
from stencilpress.engine.worker import Launches, Runs, Worker

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

logger = logging.getLogger(__name__)


def compose(settings: EngineSettings, spec: ModelSpec, listener: socket.socket) -> Worker:
    """Load the weights, allocate the pool and wire the parts.

    Raises ``WeightsError``, ``SettingsError`` or ``MemoryError`` for what this device cannot serve.
    """
    device = _device(settings)
    logger.info("computing on %s", torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU")
    settings = suit_device(settings, device.type)
    geometry = page_geometry(spec, settings.max_lora_rank)
    limits = derive_limits(settings, spec, geometry)
    weights = load_weights(Path(settings.model_dir), spec, device)
    if device.type == "cuda" and not settings.pool_bytes:
        settings = _with_fitting_pool(settings, spec, geometry, weights, limits, device)
    memory = allocate_pool(spec, geometry, settings, device)
    link = Link(listener, _welcome(settings, spec, limits.max_model_len))
    loader = Loader(Path(settings.adapters_dir), spec, memory, settings.max_lora_rank, link.wake)
    pool = Pool(memory.num_pages)
    room = Room()
    residency = Residency(pool, room, _capacity(settings, geometry))
    prefixes = PrefixCache(pool, room, geometry.page_tokens, enabled=settings.prefix_caching)
    scheduler = Scheduler(limits, pool, residency, prefixes)
    runner = _runner(spec, weights, memory, loader, limits, settings)
    hang_limit_s = settings.hang_limit_s or (CUDA_LIMIT_S if device.type == "cuda" else CPU_LIMIT_S)
    heartbeat = Heartbeat(settings.heartbeat_fd, hang_limit_s)
    return Worker(scheduler, residency, loader, runner, link, heartbeat)


def _capacity(settings: EngineSettings, geometry: PageGeometry) -> Capacity:
    """0 stands for no limit."""
    pages = settings.adapter_pool_bytes // geometry.page_bytes
    if settings.adapter_pool_bytes and not pages:
        raise SettingsError(f"STENCILPRESS_ADAPTER_POOL_BYTES is less than a page of {geometry.page_bytes} bytes")
    return Capacity(
        max_cpu_loras=settings.max_cpu_loras,
        max_cpu_lora_bytes=settings.max_cpu_lora_bytes or sys.maxsize,
        max_adapter_pages=pages or sys.maxsize,
        max_prefetched=settings.max_loras,
    )


def _runner(
    spec: ModelSpec, weights: Weights, memory: PoolMemory, loader: Loader, limits: Limits, settings: EngineSettings
) -> Runs | Launches:
    """The device's own way to run a step, ready for the first."""
    if memory.device.type != "cuda":
        return _cpu_runner(spec, weights, memory, loader, limits)
    from stencilpress.engine.cuda.runner import CudaRunner  # Triton is there on machines with a GPU only

    runner = CudaRunner(spec, weights, memory, loader.adapter, limits, settings.max_lora_rank)
    runner.warm()
    return runner


def _with_fitting_pool(
    settings: EngineSettings,
    spec: ModelSpec,
    geometry: PageGeometry,
    weights: Weights,
    limits: Limits,
    device: torch.device,
) -> EngineSettings:
    """The settings with as large a pool as the device has room for."""
    from stencilpress.engine.cuda.rehearsal import fitting_pool_bytes  # imports Triton

    fitting = fitting_pool_bytes(spec, geometry, weights, limits, settings.max_lora_rank, device)
    if fitting < 2 * geometry.page_bytes:
        raise MemoryError("the weights and the largest step leave no room for a pool on this device")
    return msgspec.structs.replace(settings, pool_bytes=fitting)


def _cpu_runner(spec: ModelSpec, weights: Weights, memory: PoolMemory, loader: Loader, limits: Limits) -> Runs:
    from stencilpress.engine.model.cpu_llama import Decoder  # numba is of no use where a GPU computes
    from stencilpress.engine.runner import Runner

    runner = Runner(Decoder(spec, weights, limits.max_model_len), memory, loader.adapter)
    runner.warm()
    return runner


def _device(settings: EngineSettings) -> torch.device:
    """Raises ``SettingsError`` where a GPU is asked for and none can be used."""
    if settings.device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if NVIDIA_DRIVER.exists():
            logger.warning("torch %s cannot use this machine's NVIDIA driver: computing on the CPU", torch.__version__)
        return torch.device("cpu")
    if settings.device == "cuda":
        try:
            torch.cuda.current_device()
        except (RuntimeError, AssertionError) as error:  # the latter comes from a build of torch without CUDA
            raise SettingsError(f"STENCILPRESS_DEVICE is cuda, and no GPU can be used: {error}") from error
    return torch.device(settings.device)


def _welcome(settings: EngineSettings, spec: ModelSpec, max_model_len: int) -> Welcome:
    return Welcome(
        version=PROTOCOL_VERSION,
        generation=settings.generation,
        base_id=spec.base_id,
        spec_fingerprint=spec.fingerprint(),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        max_lora_rank=settings.max_lora_rank,
        eos_ids=spec.eos_ids,
    )
