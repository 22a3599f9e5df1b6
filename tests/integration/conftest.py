"""A tiny base, adapters for it, the command on a data folder of its own, and a gateway that a module shares."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from stencilpress.cli import main
from tests.integration.gateway_harness import Gateway
from tests.tiny import save_adapter, save_base

Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Path:
    """Folders of adapters: ``helper`` and ``poet``, and ``orphan``, which does not name its base."""
    shelf = tmp_path_factory.mktemp("adapters")
    save_adapter(shelf / "helper", base_folder, seed=1)
    save_adapter(shelf / "poet", base_folder, seed=2, r=8, target_modules=["o_proj", "up_proj"])
    save_adapter(shelf / "orphan", base_folder, seed=3, declared=None)
    return shelf


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder that does not exist yet, which all commands use."""
    folder = tmp_path / "data"
    for variable in [name for name in os.environ if name.startswith("STENCILPRESS_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("STENCILPRESS_DATA", str(folder))
    return folder


@pytest.fixture
def cli(data: Path) -> Cli:
    """Run a command; ``code`` is the exit code it must have."""

    def run(*arguments: str | Path, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def gateway(shared: Gateway) -> Gateway:
    """The gateway that the module's ``shared`` runs, with nothing remembered of earlier tests."""
    shared.engine.submits.clear()
    shared.engine.aborts.clear()
    return shared
