"""Threads of the forward: how many the machine gives, and which operations get them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stencilpress.engine import threads as configured
from stencilpress.engine.model.threads import QUIET_WORK, WIDE_ROWS, WIDE_WORK, Threads
from stencilpress.engine.settings import EngineSettings
from stencilpress.engine.threads import Neighbours, _BusySeconds, allowed_cpus

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


class Machine:
    """Processors whose time the test spends."""

    def __init__(self) -> None:
        self.now_s = self.own_s = self.others_s = 100.0

    def neighbours(self) -> Neighbours:
        return Neighbours(lambda: self.own_s + self.others_s, lambda: self.own_s, lambda: self.now_s)

    def run(self, seconds: float, *, own: float, others: float) -> None:
        """Time passes while we use ``own`` cores and others use ``others``."""
        self.now_s += seconds
        self.own_s += own * seconds
        self.others_s += others * seconds


def test_the_machine_is_quiet_while_nobody_else_computes() -> None:
    machine = Machine()
    neighbours = machine.neighbours()
    seen = [neighbours.quiet()]
    for others in (0.0, 0.1, 1.0, 0.3, 0.0):
        machine.run(0.5, own=2.0, others=others)
        seen.append(neighbours.quiet())
    assert seen == [False, True, True, False, False, True]


def test_a_short_while_changes_nothing_and_a_long_one_is_forgotten() -> None:
    machine = Machine()
    neighbours = machine.neighbours()
    neighbours.quiet()
    machine.run(0.5, own=1.0, others=0.0)
    assert neighbours.quiet()
    machine.run(0.1, own=1.0, others=2.0)
    assert neighbours.quiet()
    machine.run(60.0, own=0.0, others=0.0)
    assert not neighbours.quiet()


def test_a_system_that_does_not_say_is_never_quiet() -> None:
    machine = Machine()
    neighbours = Neighbours(lambda: None, lambda: machine.own_s, lambda: machine.now_s)
    for _ in range(3):
        machine.run(0.5, own=1.0, others=0.0)
        assert not neighbours.quiet()


def test_the_systems_count_has_our_own_time_in_it() -> None:
    count = _BusySeconds(allowed_cpus())
    before = count()
    if before is None:
        pytest.skip("no /proc/stat on this system")
    start = time.process_time()
    while time.process_time() - start < 0.2:
        pass
    after = count()
    assert after is not None
    assert after - before >= 0.15


def test_the_count_adds_all_but_idle_time_of_our_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 400 500 6 7 8 0 0\ncpu1 50 0 0 0 0 0 0 0 0 0\nintr 1\n")
    monkeypatch.setattr(configured, "_PROC_STAT", stat)
    assert _BusySeconds({0})() == pytest.approx(27 / os.sysconf("SC_CLK_TCK"))


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
@pytest.mark.parametrize(("rows", "small", "large"), [(8, 1, 3), (WIDE_ROWS, 3, 3)])
def test_a_narrow_step_widens_for_large_products_only(rows: int, small: int, large: int) -> None:
    threads = Threads(Machine().neighbours())

    threads.begin(rows)

    assert _seen(threads, WIDE_WORK - 1) == small
    assert _seen(threads, WIDE_WORK) == large
    assert torch.get_num_threads() == small


@pytest.mark.usefixtures("three_threads")
def test_smaller_products_widen_while_the_machine_is_quiet() -> None:
    machine = Machine()
    threads = Threads(machine.neighbours())
    threads.begin(1)
    assert _seen(threads, QUIET_WORK) == 1
    machine.run(0.5, own=1.0, others=0.0)
    threads.begin(1)
    assert _seen(threads, QUIET_WORK) == 3
    assert _seen(threads, QUIET_WORK - 1) == 1
    machine.run(0.5, own=1.0, others=1.0)
    threads.begin(1)
    assert _seen(threads, QUIET_WORK) == 1
