"""Compile every Triton kernel for real GPUs on a machine that has none; those in CUDA C++ too, where NVRTC is.

``python -m stencilpress.kernels.compile [80 90]``

Each case is a kernel at the sizes that the engine uses for Llama 3 8B. The report names registers, spills and shared
memory; a case that does not compile, spills in earnest, or asks for more shared memory than the target has, fails.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import run
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stencilpress.kernels.argmax.triton_argmax import parts_kernel, pick_kernel
from stencilpress.kernels.attention.triton_decode import join_kernel, split_kernel
from stencilpress.kernels.attention.triton_prefill import prefill_kernel
from stencilpress.kernels.cuda_launch import CudaKernel, machine_code
from stencilpress.kernels.draw.triton_wide import wide_kernel
from stencilpress.kernels.linear.triton_linear import Cut as LinearCut
from stencilpress.kernels.linear.triton_linear import linear_constants, linear_kernel
from stencilpress.kernels.norm.triton_rms_norm import rms_norm_kernel
from stencilpress.kernels.rope.triton_rope import rope_kernel
from stencilpress.kernels.sgmv.cuda_sgmv import EXPAND_KERNELS, ROWS_KERNEL
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_blocks import expand_blocks_kernel, shrink_blocks_kernel
from stencilpress.kernels.sgmv.triton_gate import choose_gate_cut, gate_blocks_kernel, gate_constants
from stencilpress.kernels.sgmv.triton_rows import rows_kernel
from stencilpress.kernels.sgmv.triton_sgmv import (
    choose_cut,
    expand_constants,
    rows_constants,
    shrink_constants,
)
from stencilpress.kernels.sgmv.triton_work import Tile, mark_rows_kernel, resolve_kernel
from stencilpress.kernels.silu.triton_silu_mul import silu_mul_kernel

CAPABILITIES = (80, 90)
CUDA_KERNELS = (ROWS_KERNEL, *EXPAND_KERNELS.values())
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
_LISTS = "*bf16 *bf16 *i32 *i32 *i64 *i32 *fp32 i32 i32 i32"
"""Types of the arguments of shrinks and expands of blocks."""
_STACK_BYTES = 128
"""A few spilled registers outside of loops cost nothing measurable."""
_FLOAT_ATOMIC = re.compile(r"\b(atom|red)\.[\w.:]*(f16|bf16|f32|f64)")
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Case:
    """One specialisation. ``types`` are of the arguments that are no constants, in order."""

    name: str
    kernel: Any
    types: str
    constants: Mapping[str, Any]
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})


@dataclass(frozen=True)
class Compiled:
    case: Case
    capability: int
    ptx: str
    shared_bytes: int
    registers: int
    stack_bytes: int


def cases(capability: int) -> Iterator[Case]:
    """All kernels, at the sizes of an 8B Llama in bf16; expands in fp32, attention in fp16 and for small heads too."""
    yield Case("resolve", resolve_kernel, "*i64 *i32 *i32 *i64 *i64 *i32 i32 i32", {"R": 16, "E": 16})
    yield from _products(capability)
    yield from _expands_in_fp32(capability)
    yield from _gates(capability)
    yield from _linears()
    yield from _attention()
    yield from _norms_and_rope()
    yield from _draws()
    yield Case("silu-mul", silu_mul_kernel, "*bf16 *bf16 i32", {"WIDTH": 14336, "BLOCK": 1024})


def _products(capability: int) -> Iterator[Case]:
    """Shrinks and expands of blocks, and both in one for single rows."""
    rows = "*bf16 *bf16 *bf16 *i32 *i32 *i32 *i64 *i32 *i32 *i32 *fp32 *fp32 i32 i32 i32 i32"
    for name, shape in (("qkv", GroupShape(4096, (4096, 1024, 1024))), ("down", GroupShape(14336, (4096,)))):
        for tile, blocks, items in (
            (Tile(1, 16), 64, 64),
            (Tile(16, 16), 32, 32),
            (Tile(64, 16), 1, 1),
            (Tile(64, 16), 64, 64),
            (Tile(64, 16), 64, 128),
            (Tile(64, 16), 256, 256),
            (Tile(64, 64), 32, 32),
            *(((Tile(64, 64), 128, 128),) if name == "down" else ()),
        ):
            cut = choose_cut(shape, tile, blocks, items, warp_groups=capability == 90)
            label = f"{name}-{tile.rows}x{tile.ranks}-{blocks}-{items}"
            if tile.rows == 1:
                options = {"num_warps": cut.warps, "maxnreg": cut.registers}
                constants = rows_constants(shape, tile, cut)
                for done in (False, True):
                    yield Case(f"rows-{label}-{done}", rows_kernel, rows, {**constants, "X_DONE": done}, options)
                continue
            constants = shrink_constants(shape, tile, cut, f32_dot=False)
            yield Case(f"shrink-{label}", shrink_blocks_kernel, _LISTS, constants, {"num_warps": cut.warps})
            constants = expand_constants(shape, tile, cut, f32_dot=False)
            yield Case(f"expand-{label}", expand_blocks_kernel, _LISTS, constants, {"num_warps": cut.warps})


def _expands_in_fp32(capability: int) -> Iterator[Case]:
    """Tensor cores do not serve there."""
    shape, tile = GroupShape(4096, (4096, 1024, 1024)), Tile(64, 64)
    for blocks in (8, 128):
        cut = choose_cut(shape, tile, blocks, blocks, warp_groups=capability == 90, f32=True)
        constants = expand_constants(shape, tile, cut, f32_dot=False)
        options = {"num_warps": cut.warps}
        yield Case(f"expand-fp32-{blocks}", expand_blocks_kernel, _LISTS.replace("bf16", "fp32"), constants, options)


def _gates(capability: int) -> Iterator[Case]:
    types = "*bf16 *bf16 *bf16 *i32 *i32 *i64 *i32 *fp32 *i32 i32 i32 i32 i32 i32"
    shape = GroupShape(4096, (14336, 14336))
    for tile, blocks, items in (
        (Tile(16, 16), 8, 8),
        (Tile(16, 16), 32, 32),
        (Tile(64, 16), 8, 8),
        (Tile(64, 16), 32, 64),
        (Tile(64, 16), 256, 256),
    ):
        cut = choose_gate_cut(shape, tile, blocks, items, warp_groups=capability == 90)
        constants = gate_constants(shape, tile, cut, f32_dot=False)
        name = f"gate-{tile.rows}x{tile.ranks}-{blocks}-{items}"
        yield Case(name, gate_blocks_kernel, types, constants, {"num_warps": cut.warps})
    for rows in (1, 64):
        yield Case(f"mark-rows-{rows}", mark_rows_kernel, "*i32 *i32 *i32", {"M": rows}, {"num_warps": 1})


def _linears() -> Iterator[Case]:
    types = "*bf16 *bf16 *bf16 *bf16 *fp32 *i32 i32 i32"
    for rows_of_x, bias in ((8, False), (16, True), (32, False)):
        few = LinearCut(64, 128, 4, 4, head=256 if rows_of_x <= 16 else 128)
        constants = linear_constants(rows_of_x, 4096, 4096, few, bias=bias, for_next=True, f32_dot=False)
        options = {"num_warps": few.warps, "num_stages": few.stages}
        yield Case(f"linear-{rows_of_x}", linear_kernel, types, constants, options)


def _attention() -> Iterator[Case]:
    heads = {"G": 8, "HEADS": 4, "D": 128, "DP": 128, "PAGE": 16, "N": 64, "F32_DOT": False}
    for splits, out in ((1, "*bf16"), (8, "*fp32")):
        types = f"*bf16 *bf16 *i32 *i32 {out} *fp32 i32 i32 i32 i32 fp32"
        constants = {**heads, "M": 16, "SPLITS": splits, "FOR_NEXT": False}
        yield Case(f"decode-{splits}", split_kernel, types, constants, {"num_warps": 4})
    types = "*bf16 *bf16 *i32 *i32 *bf16 *fp32 i32 i32 i32 i32 fp32"
    for for_next in (False, True):
        constants = {**heads, "N": 32, "M": 16, "SPLITS": 1, "FOR_NEXT": for_next}
        name = f"decode-many-{for_next}"
        yield Case(name, split_kernel, types, constants, {"num_warps": 1, "num_stages": 2})
    yield Case(
        "decode-join", join_kernel, "*fp32 *fp32 *bf16", {"D": 128, "DP": 128, "X": 8, "XP": 8}, {"num_warps": 2}
    )
    types = "*bf16 *bf16 *i32 *i32 *bf16 i32 i32 i32 i32 fp32"
    for done in (False, True):
        constants = {**heads, "M": 128, "N": 32, "Q_DONE": done}
        yield Case(f"prefill-{done}", prefill_kernel, types, constants, {"num_warps": 4, "num_stages": 5})
    half = {**heads, "D": 64, "DP": 64, "HEADS": 3, "G": 3}
    types = "*fp16 *fp16 *i32 *i32 *fp16 *fp32 i32 i32 i32 i32 fp32"
    constants = {**half, "M": 16, "SPLITS": 1, "FOR_NEXT": False}
    yield Case("decode-fp16-64", split_kernel, types, constants, {"num_warps": 4})
    types = "*fp16 *fp16 *i32 *i32 *fp16 i32 i32 i32 i32 fp32"
    constants = {**half, "M": 128, "N": 32, "Q_DONE": False}
    yield Case("prefill-fp16-64", prefill_kernel, types, constants, {"num_warps": 4, "num_stages": 5})


def _norms_and_rope() -> Iterator[Case]:
    for residual in (False, True):
        constants = {"D": 4096, "BLOCK": 4096, "RESIDUAL": residual}
        name = "rms-norm-residual" if residual else "rms-norm"
        yield Case(name, rms_norm_kernel, "*bf16 *bf16 *bf16 *bf16 i32 fp32", constants, {"num_warps": 8})
    types = "*bf16 *bf16 *i32 *i32 *fp32 *fp32 *bf16 *bf16 i32 i32 i32 fp32"
    for norm in (False, True):
        constants = {"H": 32, "G": 8, "D": 128, "HP": 32, "FP": 64, "PAGE": 16, "NORM": norm}
        yield Case(f"rope-{'norm' if norm else 'plain'}", rope_kernel, types, constants)


def _draws() -> Iterator[Case]:
    constants = {"V": 128256, "BLOCK": 4096}
    yield Case("argmax-parts", parts_kernel, "*bf16 *fp32 *i32 i32", constants)
    yield Case("argmax-pick", pick_kernel, "*fp32 *i32 *i32 *i32 *i32", {"P": 32, "PP": 32}, {"num_warps": 1})
    types = "*fp32 *fp32 *u8 *i64 *fp64 *fp64 *fp64 *i64 i32"
    yield Case("draw-wide", wide_kernel, types, {"V": 128256, "BLOCK": 4096}, {"num_warps": 8})


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile to machine code. Pointers and sizes count as divisible by 16, as they are in the engine."""
    constants = dict(case.constants)
    if "PDL" in case.kernel.arg_names:
        constants["PDL"] = capability >= 90
    types = iter(case.types.split())
    if unknown := constants.keys() - set(case.kernel.arg_names):
        raise ValueError(f"{case.name} takes no {', '.join(sorted(unknown))}")
    signature = {name: "constexpr" if name in constants else next(types) for name in case.kernel.arg_names}
    apart = set(case.kernel.do_not_specialize or ())
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if name not in apart and (kind.startswith("*") or kind == "i32")
    }
    source = ASTSource(case.kernel, signature, constexprs=constants, attrs=attrs)
    options = {**case.options, "launch_pdl": capability >= 90}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(binary.asm["cubin"])
    return Compiled(case, capability, binary.asm["ptx"], binary.metadata.shared, registers, stack)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and stack bytes (local memory: spills) of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    facts = dict(word.split(":") for word in report.split() if word.count(":") == 1 and not word.endswith(":"))
    return int(facts["REG"]), int(facts["STACK"])


