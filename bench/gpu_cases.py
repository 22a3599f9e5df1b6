"""What the GPU's throughput and latency benches share: adapters by case, floors, the engine, printing and recording."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from bench.gpu_check import Checker, faults
from bench.gpu_engine import ALL7, ATTENTION, SHAPES, AdapterKind, GpuEngine, RandomLoader
from bench.results import Result, median_result, record
from stencilpress.engine.spec import ModelSpec

MIX = (8, 16, 32, 64)
SEATS, STEP_TOKENS = 256, 16384
POOL_BYTES = 0
"""What the engine takes by itself."""


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` requests at once over ``adapters`` in turn (0: the base), whose ranks are taken in turn too."""

    name: str
    batch: int
    adapters: int
    ranks: tuple[int, ...] = (16,)
    masks: tuple[int, ...] = ATTENTION
    vllm: float | None = None
    goal: float | None = None

    def kinds(self) -> list[AdapterKind]:
        return [AdapterKind(self._name(i), self.ranks[i % len(self.ranks)], self.masks) for i in range(self.adapters)]

    def digests(self) -> list[str]:
        """One for each request."""
        kinds = self.kinds()
        return [kinds[i % len(kinds)].digest if kinds else "" for i in range(self.batch)]

    def _name(self, i: int) -> str:
        return f"{'all7' if self.masks == ALL7 else 'qkvo'}-{i}"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """This card: bytes read and written by a large copy, bf16 products."""

    copy_gb_s: float
    matrix_tflop_s: float


def measure_ceilings() -> Ceilings:
    """Products first: they bring the clocks up."""
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    product = min(_elapsed_ms(lambda: torch.mm(a, b)) for _ in range(20))
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy = min(_elapsed_ms(lambda: target.copy_(source)) for _ in range(10))
    return Ceilings(2 * source.nbytes / copy / 1e6, 2 * 8192**3 / product / 1e9)


def _elapsed_ms(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def decode_floor_ms(spec: ModelSpec, ceilings: Ceilings, case: Case, positions: float) -> float:
    """One step of ``case.batch`` decodes that attend ``positions`` each: weights, adapters and KV over the copy's
    bandwidth, or products at the matrix rate if that is longer."""
    per_layer = sum(group.in_features * group.out_features for group in spec.groups)
    weights = per_layer * spec.num_layers + spec.vocab_size * spec.hidden_size
    adapters = sum(RandomLoader.payload_bytes(spec, kind) for kind in case.kinds()[: case.batch])
    kv = case.batch * positions * spec.kv_elems_per_token * spec.dtype_bytes
    moved = (weights * spec.dtype_bytes + adapters + kv) / ceilings.copy_gb_s / 1e6
    return max(moved, 2 * case.batch * weights / ceilings.matrix_tflop_s / 1e9 + kv / ceilings.copy_gb_s / 1e6)


def prompts(spec: ModelSpec, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(spec.vocab_size) for _ in range(length)] for _ in range(count)]


Measure = Callable[[GpuEngine, Case, Ceilings, int, str], Result]
"""Measures one case: engine, case, ceilings, repeats, name of the device."""


def measure_cases(bench: str, cases: Iterable[Case], measure: Measure, arguments: list[str]) -> int:
    """The whole of a bench: measure the chosen cases in one engine that was proved right, record if asked."""
    options = _parser(bench).parse_args(arguments)
    chosen = [case for case in cases if not options.cases or case.name in options.cases.split(",")]
    ceilings = measure_ceilings()
    engine = _ready_engine(SHAPES[options.shape], chosen)
    print(f"{ceilings}, {STEP_TOKENS} tokens a step")
    results = [measure(engine, case, ceilings, options.repeats, options.device_name) for case in chosen]
    engine.close()
    if options.record:
        record(results, ("torch", "triton"))
    return 0


def _parser(bench: str) -> argparse.ArgumentParser:
    """Options of both benches."""
    options = argparse.ArgumentParser(prog=f"python -m bench {bench}")
    options.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    options.add_argument("--cases", default="", help="comma-separated; all if empty")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--record", action="store_true", help="append to bench/results")
    options.add_argument("--device-name", default="h200", help="names the result file")
    return options


def _ready_engine(spec: ModelSpec, cases: Sequence[Case]) -> GpuEngine:
    """An engine for all cases, proved right and warm."""
    probes = [AdapterKind("probe", 16), AdapterKind("probe-all7", 64, ALL7)]
    kinds = dict.fromkeys([*probes, *(kind for case in cases for kind in case.kinds())])
    engine = GpuEngine(spec, list(kinds), torch.device("cuda"), pool_bytes=POOL_BYTES, seats=SEATS, tokens=STEP_TOKENS)
    engine.runner.warm()
    errors = Checker(engine, [probe.digest for probe in probes]).run()
    for name, error in errors.items():
        print(f"  {name:28} {error:.2e}")
    if wrong := faults(errors):
        raise RuntimeError("; ".join(wrong))
    return engine


def result(
    bench: str, metric: str, unit: str, case: Case, samples: Sequence[float], floor: float, device: str
) -> Result:
    return median_result(
        samples,
        bench=bench,
        case=case.name,
        metric=metric,
        unit=unit,
        system="stencilpress",
        device=device,
        floor=round(floor, 3),
        settings={
            "gpu": torch.cuda.get_device_name(),
            "dtype": "bfloat16",
            "goal": case.goal,
            "vllm-0.26.0": case.vllm,
        },
    )
