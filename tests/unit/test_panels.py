"""Charts out of time series."""

from __future__ import annotations

from stencilpress.web.panels import distribution


def test_steps_fall_into_classes_that_double() -> None:
    chart = distribution({0: 10, 1: 20, 2: 30, 3: 5, 4: 5, 5: 10, 8: 10, 9: 10})
    assert chart["labels"] == ["0", "1", "2", "3–4", "5–8", "9–16"]
    assert chart["series"][0]["values"] == [10.0, 20.0, 30.0, 10.0, 20.0, 10.0]


def test_without_steps_nothing_is_known() -> None:
    assert distribution({})["series"][0]["values"] == [None]