def faults(compiled: Compiled) -> list[str]:
    """What is wrong with a kernel that compiled."""
    found = []
    if compiled.stack_bytes > _STACK_BYTES:
        found.append(f"{compiled.stack_bytes} bytes of stack: registers spill")
    if _FLOAT_ATOMIC.search(compiled.ptx):
        found.append("floats are added atomically: sums depend on timing")
    if ".cache_hint.b16" in compiled.ptx:
        found.append("weights load two bytes at a time")
    if compiled.shared_bytes > SHARED_BYTES[compiled.capability]:
        found.append(f"{compiled.shared_bytes} bytes of shared memory")
    return found


def compile_cuda(kernel: CudaKernel) -> tuple[int, int]:
    """Registers a thread and stack bytes of a kernel in CUDA C++, for Hopper. Raises ImportError without NVRTC."""
    return _resources(machine_code(kernel, (9, 0)))


def _cuda_failures() -> int:
    failures = 0
    for kernel in CUDA_KERNELS:
        try:
            registers, stack = compile_cuda(kernel)
        except ImportError as error:
            sys.stdout.write(f"kernels in CUDA C++ were left out: {error}\n")
            return 0
        failures += stack > 0
        name = " ".join((kernel.source.name, *(f"{key}={value}" for key, value in kernel.constants)))
        sys.stdout.write(f"sm_90 {name}: {registers} registers {f'; {stack} bytes of stack' if stack else ''}\n")
    return failures


def main(capabilities: Sequence[int] = CAPABILITIES) -> int:
    """Compile all cases for each capability; the exit status says whether one failed."""
    failures = 0
    for capability in capabilities:
        for case in cases(capability):
            compiled = compile_case(case, capability)
            wrong = faults(compiled)
            failures += bool(wrong)
            size = f"{compiled.registers:4d} registers {compiled.shared_bytes:7d} bytes shared"
            sys.stdout.write(f"sm_{capability} {case.name:28s} {size} {'; '.join(wrong)}\n")
    if 90 in capabilities:
        failures += _cuda_failures()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]] or CAPABILITIES))
