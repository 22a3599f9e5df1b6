"""``python -m bench latency``: time per output token of requests of 128 in, 128 out, that come at once."""

from __future__ import annotations

import statistics

from bench.gpu_cases import MIX, Bench, Case, beside, decode_floor_ms, measure_cases, prompts
from bench.gpu_engine import GpuEngine
from bench.gpu_peers import Peer
from bench.gpu_random import ALL7
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


def measure(bench: Bench, engine: GpuEngine, case: Case) -> Result:
    """One warm-up, then the median of the repeats, each the median over the requests; prints the case's line."""
    samples, line = [], ""
    for turn in range(bench.repeats + 1):
        run = engine.serve(prompts(engine.spec, case.batch, PROMPT, turn), case.digests(), NEW)
        if turn:
            samples.append(statistics.median(run.tpot_ms))
        line = run.host_line
    floor = decode_floor_ms(engine.spec, bench.ceilings, case, PROMPT + NEW / 2)
    known = bench.known(goal=case.goal, vllm=case.vllm)
    found = bench.result(case.name, "tpot_ms", "ms", samples, floor=floor, settings=known)
    against = beside(known, found.floor)
    print(f"{case.name:14} {found.value:7.3f} ms {found.spread} {against}   {line}", flush=True)
    return found


def theirs(bench: Bench, peer: Peer, case: Case) -> Result:
    """A peer's time for all tokens less its time for one, over the steps between."""
    samples = []
    for turn in range(bench.repeats + 1):
        given = prompts(bench.base.spec, case.batch, PROMPT, turn), case.digests()
        elapsed_s = [peer.elapsed_s(*given, new_tokens) for new_tokens in (1, NEW)]
        if turn:
            samples.append((elapsed_s[1] - elapsed_s[0]) * 1e3 / (NEW - 1))
    found = bench.result(case.name, "tpot_ms", "ms", samples, system=peer.system)
    print(f"{case.name:14} {found.value:7.3f} ms {found.spread} {peer.system}", flush=True)
    return found


def main(arguments: list[str]) -> int:
    """Measure the chosen cases in one engine."""
    return measure_cases("latency", CASES, measure, theirs, arguments)
