"""``python -m bench punica``: Punica's text generation (arXiv 2310.18547; its benchmarks/bench_textgen_lora.py).

All requests at once, 32 run; rank 16 on all seven linears; how many adapters, and how popular each is, must not matter.
"""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from bench.gpu_cases import PROBES, Bench, beside, gpu_bench, gpu_parser, prompts, proved_engine, random_loader
from bench.gpu_engine import GpuEngine, Run, Serving
from bench.gpu_random import ALL7, AdapterKind, RandomImages
from bench.results import Result, record

SEATS, LONGEST = 32, 2048
SEED = 0xABCDABCD987
WARM_UP_TOKENS = 24
"""Of each request, in the turn that does not count: enough for the graphs of all lengths to be captured."""
GOAL = 0.95
"""Of the fastest popularity's throughput, with the slowest one."""
POPULARITIES = ("identical", "skewed", "uniform", "distinct")


def lengths(count: int) -> list[tuple[int, int]]:
    """Tokens in and out of each request, as Punica's RequestSet draws them."""
    rng = np.random.Generator(np.random.PCG64(seed=SEED))
    inputs = np.clip(rng.lognormal(0.8, size=count) * 18 - 1, 1, LONGEST - 2).astype(int)
    totals = np.maximum(inputs + 2, rng.integers(0, LONGEST, count))
    return [(int(n), int(total - n)) for n, total in zip(inputs, totals, strict=True)]


def adapters(popularity: str, count: int) -> list[int]:
    """The adapter of each request, shuffled."""
    if popularity == "identical":
        found = [0] * count
    elif popularity == "distinct":
        found = list(range(count))
    elif popularity == "uniform":
        found = [i % math.ceil(math.sqrt(count)) for i in range(count)]
    else:
        sizes: list[int] = []
        while sum(sizes) < count:
            sizes.append(min(int(1.5 ** len(sizes)), count - sum(sizes)))
        found = [adapter for adapter, size in enumerate(sizes) for _ in range(size)]
    random.Random(SEED).shuffle(found)
    return found


def kind_of(adapter: int) -> AdapterKind:
    return AdapterKind(f"punica-{adapter}", 16, ALL7)


def measure(
    bench: Bench, engine: GpuEngine, images: RandomImages, popularity: str, count: int, least: Run | None
) -> tuple[Result, Run]:
    """Tokens in and out a second. A turn in which most of each request's tokens are given warms up. ``least`` is the
    run with one adapter, for this one's limit."""
    digests = (
        [kind_of(adapter).digest for adapter in adapters(popularity, count)] if popularity != "base" else [""] * count
    )
    shapes = lengths(count)
    total = sum(n + new for n, new in shapes)
    warming = [(n + new - min(new, WARM_UP_TOKENS), min(new, WARM_UP_TOKENS)) for n, new in shapes]
    samples = []
    run = Run()
    for turn in range(bench.repeats + 1):
        engine.use(random_loader(bench.base, images), len(images.kinds))
        longest = prompts(engine.spec, count, LONGEST, turn)
        of_turn = shapes if turn else warming
        given = [prompt[:n] for prompt, (n, _) in zip(longest, of_turn, strict=True)]
        run = engine.serve(given, digests, [new for _, new in of_turn])
        if turn:
            samples.append(total / run.total_s)
    settings = {"requests": count, "adapters": len(set(digests)) if digests[0] else 0, "batch": SEATS}
    limit = None if least is None else round(total / bench.least_s(run, least), 1)
    found = bench.result(popularity, "tok_s", "tok/s", samples, floor=limit, settings=settings)
    print(f"{popularity:10} {found.value:8.0f} tok/s {found.spread} limit {limit} {settings}", flush=True)
    return found, run


def main(arguments: list[str]) -> int:
    """Measure the base and the four popularities in one engine."""
    parser = gpu_parser("punica")
    parser.add_argument("--requests", type=int, default=1024)
    options = parser.parse_args(arguments)
    bench = gpu_bench("punica", options)
    kinds = [kind_of(adapter) for adapter in range(options.requests)]
    images = RandomImages(bench.base.spec, [*PROBES, *kinds], torch.device("cuda"))
    engine = proved_engine(
        bench.base, images, Serving(seats=SEATS, tokens=8192, max_loras=SEATS, max_model_len=LONGEST + 64)
    )
    results: list[Result] = []
    least: Run | None = None
    for name in ("base", *POPULARITIES):
        found, run = measure(bench, engine, images, name, options.requests, least)
        results.append(found)
        if name == POPULARITIES[0]:
            least = run
    values = [result.value for result in results[1:]]
    limits = [result.floor for result in results if result.floor is not None]
    known = bench.known(goal=GOAL)
    settings = {**known, "requests": options.requests}
    spread = bench.result(
        "slowest", "of_fastest", "", [min(values) / max(values)], floor=min(limits) / values[0], settings=settings
    )
    print(
        f"the slowest popularity has {spread.value:.3f} of the fastest's throughput {beside(known, None)}; reading its "
        f"weights leaves {spread.floor:.3f} of {POPULARITIES[0]} at most, if nothing else goes on meanwhile",
        flush=True,
    )
    results.append(spread)
    engine.close()
    if options.record:
        record(results, ("torch", "triton"))
    return 0
