"""What pages about adapters say of differences and comparisons."""

from __future__ import annotations

import pytest

from stencilpress.gateway.api.admin.adapter_views import CanaryView
from stencilpress.gateway.api.admin.series_views import UsageTotals
from stencilpress.gateway.api.admin.usage import Percentiles
from stencilpress.gateway.lifecycle.diff import ConfigChange, DeltaChange, Diff, LayerRanks, TensorChange
from stencilpress.web.adapters import words
from stencilpress.web.adapters.comparison import compare
from stencilpress.web.adapters.diffs import shown_diff


def diff(**changes: object) -> Diff:
    nothing: dict[str, object] = {"config": [], "added": [], "removed": [], "layers": [], "tensors": [], "deltas": []}
    return Diff(**{**nothing, **changes})  # type: ignore[arg-type]


def delta(name: str, relative: float | None, change: float | None = 1.0) -> DeltaChange:
    return DeltaChange(f"model.layers.{name}", 1.0, 1.0, change, relative)


def test_what_moved_most_comes_first_and_fills_its_bar() -> None:
    shown = shown_diff(diff(deltas=[delta("0.a.q_proj", 0.1), delta("1.a.q_proj", 0.4), delta("2.a.q_proj", 0.2)]))
    assert [(bar.name, bar.width, bar.moved) for bar in shown.deltas] == [
        ("1.a.q_proj", 100.0, "40 %"),
        ("2.a.q_proj", 50.0, "20 %"),
        ("0.a.q_proj", 25.0, "10 %"),
    ]
    assert not shown.same


def test_what_has_no_counterpart_is_as_far_as_can_be() -> None:
    new = DeltaChange("model.layers.5.mlp.up_proj", None, 2.0, None, None)
    tensor = TensorChange("model.layers.5.mlp.up_proj.lora_A.weight", 1.0, 2.0, None, None)
    shown = shown_diff(diff(deltas=[delta("0.a.q_proj", 9.0), new], tensors=[tensor], added=["x.5.mlp.up_proj"]))
    first = shown.deltas[0]
    assert (first.name, first.moved, first.width) == ("5.mlp.up_proj", "new", 100.0)
    assert (shown.tensors[0].name, shown.tensors[0].moved) == ("5.mlp.up_proj.lora_A", "other shape")
    assert shown.added == ["up_proj in 1 layer"]


def test_a_version_that_differs_in_nothing_is_the_same() -> None:
    shown = shown_diff(diff(deltas=[delta("0.a.q_proj", 0.0, 0.0)]))
    assert shown.same
    assert shown.deltas[0].width == 0.0


def test_layers_of_equal_ranks_are_one_row() -> None:
    ranks = {"q_proj": 8, "v_proj": 8, "up_proj": 16}
    layers = [LayerRanks(layer, ranks, {"q_proj": 8}) for layer in (0, 1, 2, 4)]
    shown = shown_diff(diff(layers=layers))
    assert [(row.layers, row.left, row.right) for row in shown.ranks] == [
        ("0–2", "q v: 8, up: 16", "q: 8"),
        ("4", "q v: 8, up: 16", "q: 8"),
    ]
    assert shown.ranks_differ


def test_config_values_are_told_as_json() -> None:
    shown = shown_diff(diff(config=[ConfigChange("target_modules", ["q_proj"], None)]))
    assert shown.config == [("target_modules", '["q_proj"]', "")]


def totals(requests: int, ttft: float | None, errors: float | None, speed: float | None) -> UsageTotals:
    times = Percentiles(ttft, ttft, ttft)
    return UsageTotals(
        requests=requests,
        failures=0,
        error_share=errors,
        errors={},
        cold_starts=0,
        hit_rate=1.0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        undelivered_tokens=0,
        tokens_per_s=speed,
        ttft_ms=times,
        inter_token_ms=times,
        queue_ms=times,
        cold_start_ms=times,
    )


def test_less_is_better_but_for_speed() -> None:
    rows = {row.label: row for row in compare(totals(90, 100.0, 0.0, 50.0), totals(10, 150.0, 0.02, 60.0))}
    assert rows["Requests"].change == "10 % of both"
    assert (rows["First token, p99"].change, rows["First token, p99"].verdict) == ("+50 %", "worse")
    assert (rows["Errors"].change, rows["Errors"].verdict) == ("from none", "worse")
    speed = rows["Tokens/s of a stream"]
    assert (speed.change, speed.verdict) == ("+20 %", "better")
    assert (rows["Hit rate"].change, rows["Hit rate"].verdict) == ("similar", "")


def test_nothing_is_compared_with_what_is_not_known() -> None:
    rows = compare(totals(5, 100.0, 0.0, 50.0), totals(0, None, None, None))
    assert {row.verdict for row in rows} == {""}


@pytest.mark.parametrize(
    ("version", "canary", "text"),
    [(None, None, "nothing"), (3, None, "@3"), (3, CanaryView(4, 10), "@3, 10 % of users @4")],
)
def test_targets_in_words(version: int | None, canary: CanaryView | None, text: str) -> None:
    assert words.target(version, canary) == text


def test_ranks_and_actors_in_words() -> None:
    assert words.ranks([8, 16]) == "8, 16"
    assert words.ranks([4, 8, 16, 32]) == "4–32"
    assert words.who("user:ada@example.com") == "ada@example.com"
    assert words.who("key:ab12") == "key ab12"
    assert words.who("system") == "system"
