"""``python -m bench throughput``: output tokens a second of 256 requests of 256 in, 128 out, that come at once."""

from __future__ import annotations

from bench.gpu_cases import MIX, Bench, Case, beside, decode_floor_ms, measure_cases, prompts
from bench.gpu_engine import GpuEngine
from bench.gpu_peers import Peer
from bench.gpu_random import ALL7
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


def floor_tok_s(bench: Bench, case: Case) -> float:
    """Prefill's products at the matrix rate, then each decode's floor."""
    spec = bench.base.spec
    weights = spec.num_layers * sum(group.in_features * group.out_features for group in spec.groups)
    prefill_ms = 2 * REQUESTS * PROMPT * weights / bench.ceilings.matrix_tflop_s / 1e9
    return REQUESTS * NEW * 1e3 / (prefill_ms + NEW * decode_floor_ms(spec, bench.ceilings, case, PROMPT + NEW / 2))


def measure(bench: Bench, engine: GpuEngine, case: Case) -> Result:
    """One warm-up, then the median of the repeats; prints the case's line."""
    samples, line = [], ""
    for turn in range(bench.repeats + 1):
        run = engine.serve(prompts(engine.spec, REQUESTS, PROMPT, turn), case.digests(), NEW)
        if turn:
            samples.append(REQUESTS * NEW / run.total_s)
        line = run.host_line
    known = bench.known(goal=case.goal, vllm=case.vllm)
    found = bench.result(case.name, "out_tok_s", "tok/s", samples, floor=floor_tok_s(bench, case), settings=known)
    against = beside(known, found.floor)
    print(f"{case.name:14} {found.value:8.0f} tok/s {found.spread} {against}   {line}", flush=True)
    return found


def theirs(bench: Bench, peer: Peer, case: Case) -> Result:
    """A peer's on the same requests."""
    samples = []
    for turn in range(bench.repeats + 1):
        elapsed_s = peer.elapsed_s(prompts(bench.base.spec, REQUESTS, PROMPT, turn), case.digests(), NEW)
        if turn:
            samples.append(REQUESTS * NEW / elapsed_s)
    found = bench.result(case.name, "out_tok_s", "tok/s", samples, system=peer.system)
    print(f"{case.name:14} {found.value:8.0f} tok/s {found.spread} {peer.system}", flush=True)
    return found


def main(arguments: list[str]) -> int:
    """Measure the chosen cases in one engine."""
    return measure_cases("throughput", CASES, measure, theirs, arguments)
