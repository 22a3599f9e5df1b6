"""The whole product: `stencilpress serve` with the demo base, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.server import Server, serving
from tests.demo_base import NAME as BASE
from tests.demo_base import ROOT, demo_base_folder


def stencilpress(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    """Run one command of the CLI to its end."""
    command = [sys.executable, "-m", "stencilpress.cli", *arguments, "--data", str(data)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new data folder that holds the demo base and nothing else."""
    data = tmp_path_factory.mktemp("data")
    models = data / "v1" / "models"
    models.mkdir(parents=True)
    (models / BASE).symlink_to(demo_base_folder(), target_is_directory=True)
    return data


@pytest.fixture(scope="module")
def server(demo_data: Path) -> Iterator[Server]:
    """A running server, shared by the tests of one file."""
    with serving(demo_data, dtype="float32", max_model_len="1024") as running:
        yield running
