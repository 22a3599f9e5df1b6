"""The page of figures: the newest of each case, with limit, goal and what others did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import report, results


def _row(case: str, value: float, *, floor: float | None = None, **settings: Any) -> str:
    row = {"bench": "latency", "case": case, "metric": "tpot_ms", "value": value, "unit": "ms", "floor": floor,
           "system": "stencilpress", "repeats": 3, "spread": [value, value + 1], "device": "h200", "settings": settings,
           "commit": "abc", "date": "2026-11-30T10:00:00"}  # fmt: skip
    return json.dumps(row) + "\n"


def test_the_newest_of_each_case_beside_limit_goal_and_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"goal": 4.5, "vllm-0.26.0": 4.93}
    rows = [_row("base-b1", 9), _row("base-b1", 4.25, floor=3.5, **known), _row("base-b1 other", 2)]
    (tmp_path / "latency.h200.jsonl").write_text("".join(rows))
    (tmp_path / "live.cpu2.jsonl").write_text(_row("one", 1.5).replace("latency", "live").replace("h200", "cpu2"))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    assert report.main([]) == 0
    page = (tmp_path / "page.md").read_text()
    assert page.startswith(report.INTRO)
    lines = page.removeprefix(report.INTRO).splitlines()
    assert lines[lines.index("## latency on h200") + 2 :][:4] == [
        "| case | system | metric | median | spread | limit | goal | vllm-0.26.0 | commit | date |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| base-b1 | stencilpress | tpot_ms | 4.25 ms | 4.25 to 5.25 | 3.5 | 4.5 | 4.93 | abc | 2026-11-30 |",
        "| base-b1 other | stencilpress | tpot_ms | 2 ms | 2 to 3 |  |  |  | abc | 2026-11-30 |",
    ]
    assert "| case | system | metric | median | spread | limit | commit | date |" in lines  # nobody's goals
    assert "<details>" not in page
    assert set(lines) <= set(capsys.readouterr().out.splitlines())


def test_a_long_table_is_folded() -> None:
    rows = [json.loads(_row(f"case-{i}", i)) for i in range(report.SHOWN)]
    folded = report._folded(report.table(rows))
    assert folded[0] == f"<details><summary>{len(rows)} figures</summary>"
    assert (folded[1], folded[-2:]) == ("", ["", "</details>"])
    assert folded[2:-2] == report.table(rows)
