"""Validation of uploads, from the gateway's side: a worker process does the work, never the event loop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from stencilpress.gateway.blobs import StorageFullError
from stencilpress.gateway.intake_records import (
    Accepted,
    BaseCheck,
    Dtype,
    IntakeLimits,
    IntakeRequest,
    Rejected,
    Reply,
    StorageFull,
    WorkerLimits,
    out_of_resources,
)
from stencilpress.gateway.worker_process import WorkerError, run_worker

__all__ = ["Accepted", "IntakeError", "IntakeLimits", "Rejected", "WorkerLimits", "validate_upload"]

WORKER = "stencilpress.gateway.intake_worker"


class IntakeError(Exception):
    """A fault of ours: there is no verdict on the upload. The text is for the log."""


async def validate_upload(
    folder: Path,
    model_dir: Path,
    *,
    dtype: Dtype = "auto",
    limits: IntakeLimits | None = None,
    base_check: BaseCheck = "named",
    archive: str = "",
    worker: WorkerLimits | None = None,
) -> Accepted | Rejected:
    """Check the two files in ``folder`` against the base in ``model_dir``, and build the image beside them.

    ``archive`` names a file in the folder to take the two out of first. On acceptance ``folder`` holds the two and the
    image, ready to be published. A blob's own folder may be passed too: its image is then rebuilt, which a change of
    the served ``dtype`` calls for. The worker is killed when the call is cancelled. Its cost is one core for some
    seconds per gigabyte; callers bound how many run at once (``lifecycle.gate``).

    Raises :class:`StorageFullError` when the image does not fit the disk, :class:`IntakeError` for faults of ours.
    """
    worker = worker or WorkerLimits()
    request = _request(folder, model_dir, dtype, limits or IntakeLimits(), base_check, archive, worker)
    try:
        status, output = await run_worker(WORKER, msgspec.json.encode(request), worker.time_s)
    except TimeoutError:
        return out_of_resources(f"more than {worker.time_s:g} s")
    except WorkerError as error:
        raise IntakeError(str(error)) from error
    return _verdict(status, output, worker)


def _request(
    folder: Path,
    model_dir: Path,
    dtype: Dtype,
    limits: IntakeLimits,
    base_check: BaseCheck,
    archive: str,
    worker: WorkerLimits,
) -> IntakeRequest:
    return IntakeRequest(
        folder=str(folder.absolute()),
        model_dir=str(model_dir.absolute()),
        dtype=dtype,
        limits=limits,
        base_check=base_check,
        archive=archive,
        cpu_limit_s=worker.cpu_s,
        memory_limit_bytes=worker.memory_bytes,
    )


def _verdict(status: int, output: bytes, worker: WorkerLimits) -> Accepted | Rejected:
    if status == -signal.SIGXCPU:
        return out_of_resources(f"more than {worker.cpu_s} s of CPU time")
    if status != 0:
        raise IntakeError(f"the intake worker ended with status {status}")
    reply: Reply = msgspec.json.decode(output, type=Reply)
    if isinstance(reply, StorageFull):
        raise StorageFullError(reply.errno, os.strerror(reply.errno))
    return reply
