"""``python -m bench slora``: S-LoRA's synthetic workload (arXiv 2311.03285, benchmarks/trace.py) at this GPU's rate.

Requests come as a Gamma process; adapters by a power law (alpha 1: uniform), lengths from 8 to 511 in and out, ranks
64, 32, 16 and 8 in turn by adapter, q, k, v and o. The rate is 1.1 times what the base sustains on the same requests.
Throughput is completions over the time until all have ended. Only adapters that are drawn exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu_cases import PROBES, Bench, beside, gpu_bench, gpu_parser, proved_engine, random_loader
from bench.gpu_engine import GpuEngine, Run, Serving
from bench.gpu_random import AdapterKind, RandomImages
from bench.results import Result, record

COUNTS = (5, 100, 1000, 2000)
RANKS = (64, 32, 16, 8)
LENGTHS = (8, 512)
SEED, ALPHA, CV = 42, 1.0, 1.0
OVERLOAD = 1.1
REQUESTS = 1000
"""Fewer are kinder: the time ends with the last answers, whose steps have few rows, and that is more of it."""
GOAL = 0.97
"""Of five adapters' throughput, with two thousand."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival. ``adapters`` are numbers below the count of adapters."""

    adapters: list[int]
    prompts: list[list[int]]
    new_tokens: list[int]
    gaps: list[float]

    def arrivals_s(self, rate: float) -> list[float]:
        """At so many requests a second."""
        return list(np.cumsum(self.gaps) / rate)


def make_trace(count: int, adapters: int, vocab_size: int) -> Trace:
    """As S-LoRA's generator draws it: adapters, lengths in, lengths out, gaps (here of mean one)."""
    rng = np.random.RandomState(SEED)
    numbers = (adapters * rng.power(ALPHA, size=count)).astype(int)
    inputs, outputs = rng.randint(*LENGTHS, count), rng.randint(*LENGTHS, count)
    gaps = rng.gamma(1 / CV**2, CV**2, count)
    prompts = [rng.randint(0, vocab_size, n).tolist() for n in inputs]
    return Trace(numbers.tolist(), prompts, outputs.tolist(), gaps.tolist())


def kind_of(adapter: int) -> AdapterKind:
    return AdapterKind(f"slora-{adapter}", RANKS[adapter % len(RANKS)])


def case_of(adapters: int, count: int) -> str:
    """A case's name: adapters, and requests if they are not the usual number."""
    name = f"n-{adapters}" if adapters else "base"
    return name if count == REQUESTS else f"{name}-{count}-requests"


def serve(engine: GpuEngine, trace: Trace, digests: list[str], rate: float) -> tuple[Run, float]:
    """The run, and the mean time to the first token, at ``rate`` requests a second; all at once if it is 0."""
    arrivals = trace.arrivals_s(rate) if rate else [0.0] * len(digests)
    run = engine.serve(trace.prompts, digests, trace.new_tokens, arrivals_s=arrivals)
    return run, float(np.mean([times[0] - arrivals[i] for i, times in run.times_s.items()]))


@dataclass(frozen=True, slots=True)
class Served:
    """One number of adapters: how long each turn took, and its last run."""

    result: Result
    run: Run


def measure(bench: Bench, engine: GpuEngine, images: RandomImages, count: int, counts: Sequence[int]) -> list[Result]:
    """The base flat out, the base at the rate, then each number of adapters."""
    spec = bench.base.spec
    trace = make_trace(count, 1, spec.vocab_size)
    engine.use(random_loader(bench.base, images), 1)
    flat_out = [serve(engine, trace, [""] * count, 0)[0] for _ in range(2)]  # the first one warms up
    sustained = count / flat_out[-1].total_s
    rate = OVERLOAD * sustained
    print(f"the base sustains {sustained:.2f} requests a second; {count} come at {rate:.2f}", flush=True)
    served: list[Served] = []
    for adapters in (0, *counts):
        least = served[1].run if len(served) > 1 else None
        served.append(measure_count(bench, engine, images, make_trace(count, max(1, adapters), spec.vocab_size),
                                    adapters, rate, least))  # fmt: skip
    results = [one.result for one in served]
    fewest, most = results[1].value, results[-1]
    known = bench.known(goal=GOAL)
    ratio = bench.result(
        case_of(counts[-1], count),
        f"of_n_{counts[0]}",
        "",
        [most.value / fewest],
        floor=(most.floor or fewest) / fewest,
        settings={**known, "requests": count},
    )
    print(
        f"{counts[-1]} adapters have {ratio.value:.3f} of {counts[0]}'s throughput {beside(known, None)}; reading "
        f"their weights leaves {ratio.floor:.3f} at most, if nothing else goes on meanwhile",
        flush=True,
    )
    results.append(ratio)
    return results


def measure_count(
    bench: Bench, engine: GpuEngine, images: RandomImages, trace: Trace, adapters: int, rate: float, least: Run | None
) -> Served:
    """Serve a trace over so many adapters; the first turn warms up, as graphs are captured in it. ``least`` is the run
    with the fewest adapters: this one's limit is that one's time and what reading the further weights takes."""
    count = len(trace.adapters)
    digests = [kind_of(adapter).digest for adapter in trace.adapters] if adapters else [""] * count
    samples, first_s = [], []
    run = Run()
    for turn in range(bench.repeats + 1):
        engine.use(random_loader(bench.base, images), len(images.kinds))
        if adapters:
            engine.host(digests)
        run, waited_s = serve(engine, trace, digests, rate)
        if turn:
            samples.append(count / run.total_s)
            first_s.append(waited_s)
    read_gb = run.adapter_bytes_read / 1e9
    limit = None if least is None else round(count / bench.least_s(run, least), 3)
    settings = {
        "rate": round(rate, 3),
        "requests": count,
        "drawn": len(set(digests)) if adapters else 0,
        "ttft_mean_s": round(float(np.median(first_s)), 3),
        "adapter_gb_read_a_step": round(read_gb / run.steps, 2),
    }
    case = case_of(adapters, count)
    result = bench.result(case, "req_s", "req/s", samples, floor=limit, settings=settings)
    print(
        f"{case:8} {result.value:7.3f} req/s {result.spread} limit {limit} {settings}\n    {run.host_line}", flush=True
    )
    return Served(result, run)


def main(arguments: list[str]) -> int:
    """Measure all numbers of adapters in one engine."""
    parser = gpu_parser("slora")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--adapters", type=int, nargs="+", default=COUNTS, help="numbers of adapters, ascending")
    options = parser.parse_args(arguments)
    bench = gpu_bench("slora", options)
    drawn = {a: None for n in options.adapters for a in make_trace(options.requests, n, 2).adapters}
    images = RandomImages(bench.base.spec, [*PROBES, *map(kind_of, drawn)], torch.device("cuda"))
    engine = proved_engine(bench.base, images, Serving(max_model_len=2 * LENGTHS[1], max_loras=256))
    results = measure(bench, engine, images, options.requests, options.adapters)
    engine.close()
    if options.record:
        record(results, ("torch", "triton"))
    return 0
