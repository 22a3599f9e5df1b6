"""What the GPU benches share: adapters by case, floors, options, the engine, printing and recording."""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_base import Base, add_base_options, chosen_base
from bench.gpu_check import Checker, faults
from bench.gpu_device import add_record_options, device_label, require_gpu
from bench.gpu_engine import GpuEngine, MakeLoader, Run, Serving
from bench.gpu_peers import PEERS, Peer, installed
from bench.gpu_random import ALL7, ATTENTION, AdapterKind, RandomImages, RandomLoader, payload_bytes
from bench.results import Result, median_result, record
from stencilpress.engine.__main__ import settle
from stencilpress.engine.spec import ModelSpec

MIX = (8, 16, 32, 64)
PROBES = (AdapterKind("probe", 16), AdapterKind("probe-all7", 64, ALL7))


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
    adapters = sum(payload_bytes(spec, kind) for kind in case.kinds()[: case.batch])
    kv = case.batch * positions * spec.kv_elems_per_token * spec.dtype_bytes
    moved = (weights * spec.dtype_bytes + adapters + kv) / ceilings.copy_gb_s / 1e6
    return max(moved, 2 * case.batch * weights / ceilings.matrix_tflop_s / 1e9 + kv / ceilings.copy_gb_s / 1e6)


def prompts(spec: ModelSpec, count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(spec.vocab_size) for _ in range(length)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Bench:
    """A bench's name, and what all its measurements have in common."""

    name: str
    base: Base
    ceilings: Ceilings
    repeats: int
    gpu: str
    device: str

    def known(self, *, goal: float | None = None, vllm: float | None = None) -> dict[str, float]:
        """:meth:`Base.known` on this bench's GPU."""
        return self.base.known(self.gpu, goal=goal, vllm=vllm)

    def least_s(self, run: Run, least: Run) -> float:
        """The time of a run that reads fewer adapters, and what reading the further ones takes as fast as a copy."""
        return least.total_s + (run.adapter_bytes_read - least.adapter_bytes_read) / self.ceilings.copy_gb_s / 1e9

    def result(
        self,
        case: str,
        metric: str,
        unit: str,
        samples: Sequence[float],
        *,
        floor: float | None = None,
        system: str = "stencilpress",
        settings: dict[str, Any] | None = None,
    ) -> Result:
        """One figure of this bench."""
        return median_result(
            samples,
            bench=self.name,
            case=self.base.case(case),
            metric=metric,
            unit=unit,
            system=system,
            device=self.device,
            floor=None if floor is None else round(floor, 3),
            settings={
                "gpu": self.gpu,
                "base": self.base.name,
                "dtype": self.base.spec.dtype,
                **(settings or {}),
            },
        )


def beside(known: dict[str, float], limit: float | None) -> str:
    """What is printed beside a figure."""
    figures = {**known, **({} if limit is None else {"limit": limit})}
    return " ".join(f"{name} {value:.6g}" for name, value in figures.items())


Measure = Callable[[Bench, GpuEngine, Case], Result]
Theirs = Callable[[Bench, Peer, Case], Result]


def measure_cases(name: str, cases: Iterable[Case], measure: Measure, theirs: Theirs, arguments: list[str]) -> int:
    """The whole of a bench: the chosen cases in one engine that was proved right, then peers; record if asked."""
    by_name = {case.name: case for case in cases}
    parser = gpu_parser(name)
    add_case_options(parser, list(by_name))
    options = parser.parse_args(arguments)
    chosen = [by_name[case] for case in options.cases]
    bench = gpu_bench(name, options)
    images = RandomImages(bench.base.spec, [*PROBES, *_kinds(chosen)], torch.device("cuda"))
    engine = proved_engine(bench.base, images, Serving())
    engine.use(random_loader(bench.base, images), len(images.kinds) + 1)
    results = [measure(bench, engine, case) for case in chosen]
    engine.close()
    del engine, images
    for peer_class in installed(options.peer):
        results += peer_results(peer_class, bench, chosen, theirs)
    if options.record:
        record(results, ("torch", "triton"))
    return 0


def peer_results(peer_class: type[Peer], bench: Bench, cases: Sequence[Case], theirs: Theirs) -> list[Result]:
    """A peer's figures of the same cases; adapters of each case are made for it alone."""
    found = []
    for case in cases:
        with peer_class.serving(bench.base, case.kinds(), case.batch) as peer:
            found.append(theirs(bench, peer, case))
    return found


def gpu_parser(name: str) -> argparse.ArgumentParser:
    """Options of all GPU benches."""
    about = importlib.import_module(f"bench.{name}").__doc__
    options = argparse.ArgumentParser(prog=f"python -m bench {name}", description=about)
    add_base_options(options)
    options.add_argument("--repeats", type=int, default=3, help="turns that count, after one that warms up")
    add_record_options(options)
    return options


def add_case_options(options: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """``--cases``, some of ``names``, and ``--peer``."""

    def some(text: str) -> list[str]:
        chosen = text.split(",") if text else list(names)
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"no case {', '.join(unknown)}; there are {', '.join(names)}")
        return [name for name in names if name in chosen]

    options.add_argument("--cases", type=some, default=list(names), help=f"comma-separated, of {', '.join(names)}")
    options.add_argument(
        "--peer", action="append", choices=PEERS, default=[], help="measure it too, if installed; may be repeated"
    )


def gpu_bench(name: str, options: argparse.Namespace) -> Bench:
    """The bench that the options ask for; prints the card's ceilings. Ends the process with one line where there is
    no GPU, or no such model."""
    base = chosen_base(options)
    require_gpu(name)
    gpu, ceilings = torch.cuda.get_device_name(), measure_ceilings()
    print(f"{gpu}, {ceilings}", flush=True)
    return Bench(name, base, ceilings, options.repeats, gpu, options.device_name or device_label(gpu))


def proved_engine(base: Base, images: RandomImages, serving: Serving) -> GpuEngine:
    """An engine, warm, whose logits were checked with the images' first adapters, :data:`PROBES`."""
    engine = GpuEngine(base, torch.device("cuda"), serving)
    engine.use(random_loader(base, images), len(PROBES))
    engine.runner.warm()
    settle()
    errors = Checker(engine, images, [probe.digest for probe in PROBES]).run()
    for name, error in errors.items():
        print(f"  {name:28} {error:.2e}")
    if wrong := faults(errors):
        raise RuntimeError("; ".join(wrong))
    return engine


def random_loader(base: Base, images: RandomImages) -> MakeLoader:
    """Makes loaders whose adapters are in host memory."""
    return lambda memory, wake: RandomLoader(base.spec, memory, images, wake)


def _kinds(cases: Iterable[Case]) -> list[AdapterKind]:
    return list(dict.fromkeys(kind for case in cases for kind in case.kinds()))
