"""Which device an engine computes on, and that it says so where this is not what one would expect."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest
import torch

from stencilpress.engine import compose
from stencilpress.engine.settings import EngineSettings, SettingsError


def _chosen(device: Literal["auto", "cuda"]) -> torch.device:
    return compose._device(EngineSettings(model_dir="", adapters_dir="", device=device))


@pytest.mark.parametrize("driver", [True, False])
def test_without_a_gpu_for_torch_auto_is_the_cpu_which_is_told_where_there_is_a_driver(
    driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(compose, "NVIDIA_DRIVER", tmp_path if driver else tmp_path / "none")
    with caplog.at_level(logging.INFO):
        assert _chosen("auto").type == "cpu"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * driver
    assert ("cannot use this machine's NVIDIA driver" in caplog.text) is driver


def test_with_a_gpu_auto_is_that_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _chosen("auto").type == "cuda"
    assert not caplog.records


@pytest.mark.parametrize("error", [RuntimeError("the driver is too old"), AssertionError("not compiled with CUDA")])
def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def current_device() -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    with pytest.raises(SettingsError, match=str(error)):
        _chosen("cuda")
