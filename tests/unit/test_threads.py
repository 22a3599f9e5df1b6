"""Threads of the forward: how many the machine gives, and which operations get them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stencilpress.engine import threads as configured
from stencilpress.engine.model.threads import WIDE_ROWS, WIDE_WORK, Threads
from stencilpress.engine.settings import EngineSettings

VARIABLES = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


def _settings(threads: int) -> EngineSettings:
    return EngineSettings(model_dir="", adapters_dir="", threads=threads)


@pytest.mark.usefixtures("environ")
def test_the_setting_and_brief_spinning_reach_openmp() -> None:
    assert configured.configure_threads(_settings(3)) == 3
    assert [os.environ[name] for name in VARIABLES] == ["3", "3000", "0"]


@pytest.mark.usefixtures("environ")
def test_what_the_operator_exported_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")

    assert configured.configure_threads(_settings(0)) == 7
    assert os.environ["GOMP_SPINCOUNT"] == "0"


@pytest.mark.parametrize(
    ("siblings", "quota", "cores"),
    [
        (("0", "1", "2", "3"), "max 100000", 4),
        (("0,2", "1,3", "0,2", "1,3"), "max 100000", 2),
        (("0", "1", "2", "3"), "250000 100000", 2),
        (("0", "1", "2", "3"), "50000 100000", 1),
        (("0-1", "0-1"), "", 1),
    ],
)
def test_cores_are_physical_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: tuple[str, ...], quota: str, cores: int
) -> None:
    for cpu, text in enumerate(siblings):
        (tmp_path / f"cpu{cpu}").write_text(text + "\n")
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(configured, "_TOPOLOGY", str(tmp_path / "cpu{}"))
    monkeypatch.setattr(configured, "_CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(len(siblings))))

    assert configured.usable_cores() == cores


def test_it_works_before_torch_is_loaded() -> None:
    code = "import sys, stencilpress.engine.threads; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _seen(threads: Threads, work: int) -> int:
    seen: list[int] = []

    def op() -> Tensor:
        seen.append(torch.get_num_threads())
        return torch.empty(0)

    threads.product(work, op)
    return seen[0]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    ("rows", "small", "large"),
    [(8, 1, 3), (WIDE_ROWS, 3, 3)],
)
def test_a_narrow_step_widens_for_large_products_only(rows: int, small: int, large: int) -> None:
    threads = Threads()

    threads.begin(rows)

    assert _seen(threads, WIDE_WORK - 1) == small
    assert _seen(threads, WIDE_WORK) == large
    assert torch.get_num_threads() == small
