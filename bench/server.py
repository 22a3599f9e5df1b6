"""A real server for a measurement: `stencilpress serve` on a free port, and its processes' CPU time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

START_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: where it listens, the demo key, its supervisor, the file with all it printed."""

    url: str
    key: str
    supervisor: psutil.Process
    log: Path

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds so far of each kind of process."""
        spent = {"gateway": 0.0, "engine": 0.0}
        for child in self.supervisor.children(recursive=True):
            command = " ".join(child.cmdline())
            for kind in spent:
                if f"stencilpress.{kind}" in command:
                    times = child.cpu_times()
                    spent[kind] += times.user + times.system
        return spent

    def models(self) -> list[str]:
        """What ``/v1/models`` lists."""
        request = urllib.request.Request(f"{self.url}/v1/models", headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request) as answer:
            return [model["id"] for model in json.load(answer)["data"]]


@contextlib.contextmanager
def serving(data: Path, **settings: str) -> Iterator[Server]:
    """Start the server in ``data`` with ``STENCILPRESS_*`` settings; stop it with SIGINT at the end."""
    port = free_port()
    environment = {**os.environ, **{f"STENCILPRESS_{name.upper()}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "stencilpress.cli", "serve", "--data", str(data), "--port", str(port)]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, Path(log.name))
            key = (data / "v1" / "demo_key").read_text().strip()
            yield Server(url, key, psutil.Process(process.pid), Path(log.name))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=15)


def free_port() -> int:
    """Of this host; nobody else has it for the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"not ready after {START_LIMIT_S} s:\n{log.read_text()}")
