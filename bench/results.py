"""Result files: one JSON object a line in ``bench/results/<bench>.<device>.jsonl``, newest last."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Result:
    """One figure. ``value`` is a median after warm-up, ``spread`` its [min, max]."""

    bench: str
    case: str
    metric: str
    value: float
    unit: str
    floor: float | None
    system: str
    repeats: int
    spread: list[float]
    device: str
    settings: dict[str, Any] = field(default_factory=dict)


def median_result(
    samples: Sequence[float],
    *,
    bench: str,
    case: str,
    metric: str,
    unit: str,
    system: str,
    device: str,
    floor: float | None = None,
    settings: dict[str, Any] | None = None,
) -> Result:
    """The median of ``samples`` with their spread."""
    value = statistics.median(samples)
    spread = [round(min(samples), 4), round(max(samples), 4)]
    return Result(
        bench, case, metric, round(value, 4), unit, floor, system, len(samples), spread, device, settings or {}
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie, interpolated; ``share`` of 0.001 to 0.999, to the thousandth."""
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def record(results: Iterable[Result], packages: Sequence[str]) -> None:
    """Append results with commit, date and the versions of ``packages`` to their files."""
    stamp = {"commit": _commit(), "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
    versions = {name: importlib.metadata.version(name) for name in packages}
    RESULTS.mkdir(exist_ok=True)
    for result in results:
        line = json.dumps({**asdict(result), **stamp, "versions": versions})
        with (RESULTS / f"{result.bench}.{result.device}.jsonl").open("a") as file:
            file.write(line + "\n")


def newest() -> list[dict[str, Any]]:
    """The last recorded line of each (bench, case, metric, system, device)."""
    latest: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            key = tuple(row[name] for name in ("bench", "case", "metric", "system", "device"))
            latest.pop(key, None)
            latest[key] = row
    return list(latest.values())


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
