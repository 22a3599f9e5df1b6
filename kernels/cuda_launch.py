"""Kernels in CUDA C++: compiled by NVRTC when first needed, launched as programmatic dependents like those in Triton.

Both NVRTC and the bindings to it and to the driver come with a CUDA build of torch. Where they are missing, or a kernel
does not compile, :func:`available` says so once in the log, and the callers' Triton kernels serve instead.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stencilpress.kernels.compile_ahead import only_compiling
from stencilpress.kernels.triton_launch import multiprocessors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """The function ``name`` of a source file, with macros defined as ``constants`` say. Its only parameter is a
    structure; a program has ``threads`` threads and, beside what the source declares, ``shared_bytes``."""

    source: Path
    name: str
    threads: int
    constants: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0


def machine_code(kernel: CudaKernel, capability: tuple[int, int]) -> bytes:
    """A cubin. Raises RuntimeError with the compiler's log where the source does not compile, ImportError without
    NVRTC or the bindings to it."""
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise ImportError(f"no NVRTC: {error}") from error
    source = kernel.source.read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(source, kernel.source.name.encode(), 0, [], []))
    defines = [f"-D{name}={value}" for name, value in kernel.constants]
    options = ["-std=c++17", f"-arch=sm_{capability[0]}{capability[1]}", f"-I{kernel.source.parent}", *defines]
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(result):
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{kernel.source.name}: {log.decode()}")
        code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def _checked(answer: Sequence[Any]) -> Any:
    if int(answer[0]):
        raise RuntimeError(f"CUDA: {answer[0]}")
    return answer[1] if len(answer) > 1 else None


@cache
def _function(kernel: CudaKernel, device: torch.device) -> Any:
    """The loaded function; None where it cannot be."""
    try:
        from cuda.bindings import driver

        with torch.cuda.device(device):
            code = machine_code(kernel, torch.cuda.get_device_capability(device))
            module = _checked(driver.cuModuleLoadData(code))
            function = _checked(driver.cuModuleGetFunction(module, kernel.name.encode()))
            most_shared = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, most_shared, kernel.shared_bytes))
            return function
    except (ImportError, RuntimeError) as error:
        _log.warning("the CUDA kernel %s is not available, Triton serves: %s", kernel.name, error)
        return None


def available(kernel: CudaKernel, device: torch.device) -> bool:
    """Whether it can be launched, which compiles it; the device must be a Hopper GPU or later."""
    return _function(kernel, device) is not None


@cache
def resident(kernel: CudaKernel, device: torch.device) -> int:
    """How many programs of an :func:`available` kernel a device holds at once."""
    from cuda.bindings import driver

    function = _function(kernel, device)
    with torch.cuda.device(device):
        each = _checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, kernel.threads, kernel.shared_bytes)
        )
    return int(each) * multiprocessors(device)


@cache
def shared_by_processes(device: torch.device) -> bool:
    """Whether programs of other processes may run on a GPU at the same time (NVIDIA MPS): then a launch of
    :func:`resident` programs may find less room, and ones that wait for each other wait for ever."""
    try:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        ordinal = _checked(driver.cuDeviceGet(torch.cuda.current_device() if device.index is None else device.index))
        return bool(_checked(driver.cuDeviceGetAttribute(attribute, ordinal)))
    except (ImportError, AttributeError, RuntimeError):  # a driver or bindings from before it could be asked
        return "CUDA_MPS_PIPE_DIRECTORY" in os.environ


@cache
def _attributes() -> list[Any]:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return [attribute]


def launch(kernel: CudaKernel, programs: int, parameters: ctypes.Structure, device: torch.device) -> None:
    """Launch an :func:`available` kernel on the current stream. Raises RuntimeError if the driver refuses."""
    if only_compiling():
        return
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    config.attrs, config.numAttrs = _attributes(), 1
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
    _checked(driver.cuLaunchKernelEx(config, _function(kernel, device), ctypes.addressof(pointers), 0))
