"""``python -m bench throughput``: output tokens a second of 256 requests of 256 in, 128 out, that come at once."""

from __future__ import annotations

from bench.gpu_cases import MIX, Case, Ceilings, decode_floor_ms, measure_cases, prompts, result
from bench.gpu_engine import ALL7, GpuEngine
from bench.results import Result

REQUESTS, PROMPT, NEW = 256, 256, 128
CASES = (
    Case("base", REQUESTS, 0, vllm=10896, goal=11500),
    Case("lora-1-r16", REQUESTS, 1, vllm=9897, goal=11300),
    Case("lora-32-r16", REQUESTS, 32, vllm=8387, goal=10900),
    Case("lora-128-r16", REQUESTS, 128, vllm=5376, goal=10400),
    Case("lora-128-mix", REQUESTS, 128, MIX, vllm=5036, goal=10000),
    Case("lora-32-all7", REQUESTS, 32, masks=ALL7, vllm=5663, goal=10400),
)


def floor_tok_s(engine: GpuEngine, case: Case, ceilings: Ceilings) -> float:
    """Prefill's products at the matrix rate, then each decode's floor."""
    spec = engine.spec
    weights = spec.num_layers * sum(group.in_features * group.out_features for group in spec.groups)
    prefill_ms = 2 * REQUESTS * PROMPT * weights / ceilings.matrix_tflop_s / 1e9
    return REQUESTS * NEW * 1e3 / (prefill_ms + NEW * decode_floor_ms(spec, ceilings, case, PROMPT + NEW / 2))


def measure(engine: GpuEngine, case: Case, ceilings: Ceilings, repeats: int, device: str) -> Result:
    """One warm-up, then the median of ``repeats``; prints the case's line."""
    samples, line = [], ""
    for turn in range(repeats + 1):
        run = engine.serve(prompts(engine.spec, REQUESTS, PROMPT, turn), case.digests(), NEW)
        if turn:
            samples.append(REQUESTS * NEW / run.total_s)
        line = run.host_line
    found = result("throughput", "out_tok_s", "tok/s", case, samples, floor_tok_s(engine, case, ceilings), device)
    against = f"goal {case.goal:.0f} vllm {case.vllm:.0f} limit {found.floor:.0f}"
    print(f"{case.name:14} {found.value:8.0f} tok/s {found.spread} {against}   {line}", flush=True)
    return found


def main(arguments: list[str]) -> int:
    """Measure the chosen cases in one engine."""
    return measure_cases("throughput", CASES, measure, arguments)
