"""``python -m bench report``: the newest figure of each case, beside limit, goal and peers, as docs/benchmarks.md."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.results import newest

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
INTRO = """# Benchmarks

Medians of the newest run of each case, written by `python -m bench report` from `bench/results/`. *Limit* is what
reading the bytes of a step at the same machine's measured bandwidth would allow; of `first-use-page-cache` its
slowest stage; of `slora` and `punica` the time over fewest adapters and what reading the further weights takes, if
nothing else goes on meanwhile. *Goal* is what a case is held to, *vllm-0.26.0* what that did with it on an H200. A
spread of one value is a single run's. Absolute figures drift with a machine's neighbours, so peers are measured in
the same run, round by round.

| command | measures |
|---|---|
| `python -m bench throughput` | 256 requests of 256 tokens in and 128 out that come at once, over 0 to 128 adapters |
| `python -m bench latency` | time per output token of 1 to 64 requests, each with an adapter of its own |
| `python -m bench churn` | 1,000 adapters behind 4 GiB of adapter pages; what a load costs those who wait and who run |
| `python -m bench slora`, `punica` | the workloads of S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547) |
| `python -m bench start`, `memory` | process start to ready; what 128 adapters of mixed ranks hold |
| `python -m bench kernels` | single kernels at an 8B Llama's sizes, against float64 and the memory's bandwidth |
| `python -m bench serve` | `stencilpress serve` end to end: its answers against PEFT's, load over 64 adapters |
| `python -m bench cpu` | the whole HTTP path on this machine's CPU |
| `python -m bench gateway` | the gateway alone on one core before an engine that costs nothing, `--litellm` beside it |
| `python -m bench gateway --cases memory --minutes 10` | what the gateway holds over minutes of streams |
| `python -m bench soak --requests 10000 --kills 300` | kills and clients that leave: whether usage and slots balance |
| `python -m bench console` | lists and series of the admin API on PostgreSQL, with any number of usage rows |
| `python -m bench live` | what live pictures cost a gateway, and a picture of its pool an engine |

`make check` installs what benches need into `.venv`, and `python -m bench NAME --help` says more of each. From
`throughput` to `serve` they need an NVIDIA GPU and print each figure beside its limit; `--record` appends them to
`bench/results/`, to a file named after the GPU.

The base is `--shape llama3-8b` there, with random weights made on the device, or `--model FOLDER`: any folder that
`stencilpress serve` takes, as Hugging Face has it or as `stencilpress pull` left it. Goals and vLLM's figures are for
that shape on an H200 and stand beside no other. An engine's logits are compared with float32 before its tokens are
timed, each kernel's results with float64. `serve` has a random Llama of 1.2 billion parameters. In `throughput`,
`latency` and `churn`, `--peer peft` and `--peer vllm` measure those on the same requests afterwards, where they are
installed; `--cases` takes some of the cases.
"""

SHOWN = 100
"""Lines of the longest table that is not folded."""
BESIDE = ("goal", "vllm-0.26.0")
"""Figures in a case's settings that stand beside its own."""


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown rows of one bench on one device. What it is held to and what others reached has columns where any of
    its cases has that."""
    beside = [key for key in BESIDE if any(row["settings"].get(key) is not None for row in rows)]
    heads = ["case", "system", "metric", "median", "spread", "limit", *beside, "commit", "date"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        spread = f"{row['spread'][0]:g} to {row['spread'][1]:g}"
        known = [_number(row["settings"].get(key)) for key in beside]
        cells = [row["case"], row["system"], row["metric"], f"{row['value']:g} {row['unit']}".rstrip(), spread]
        lines.append(f"| {' | '.join([*cells, _number(row['floor']), *known, row['commit'], row['date'][:10]])} |")
    return lines


def _folded(lines: list[str]) -> list[str]:
    """A table that would push the others off the page is shown when it is asked for."""
    if len(lines) <= SHOWN:
        return lines
    return [f"<details><summary>{len(lines) - 2} figures</summary>", "", *lines, "", "</details>"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def main(arguments: list[str]) -> int:
    """Rewrite the page, and print its tables."""
    argparse.ArgumentParser(prog="python -m bench report", description=__doc__).parse_args(arguments)
    rows = newest()
    lines = [INTRO]
    for bench, device in sorted({(row["bench"], row["device"]) for row in rows}):
        lines += [f"## {bench} on {device}", ""]
        lines += [*_folded(table([r for r in rows if (r["bench"], r["device"]) == (bench, device)])), ""]
    PAGE.write_text("\n".join(lines))
    print("\n".join(lines[1:]))
    print(f"wrote {PAGE.name}: {len(rows)} figures")
    return 0
