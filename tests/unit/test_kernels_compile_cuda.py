"""Kernels in CUDA C++ compile for Hopper without a GPU; which products they take, and where their sums travel."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")

from stencilpress.kernels.compile import CUDA_KERNELS, compile_cuda
from stencilpress.kernels.cuda_launch import CudaKernel, machine_code, shared_by_processes
from stencilpress.kernels.sgmv.cuda_sgmv import ROWS_KERNEL, RowsParameters, expand_suits, rows_serve, rows_suit
from stencilpress.kernels.sgmv.mailboxes import EMPTY, Mailboxes
from stencilpress.kernels.sgmv.table import GroupShape
from stencilpress.kernels.sgmv.triton_work import SgmvWork, Tile

OUT = GroupShape(4096, (4096,))
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
    ("blocks", "items", "suits"),
    [
        (1, 1, True),
        (64, 128, True),
        (256, 1024, True),
        (16, 32, False),  # too few rows to take their items one after the other
        (64, 512, False),  # too many items a row
        (384, 384, True),
    ],
)
def test_decodes_that_suit(blocks: int, items: int, *, suits: bool) -> None:
    assert rows_suit(ROW, blocks, items) is suits
    assert not rows_suit(Tile(16, 16), blocks, items)


def test_prompts_that_suit() -> None:
    assert expand_suits(Tile(64, 64), 32, 32)
    assert expand_suits(Tile(64, 16), 32, 32)
    assert not expand_suits(Tile(64, 16), 32, 48)
    assert not expand_suits(Tile(64, 64), 8, 8)
    assert not expand_suits(Tile(16, 16), 32, 32)


def test_nothing_is_served_in_cuda_off_a_gpu() -> None:
    work = SgmvWork.allocate(ROW, 64, 64, 1, torch.device("cpu"))
    y, x = (torch.zeros(64, 4096, dtype=torch.bfloat16) for _ in range(2))
    assert rows_suit(work.tile, 64, 64)
    assert not rows_serve(y, x, work, OUT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver says it")
def test_without_an_answer_the_environment_says_whether_processes_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for pipe, shared in ((None, False), ("/tmp/nvidia-mps", True)):  # noqa: S108
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
        if pipe:
            monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", pipe)
        shared_by_processes.cache_clear()
        assert shared_by_processes(torch.device("cuda", 0)) is shared
    shared_by_processes.cache_clear()


def test_mailboxes_keep_their_address_until_they_grow() -> None:
    mailboxes = Mailboxes(torch.device("cpu"))
    first = mailboxes.words(100)
    assert (first == EMPTY).all()
    assert mailboxes.words(40) is first
    larger = mailboxes.words(200)
    assert larger.data_ptr() != first.data_ptr()
    assert (larger == EMPTY).all()
    assert mailboxes.words(100) is larger
