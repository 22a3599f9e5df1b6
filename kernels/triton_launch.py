"""Launch options that every Triton kernel here shares.

Programmatic dependent launch (Hopper and later): a kernel starts while its predecessor still runs, loads
what no kernel of the step writes (weights, slice tables, work lists), and waits for the predecessor only
then. Every program of every kernel waits before it ends, so that a finished kernel implies that all its
predecessors are finished too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, on CPU tensors; its bf16 dots are wrong, so dots run in fp32 there."""


@cache
def _generation(device: torch.device) -> int:
    """Major compute capability; 0 of what is no GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def hopper(device: torch.device) -> bool:
    """Whether kernels may count on a Hopper GPU's tensor cores, shared memory and dependent launch."""
    return _generation(device) == 9


def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while its predecessor runs: on Hopper and later."""
    return _generation(device) >= 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments for a kernel that takes ``PDL``."""
    if dependent_launch(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def divide_up(number: int, by: int) -> int:
    """The quotient rounded up. Triton's own takes as long as a launch, on the host."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The next power of two at or above a positive number."""
    return 1 << (number - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a small number where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
