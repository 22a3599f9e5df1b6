"""``python -m bench latency``: time per output token of requests of 128 in, 128 out, that come at once."""

from __future__ import annotations

import statistics

from bench.gpu_cases import MIX, Case, Ceilings, decode_floor_ms, measure_cases, prompts, result
from bench.gpu_engine import ALL7, GpuEngine
from bench.results import Result

PROMPT, NEW = 128, 128
CASES = (
    Case("base-b1", 1, 0, vllm=4.93, goal=4.5),
    Case("base-b8", 8, 0, vllm=5.05, goal=4.6),
    Case("base-b32", 32, 0, vllm=5.55, goal=4.9),
    Case("base-b64", 64, 0, vllm=6.15, goal=5.2),
    Case("r16-b1", 1, 1, vllm=5.86, goal=4.7),
    Case("r16-b8", 8, 8, vllm=6.82, goal=4.9),
    Case("r16-b32", 32, 32, vllm=10.36, goal=5.4),
    Case("r16-b64", 64, 64, vllm=17.00, goal=5.9),
    Case("mix-b32", 32, 32, MIX, vllm=15.56, goal=5.9),
    Case("mix-b64", 64, 64, MIX, vllm=31.95, goal=6.6),
    Case("all7-r16-b32", 32, 32, masks=ALL7, vllm=18.94, goal=6.0),
)


def measure(engine: GpuEngine, case: Case, ceilings: Ceilings, repeats: int, device: str) -> Result:
    """One warm-up, then the median of ``repeats``, each the median over the requests; prints the case's line."""
    samples, line = [], ""
    for turn in range(repeats + 1):
        run = engine.serve(prompts(engine.spec, case.batch, PROMPT, turn), case.digests(), NEW)
        if turn:
            samples.append(statistics.median(run.tpot_ms))
        line = run.host_line
    floor = decode_floor_ms(engine.spec, ceilings, case, PROMPT + NEW / 2)
    found = result("latency", "tpot_ms", "ms", case, samples, floor, device)
    against = f"goal {case.goal} vllm {case.vllm} limit {floor:.2f}"
    print(f"{case.name:14} {found.value:7.3f} ms {found.spread} {against}   {line}", flush=True)
    return found


def main(arguments: list[str]) -> int:
    """Measure the chosen cases in one engine."""
    return measure_cases("latency", CASES, measure, arguments)
