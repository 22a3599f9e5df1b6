"""The worker process of intake: bounded in time, CPU and memory, and gone when nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stencilpress.gateway.intake import IntakeError, IntakeLimits, Rejected, WorkerLimits, validate_upload
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.unit.adapters import FIRST_A, Desk, frame, lora_tensors, tiny_spec, write_base

SLOW_PATTERN = r"([a-z0-9._]+)+!"
"""Exponential time on any module name."""
BUSY_S = 1.0
"""A worker that has used so much CPU on a tiny adapter is in that pattern."""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


async def test_a_regex_that_never_ends_meets_the_cpu_limit(desk: Desk) -> None:
    desk.config(target_modules=SLOW_PATTERN)
    verdict = await validate_upload(desk.folder, desk.model_dir, worker=WorkerLimits(cpu_s=1))
    assert isinstance(verdict, Rejected)
    assert verdict.findings[0].code == "resource_limit"
    assert "CPU" in verdict.findings[0].message


async def test_a_validation_that_never_ends_meets_the_time_limit(desk: Desk) -> None:
    desk.config(target_modules=SLOW_PATTERN)
    verdict = await validate_upload(desk.folder, desk.model_dir, worker=WorkerLimits(time_s=1))
    assert isinstance(verdict, Rejected)
    assert verdict.findings[0].code == "resource_limit"
    assert worker_pids() == []


async def test_a_file_that_wants_too_much_memory_is_refused(desk: Desk) -> None:
    """One tensor larger than the worker's memory, in a sparse file that costs the test no disk."""
    size = 3 << 30
    shape = (4, size // 16)
    tensors = lora_tensors(desk.spec)
    header = {FIRST_A: {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}
    offset = size
    for name, tensor in tensors.items():
        if name != FIRST_A:
            header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
            offset += tensor.nbytes
    spec = tiny_spec(hidden_size=shape[1])
    write_base(desk.model_dir, spec)
    with (desk.folder / WEIGHTS_NAME).open("wb") as file:
        file.write(frame(json.dumps(header).encode()))
        file.truncate(file.tell() + offset)
    verdict = await validate_upload(
        desk.folder, desk.model_dir, limits=IntakeLimits(max_bytes=1 << 40), worker=WorkerLimits(memory_bytes=1 << 30)
    )
    assert isinstance(verdict, Rejected)
    assert {finding.code for finding in verdict.findings} == {"resource_limit"}


async def test_a_cancelled_validation_leaves_no_process(desk: Desk) -> None:
    desk.config(target_modules=SLOW_PATTERN)
    task = asyncio.create_task(validate_upload(desk.folder, desk.model_dir))
    await asyncio.to_thread(wait_for_worker)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker_pids() == []


def wait_for_worker() -> int:
    """The pid of the worker that is about to start."""
    while not (pids := worker_pids()):
        time.sleep(0.01)
    return pids[0]


def worker_pids() -> list[int]:
    """Our children that are intake workers."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"intake_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_a_fault_of_ours_is_no_verdict(desk: Desk, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IntakeError):
        await validate_upload(desk.folder, tmp_path / "no such base")
    assert "no such base" in capfd.readouterr().err, "the log says why"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_worker_ends_when_the_gateway_is_gone(desk: Desk) -> None:
    """Even inside a regular expression, where none of its threads gets a turn."""
    desk.config(target_modules=SLOW_PATTERN)
    gateway = (
        "import asyncio, sys; from pathlib import Path\n"
        "from stencilpress.gateway.intake import validate_upload\n"
        "asyncio.run(validate_upload(Path(sys.argv[1]), Path(sys.argv[2])))"
    )
    process = subprocess.Popen([sys.executable, "-c", gateway, str(desk.folder), str(desk.model_dir)])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (pids := children.read_text().split()):
        time.sleep(0.01)
    worker = os.pidfd_open(int(pids[0]))
    while cpu_seconds(int(pids[0])) < BUSY_S:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        assert select.select([worker], [], [], 30)[0], "the worker lives on"
    finally:
        os.close(worker)


async def test_the_worker_sees_no_secret_of_the_gateway(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENCILPRESS_DATABASE_URL", "postgresql://user:secret@host/db")
    desk.config(target_modules=SLOW_PATTERN)
    task = asyncio.create_task(validate_upload(desk.folder, desk.model_dir))
    environment = await asyncio.to_thread(lambda: Path(f"/proc/{wait_for_worker()}/environ").read_bytes())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert b"PATH=" in environment
    assert b"secret" not in environment
