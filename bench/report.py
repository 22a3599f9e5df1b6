"""``python -m bench report``: the newest figure of each case, beside its peers, as docs/benchmarks.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.results import newest

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
INTRO = """# Benchmarks

Medians of the newest run of each case, written by `python -m bench report` from `bench/results/`. *Limit* is what
reading the bytes of a step at the same machine's measured bandwidth would allow. Absolute figures drift with a
machine's neighbours, so peers are measured in the same run, round by round.
"""


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown rows of one bench on one device."""
    lines = [
        "| case | system | metric | median | spread | limit | commit | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        limit = "" if row["floor"] is None else f"{row['floor']:g}"
        spread = f"{row['spread'][0]:g} to {row['spread'][1]:g}"
        cells = (row["case"], row["system"], row["metric"], f"{row['value']:g} {row['unit']}", spread, limit)
        lines.append(f"| {' | '.join(cells)} | {row['commit']} | {row['date'][:10]} |")
    return lines


def main(arguments: list[str]) -> int:  # noqa: ARG001 - every measurement's main takes its arguments
    """Rewrite the page."""
    rows = newest()
    lines = [INTRO]
    for bench, device in sorted({(row["bench"], row["device"]) for row in rows}):
        lines += [f"## {bench} on {device}", ""]
        lines += [*table([r for r in rows if (r["bench"], r["device"]) == (bench, device)]), ""]
    PAGE.write_text("\n".join(lines))
    print(f"wrote {PAGE.name}: {len(rows)} figures")
    return 0
