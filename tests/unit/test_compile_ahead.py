"""Processes that compile ahead with one cache take turns."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

pytest.importorskip("triton")

from stencilpress.kernels import compile_ahead
from stencilpress.kernels.compile_ahead import TURN_FILE, TURN_LIMIT_S, compiling_only, only_compiling


class Clock:
    """Time that passes in sleep alone; ``other`` has its turn until ``ends_s``."""

    def __init__(self, folder: Path, ends_s: float) -> None:
        self.now_s, self.ends_s = 0.0, ends_s
        self.other = (folder / TURN_FILE).open("w")
        fcntl.flock(self.other, fcntl.LOCK_EX)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s >= self.ends_s:
            self.other.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("ends_s", "begins_s"), [(7.0, 7.0), (10 * TURN_LIMIT_S, TURN_LIMIT_S)])
def test_compiling_waits_for_whoever_compiles_but_not_for_ever(
    ends_s: float, begins_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(folder, ends_s)
    monkeypatch.setattr(compile_ahead, "time", clock)
    with compiling_only():
        assert only_compiling()
        assert clock.now_s == pytest.approx(begins_s, abs=1.0)
    clock.other.close()


def test_others_wait_until_all_is_compiled(folder: Path) -> None:
    with (folder / TURN_FILE).open("w") as other:
        with compiling_only(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not only_compiling()
