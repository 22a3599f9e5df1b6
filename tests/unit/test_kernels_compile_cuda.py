"""Kernels in CUDA C++ compile for Hopper without a GPU; which products they take, and where their sums travel."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.kernels.compile import CUDA_KERNELS, compile_cuda
from stencilpress.kernels.cuda_launch import CudaKernel, machine_code
from stencilpress.kernels.sgmv.cuda_sgmv import ROWS_KERNEL, RowsParameters, expand_suits, rows_serve, rows_suit
from stencilpress.kernels.sgmv.mailboxes import EMPTY, Mailboxes
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_work import SgmvWork, Tile

QKV, GATE_UP, OUT = GroupShape(4096, (4096, 1024, 1024)), GroupShape(4096, (14336, 14336)), GroupShape(4096, (4096,))
ROW = Tile(1, 16)


@pytest.fixture
def nvrtc() -> None:
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=lambda kernel: f"{kernel.name}-{dict(kernel.constants)}")
def test_kernel_compiles_without_spills(kernel: CudaKernel) -> None:
    registers, stack_bytes = compile_cuda(kernel)
    assert registers * kernel.threads <= 65536 // 2
    assert stack_bytes == 0


@pytest.mark.usefixtures("nvrtc")
def test_parameters_that_the_source_does_not_know_are_refused() -> None:
    wrong = (("PARAMETER_BYTES", ctypes.sizeof(RowsParameters) + 8),)
    with pytest.raises(RuntimeError, match="another structure"):
        machine_code(CudaKernel(ROWS_KERNEL.source, ROWS_KERNEL.name, ROWS_KERNEL.threads, wrong), (9, 0))


@pytest.mark.parametrize(
    ("shape", "blocks", "items", "suits"),
    [
        (OUT, 64, 64, True),
        (OUT, 64, 128, True),
        (QKV, 64, 64, True),
        (OUT, 16, 16, False),  # few programs: nothing to gain
        (OUT, 256, 256, False),  # many: bandwidth is all
        (GroupShape(14336, (4096,)), 32, 32, True),
        (GroupShape(14336, (4096,)), 64, 64, False),  # more shrinks than start together
        (QKV, 32, 64, False),  # several items a row, and many programs
        (GATE_UP, 32, 32, False),  # most would wait
        (QKV, 8, 50, False),  # many items a row
        (GroupShape(65536, (1024,)), 16, 16, False),  # more parts than a program has room for
    ],
)
def test_decodes_that_suit(shape: GroupShape, blocks: int, items: int, suits: bool) -> None:
    assert rows_suit(shape, ROW, blocks, items) is suits
    assert not rows_suit(shape, Tile(16, 16), blocks, items)


def test_prompts_that_suit() -> None:
    assert expand_suits(Tile(64, 64), 32, 32)
    assert expand_suits(Tile(64, 16), 32, 32)
    assert not expand_suits(Tile(64, 16), 32, 48)
    assert not expand_suits(Tile(64, 64), 8, 8)
    assert not expand_suits(Tile(16, 16), 32, 32)


def test_nothing_is_served_in_cuda_off_a_gpu() -> None:
    work = SgmvWork.allocate(ROW, 64, 64, 1, torch.device("cpu"))
    y, x = (torch.zeros(64, 4096, dtype=torch.bfloat16) for _ in range(2))
    assert rows_suit(OUT, work.tile, 64, 64)
    assert not rows_serve(y, x, work, OUT)


def test_mailboxes_keep_their_address_until_they_grow() -> None:
    mailboxes = Mailboxes(torch.device("cpu"))
    first = mailboxes.words(100)
    assert (first == EMPTY).all()
    assert mailboxes.words(40) is first
    larger = mailboxes.words(200)
    assert larger.data_ptr() != first.data_ptr()
    assert (larger == EMPTY).all()
    assert mailboxes.words(100) is larger
