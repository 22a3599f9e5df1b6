"""The whole product: `stencilpress serve` with the demo base, as a user starts it.

The base is fetched once into ``.test-data`` in the checkout (or ``STENCILPRESS_TEST_DATA``) and kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.server import Server, serving

ROOT = Path(__file__).parents[2]
BASE = "smollm2-135m-instruct"


def stencilpress(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    """Run one command of the CLI to its end."""
    command = [sys.executable, "-m", "stencilpress.cli", *arguments, "--data", str(data)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def demo_base() -> Path:
    """The folder of the demo base."""
    kept = Path(os.environ.get("STENCILPRESS_TEST_DATA", ROOT / ".test-data"))
    folder = kept / "v1" / "models" / BASE
    if not (folder / "config.json").exists():
        done = stencilpress("pull", BASE, data=kept)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def demo_data(demo_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new data folder that holds the demo base and nothing else."""
    data = tmp_path_factory.mktemp("data")
    models = data / "v1" / "models"
    models.mkdir(parents=True)
    (models / BASE).symlink_to(demo_base, target_is_directory=True)
    return data


@pytest.fixture(scope="module")
def server(demo_data: Path) -> Iterator[Server]:
    """A running server, shared by the tests of one file."""
    with serving(demo_data, dtype="float32", max_model_len="1024") as running:
        yield running
