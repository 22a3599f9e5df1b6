"""The lifeline: real processes that end when the pipe closes, whatever their main thread is doing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stencilpress.engine import lifeline

ROOT = Path(__file__).parents[2]

BUSY = {
    "sleeping": "import time; print('busy', flush=True); time.sleep(600)",
    "python-loop": "print('busy', flush=True)\nwhile True: pass",
    "one-long-native-call": (
        "import hashlib; print('busy', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"
    ),
    "one-long-torch-call": (
        "import torch; torch.set_num_threads(1); a = torch.ones(6000, 6000); print('busy', flush=True); a @ a"
    ),
    "ignoring-signals": (
        "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]\n"
        "print('busy', flush=True); signal.pause()"
    ),
}


@pytest.fixture
def pipe() -> Iterator[list[int]]:
    """A pipe as the supervisor holds it: [read end, write end]; what is still open is closed at the end."""
    ends = list(os.pipe())
    yield ends
    for fd in ends:
        os.close(fd)


@pytest.mark.parametrize("work", BUSY.values(), ids=BUSY)
def test_the_process_ends_when_the_pipe_closes(pipe: list[int], work: str) -> None:
    if "torch" in work:
        pytest.importorskip("torch")
    code = f"from stencilpress.engine import lifeline; lifeline.hold({pipe[0]})\n{work}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=pipe[:1], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"busy\n"
            assert process.poll() is None
            os.close(pipe.pop())
            assert process.wait(5) == lifeline.EXIT_STATUS
        finally:
            process.kill()


def test_a_descriptor_that_is_none_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        lifeline.hold(-1)
