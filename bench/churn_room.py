"""``room-8`` of ``bench churn``: first tokens of sixteen adapters where eight have room, beside eight adapters' there.

Requests come as a Poisson process over equally popular adapters, whose images are in host memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from bench.gpu_cases import Bench, beside, prompts, random_loader
from bench.gpu_engine import GpuEngine
from bench.gpu_random import RandomImages
from bench.results import Result, percentile

ROOM, ADAPTERS = 8, 16
RATES = (8.0, 12.0)
"""Requests a second. With 128 tokens each five and eight of them run at a time."""
WARM_UP, REQUESTS, PROMPT, NEW = 20, 100, 256, 128
GOAL = 2.0


def first_tokens(bench: Bench, engine: GpuEngine, images: RandomImages) -> list[Result]:
    """Median times to the first token at each rate, and their ratio."""
    digests = list(images.kinds)[-ADAPTERS:]
    engine.use(random_loader(bench.base, images), ADAPTERS)
    engine.host(digests)
    room_bytes = ROOM * engine.residency.pages(digests[0]) * engine.memory.geometry.page_bytes
    results = []
    for rate in RATES:
        eight, sixteen = (_median(bench, engine, images, digests[:n], rate, room_bytes) for n in (ROOM, ADAPTERS))
        known = bench.known(goal=GOAL)
        ratio = [sixteen.value / eight.value]
        results += [eight, sixteen, bench.result(_case(ADAPTERS, rate), "of_8_on_8", "", ratio, settings=known)]
        medians = f"{sixteen.value:.1f} ms to the first token, {ROOM} adapters {eight.value:.1f}"
        tail = f"p99 {sixteen.settings['p99_ms']} ms, {sixteen.settings['placed']} placements"
        print(f"{sixteen.case} {medians}, ratio {ratio[0]:.2f} {beside(known, None)} {tail}", flush=True)
    return results


def _case(adapters: int, rate: float) -> str:
    return f"{adapters}-on-{ROOM}-at-{rate:.0f}"


def _median(
    bench: Bench, engine: GpuEngine, images: RandomImages, digests: Sequence[str], rate: float, room_bytes: int
) -> Result:
    """Of requests over ``digests`` that begin with nothing in the pool; a short turn warms up."""
    samples: list[float] = []
    for turn, count in enumerate((WARM_UP, REQUESTS)):
        rng = random.Random(turn)
        arrivals = list(accumulate(rng.expovariate(rate) for _ in range(count)))
        adapters = [rng.choice(digests) for _ in arrivals]
        engine.use(random_loader(bench.base, images), ADAPTERS, room_bytes)
        engine.host(digests)
        run = engine.serve(prompts(engine.spec, count, PROMPT, turn), adapters, NEW, arrivals_s=arrivals)
        samples = [(times[0] - arrivals[i]) * 1e3 for i, times in run.times_s.items()]
    settings = {"placed": engine.residency.loads, "p99_ms": round(percentile(samples, 0.99), 1)}
    return bench.result(_case(len(digests), rate), "ttft_ms", "ms", samples, settings=settings)
