"""Every kernel compiles to machine code for real GPUs, without one; in a process of its own, because the interpreter's
switch is read when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_all_kernels_compile(capability: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "stencilpress.kernels.compile", capability]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 15
