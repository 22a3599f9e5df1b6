"""``python -m bench start``: from the start of a process until it is ready to serve, kernels cached.

A shape's process makes random weights on the device; a model folder's is the engine itself, ready when it welcomes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.gpu_base import Base, chosen_base
from bench.gpu_cases import gpu_parser
from bench.gpu_device import device_label, require_gpu
from bench.results import Result, median_result, record
from stencilpress.engine.client import EngineClient

GOAL_S = 20
LIMIT_S = 300.0


def main(arguments: list[str]) -> int:
    """Start processes one after the other; the first warms the caches and is printed, not counted."""
    parser = gpu_parser("start")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    base = chosen_base(options)
    require_gpu("start")
    if options.child:
        return _be_ready(base)
    samples = []
    for turn in range(options.repeats + 1):
        elapsed_s = _start_shape(base) if base.folder is None else asyncio.run(_start_engine(base.folder))
        print(f"ready after {elapsed_s:.2f} s{'' if turn else ', kernels perhaps not cached'}", flush=True)
        if turn:
            samples.append(elapsed_s)
    found = _result(base, samples, options.device_name)
    print(f"ready {found.value:.2f} s {found.spread} goal {found.settings.get('goal', '-')}", flush=True)
    if options.record:
        record([found], ("torch", "triton"))
    return 0


def _result(base: Base, samples: list[float], device: str | None) -> Result:
    """Asks for the GPU's name at last: whoever asks holds some of its memory."""
    gpu = torch.cuda.get_device_name()
    settings = {"gpu": gpu, "base": base.name, "dtype": base.spec.dtype, **base.known(gpu, goal=GOAL_S)}
    return median_result(
        samples, bench="start", case=base.case("ready"), metric="s", unit="s", system="stencilpress",
        device=device or device_label(gpu), settings=settings,
    )  # fmt: skip


def _start_shape(base: Base) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-m", "bench", "start", "--child", "--shape", base.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        if not any(line.startswith("ready") for line in lines):
            raise RuntimeError("the process ended before it was ready")
        elapsed_s = time.perf_counter() - start
        list(lines)
    return elapsed_s


def _be_ready(base: Base) -> int:
    """An engine with the defaults that ``serve`` has on a GPU."""
    from bench.gpu_engine import GpuEngine, Serving
    from stencilpress.engine.settings import DEVICE_DEFAULTS

    defaults = DEVICE_DEFAULTS["cuda"]
    serving = Serving(
        seats=defaults["max_num_seqs"], tokens=defaults["max_num_batched_tokens"], max_model_len=base.spec.max_position
    )
    engine = GpuEngine(base, torch.device("cuda"), serving)
    engine.runner.warm()
    print("ready", flush=True)
    engine.close()
    return 0


async def _start_engine(folder: Path) -> float:
    """The engine process on a socket of its own, until the client is welcome."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "engine.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            environment = {
                **os.environ,
                "STENCILPRESS_MODEL_DIR": str(folder),
                "STENCILPRESS_ADAPTERS_DIR": place,
                "STENCILPRESS_DEVICE": "cuda",
                "STENCILPRESS_ENGINE_FD": str(listener.fileno()),
            }
            command = [sys.executable, "-m", "stencilpress.engine"]
            start = time.perf_counter()
            process = subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()])  # noqa: ASYNC220 the loop has nothing else
        try:
            async with asyncio.timeout(LIMIT_S), EngineClient(path) as client:
                await client.wait_ready()
                return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait()
