"""Which accelerator an engine gets."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pytest

from stencilpress.serving import engine_devices


@pytest.mark.parametrize(
    ("engines", "devices", "device", "visible", "shares"),
    [
        (None, "", "auto", "", ()),
        (1, "", "cuda", "", ()),
        (None, "0,3", "auto", "", ["0", "3"]),
        (2, "GPU-a, GPU-b", "cuda", "", ["GPU-a", "GPU-b"]),
        (3, "", "auto", "", ["0", "1", "2"]),
        (2, "", "cuda", "4,5,6", ["4", "5"]),
        (4, "", "cpu", "", ()),
    ],
)
def test_shares(engines: int | None, devices: str, device: str, visible: str, shares: Sequence[str]) -> None:
    assert engine_devices(engines, devices, device, {"CUDA_VISIBLE_DEVICES": visible}) == shares


@pytest.mark.parametrize(("engines", "devices", "visible"), [(3, "0,1", ""), (1, "0,1", ""), (3, "", "0,1")])
def test_too_few_or_too_many_are_refused(engines: int, devices: str, visible: str) -> None:
    with pytest.raises(click.UsageError):
        engine_devices(engines, devices, "auto", {"CUDA_VISIBLE_DEVICES": visible})
