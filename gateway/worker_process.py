"""Short-lived worker processes for what must not run on the event loop, or not in this process at all.

A worker reads one line from standard input, writes its answer to standard output, and ends. Standard input stays open
meanwhile: when it closes, the gateway is gone, and the worker goes too.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import select
import sys
from pathlib import Path

import stencilpress
from stencilpress.engine import lifeline

LIFELINE_VARIABLE = "STENCILPRESS_LIFELINE_FD"
MAX_REPLY_BYTES = 16 << 20
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class WorkerError(Exception):
    """A fault of ours in a worker. The text is for the log."""


# In the gateway


async def run_worker(module: str, line: bytes, time_s: float) -> tuple[int, bytes]:
    """Start ``python -m module``, hand it ``line``, and return its exit status (negative: a signal) and its output.

    The worker is killed when the call is cancelled. Raises ``TimeoutError`` after ``time_s``, :class:`WorkerError`.
    """
    process = await _start(module)
    try:
        async with asyncio.timeout(time_s):
            output = await _exchange(process, line + b"\n")
            return await process.wait(), output
    finally:
        await _end(process)


async def _start(module: str) -> asyncio.subprocess.Process:
    """Start a worker that knows nothing of this process but where the code is: no secrets in its environment."""
    root = str(Path(stencilpress.__path__[0]).parent)
    env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    env |= {"PYTHONPATH": root, "OPENBLAS_NUM_THREADS": "1"}
    kept = os.environ.get(LIFELINE_VARIABLE)
    if kept:
        env[LIFELINE_VARIABLE] = kept
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env,
        pass_fds=(int(kept),) if kept else (),
    )


async def _exchange(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    if process.stdin is None or process.stdout is None:
        raise WorkerError("the worker has no pipes")
    process.stdin.write(line)
    output = bytearray()
    while chunk := await process.stdout.read(1 << 16):
        output += chunk
        if len(output) > MAX_REPLY_BYTES:
            raise WorkerError("the worker does not stop writing")
    return bytes(output)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


# In the worker


def read_request() -> bytes:
    """The line that the gateway sent; from then on this process ends when the gateway does."""
    fd = sys.stdin.fileno()
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 1 << 16)  # unbuffered: what is left on the descriptor is its end alone
        if not chunk:
            raise EOFError("standard input ended within the request")
        line += chunk
    _end_with_gateway(fd)
    if inherited := os.environ.get(LIFELINE_VARIABLE):
        lifeline.hold(int(inherited))
    return line


def _end_with_gateway(fd: int) -> None:
    """Die by SIGIO when the other end closes.

    A thread that waits for it, as in ``lifeline``, would not get its turn while a regular expression runs.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([fd], [], [], 0)[0]:  # it closed before
        raise EOFError("the gateway is gone")


def confine(memory_bytes: int, cpu_s: int) -> None:
    """What a hostile file may use up; passing the CPU limit ends the process."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (soft, hard))
