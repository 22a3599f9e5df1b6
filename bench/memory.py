"""``python -m bench memory``: what adapters take of the device's memory."""

from __future__ import annotations

import torch

from bench.gpu_cases import MIX, Case, beside, gpu_bench, gpu_parser, prompts, random_loader
from bench.gpu_engine import GpuEngine, Serving
from bench.gpu_random import RandomImages, payload_bytes
from bench.results import record

CASE = Case("adapters-128-mix", 128, 128, MIX, vllm=13.0, goal=6.5)
PROMPT, NEW = 32, 4


def main(arguments: list[str]) -> int:
    """Run one request of each adapter at once; count the pages that adapters hold."""
    options = gpu_parser("memory").parse_args(arguments)
    bench = gpu_bench("memory", options)
    kinds = CASE.kinds()
    images = RandomImages(bench.base.spec, kinds, torch.device("cuda"))
    engine = GpuEngine(bench.base, torch.device("cuda"), Serving(seats=128, tokens=8192))
    engine.use(random_loader(bench.base, images), len(kinds) + 1)
    run = engine.serve(prompts(engine.spec, CASE.batch, PROMPT, 1), CASE.digests(), NEW)
    held_gib = run.most_adapter_bytes / 2**30
    assert engine.residency.in_hbm == len(kinds)
    floor = sum(payload_bytes(bench.base.spec, kind) for kind in kinds) / 2**30
    known = bench.known(goal=CASE.goal, vllm=CASE.vllm)
    found = bench.result(CASE.name, "gib", "GiB", [held_gib], floor=floor, settings=known)
    print(f"{CASE.name} {found.value:.3f} GiB, their weights {floor:.3f} {beside(known, None)}", flush=True)
    engine.close()
    if options.record:
        record([found], ("torch", "triton"))
    return 0
