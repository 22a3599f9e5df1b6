"""Validation of uploads, from the gateway's side: a worker process does the work, never the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

import stencilpress
from stencilpress.gateway.blobs import StorageFullError
from stencilpress.gateway.intake_records import (
    LIFELINE_VARIABLE,
    Accepted,
    Dtype,
    IntakeLimits,
    IntakeRequest,
    Rejected,
    Reply,
    StorageFull,
    WorkerLimits,
    out_of_resources,
)

__all__ = ["Accepted", "IntakeError", "IntakeLimits", "Rejected", "WorkerLimits", "validate_upload"]

WORKER = "stencilpress.gateway.intake_worker"
MAX_REPLY_BYTES = 1 << 20
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class IntakeError(Exception):
    """A fault of ours: there is no verdict on the upload. The text is for the log."""


async def validate_upload(
    folder: Path,
    model_dir: Path,
    *,
    dtype: Dtype = "auto",
    limits: IntakeLimits | None = None,
    assert_base: bool = False,
    worker: WorkerLimits | None = None,
) -> Accepted | Rejected:
    """Check the two files in ``folder`` against the base in ``model_dir``, and build the image beside them.

    On acceptance ``folder`` holds the image, ready to be published. A blob's own folder may be passed too: its
    image is then rebuilt, which a change of the served ``dtype`` calls for. The worker is killed when the call
    is cancelled. Its cost is one core for some seconds per gigabyte; callers bound how many run at once.

    Raises :class:`StorageFullError` when the image does not fit the disk, :class:`IntakeError` for faults of ours.
    """
    worker = worker or WorkerLimits()
    request = _request(folder, model_dir, dtype, limits or IntakeLimits(), assert_base, worker)
    process = await _start()
    try:
        async with asyncio.timeout(worker.time_s):
            output = await _exchange(process, msgspec.json.encode(request) + b"\n")
            status = await process.wait()
    except TimeoutError:
        return out_of_resources(f"more than {worker.time_s:g} s")
    finally:
        await _end(process)
    return _verdict(status, output, worker)


def _request(
    folder: Path, model_dir: Path, dtype: Dtype, limits: IntakeLimits, assert_base: bool, worker: WorkerLimits
) -> IntakeRequest:
    return IntakeRequest(
        folder=str(folder.absolute()),
        model_dir=str(model_dir.absolute()),
        dtype=dtype,
        limits=limits,
        assert_base=assert_base,
        cpu_limit_s=worker.cpu_s,
        memory_limit_bytes=worker.memory_bytes,
    )


async def _start() -> asyncio.subprocess.Process:
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
        WORKER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env,
        pass_fds=(int(kept),) if kept else (),
    )


async def _exchange(process: asyncio.subprocess.Process, line: bytes) -> bytes:
    """Send the request, keep standard input open (it is the worker's lifeline), read until the worker is done."""
    if process.stdin is None or process.stdout is None:
        raise IntakeError("the intake worker has no pipes")
    process.stdin.write(line)
    output = b""
    while chunk := await process.stdout.read(1 << 16):
        output += chunk
        if len(output) > MAX_REPLY_BYTES:
            raise IntakeError("the intake worker does not stop writing")
    return output


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


def _verdict(status: int, output: bytes, worker: WorkerLimits) -> Accepted | Rejected:
    if status == -signal.SIGXCPU:
        return out_of_resources(f"more than {worker.cpu_s} s of CPU time")
    if status != 0:
        raise IntakeError(f"the intake worker ended with status {status}")
    reply: Reply = msgspec.json.decode(output, type=Reply)
    if isinstance(reply, StorageFull):
        raise StorageFullError(reply.errno, os.strerror(reply.errno))
    return reply
