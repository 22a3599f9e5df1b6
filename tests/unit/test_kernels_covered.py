"""Every kernel has cases that are compiled ahead and a test in the interpreter; none adds floats atomically."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from stencilpress.kernels.compile import CAPABILITIES, CUDA_KERNELS, Compiled, cases, faults

ROOT = Path(__file__).parents[2]
KERNELS, TESTS = ROOT / "kernels", Path(__file__).parent


@dataclass
class Names:
    """Functions by name: those that Triton compiles, and for each function the names that its body has."""

    compiled: set[str] = field(default_factory=set)
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def read(self, folder: Path) -> Names:
        for path in folder.rglob("*.py"):
            for function in _functions(path):
                words = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                self.used[function.name] |= words - {function.name}
                if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                    self.compiled.add(function.name)
        return self

    def kernels(self) -> set[str]:
        """Compiled functions that no other of them calls: the host launches them."""
        called = {word for name in self.compiled for word in self.used[name]}
        return self.compiled - called

    def reach(self, names: set[str]) -> set[str]:
        """All that is used by these functions, directly or not."""
        found: set[str] = set()
        while names:
            found |= names
            names = {word for name in names for word in self.used.get(name, ())} - found
        return found


def _functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def interpreted(names: Names, tests: Path) -> set[str]:
    """What tests of this folder use, which conftest.py has Triton interpret."""
    found: set[str] = set()
    for path in tests.glob("test_*.py"):
        for function in _functions(path):
            found |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names.reach(found & names.used.keys())


@pytest.fixture(scope="module")
def names() -> Names:
    return Names().read(KERNELS)


def test_there_are_kernels(names: Names) -> None:
    assert {"rows_kernel", "shrink_blocks_kernel", "split_kernel", "prefill_kernel", "wide_kernel"} <= names.kernels()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_triton_kernel_is_compiled_ahead(capability: int, names: Names) -> None:
    assert names.kernels() == {case.kernel.fn.__name__ for case in cases(capability)}


def test_every_cuda_kernel_is_compiled_ahead() -> None:
    declared = re.compile(r"__global__[^{;]*?\b(\w+)\(const __grid_constant__")
    there = {(path.name, name) for path in KERNELS.rglob("*.cu") for name in declared.findall(path.read_text())}
    assert {path.name for path in KERNELS.rglob("*.cu")} == {source for source, _ in there}
    assert there == {(kernel.source.name, kernel.name) for kernel in CUDA_KERNELS}


def test_every_triton_kernel_has_a_test_in_the_interpreter(names: Names) -> None:
    assert names.kernels() <= interpreted(names, TESTS)


def test_a_kernel_without_a_test_is_found(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "triton_new.py").write_text(
        "@triton.jit\ndef _part(x):\n    return x\n"
        "@triton.jit\ndef old_kernel(x):\n    _part(x)\n"
        "@triton.jit(do_not_specialize=['x'])\ndef new_kernel(x):\n    _part(x)\n"
        "def old(x):\n    launch(old_kernel, x)\n"
        "def new(x):\n    launch(new_kernel, x)\n"
    )
    (tmp_path / "test_old.py").write_text("def test_old():\n    assert old(1)\n")
    names = Names().read(tmp_path / "kernels")
    assert names.kernels() == {"old_kernel", "new_kernel"}
    assert names.kernels() - interpreted(names, tmp_path) == {"new_kernel"}


def test_atomic_sums_of_floats_are_faults() -> None:
    case = next(cases(90))
    counting = "atom.global.gpu.acq_rel.add.u32 %r1, [%rd1], 1; red.release.gpu.global.add.u32 [%rd1], 1;"
    fine = Compiled(case, 90, counting, 0, 32, 0)
    assert not faults(fine)
    for wrong in ("red.global.add.f32 [%rd1], %f1;", "atom.relaxed.gpu.global.add.noftz.bf16x2 %r1, [%rd1], %r2;"):
        assert faults(replace(fine, ptx=counting + wrong)) == ["floats are added atomically: sums depend on timing"]


def test_cuda_sources_have_no_atomic_operations() -> None:
    for path in (*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")):
        assert not re.search(r"atomic\w+\(|\b(red|atom)\.", path.read_text()), path.name
