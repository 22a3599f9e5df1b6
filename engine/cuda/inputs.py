"""The way of a step's numbers to the device: a pinned buffer, one asynchronous copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stencilpress.kernels.attention.triton_prefill import rows_of_piece

Int32 = npt.NDArray[np.int32]
ALIGN_WORDS = 4
"""Every array starts on 16 bytes: kernels are compiled for that."""


class Inputs:
    """int32 words on the host and their twins on the device, at fixed addresses.

    A step writes from the start, array by array, and sends once. Steps take turns at two buffers on the host: when one
    writes, the device is done with the step before the last.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self._buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._arrays: list[Int32] = [buffer.numpy() for buffer in self._buffers]
        self.device_N = torch.zeros(words, dtype=torch.int32, device=device)
        self._used = 0

    def begin(self) -> None:
        """Start to write a step."""
        self._used = 0
        self._buffers.reverse()
        self._arrays.reverse()

    def again(self) -> None:
        """Start over in the same buffer: what was written and sent stays."""
        self._used = 0

    def reserve(self, words: int) -> tuple[Int32, Tensor]:
        """The next ``words`` words, on the host to write and on the device to read."""
        start = self._used
        self._used = aligned(start + words)
        return self._arrays[0][start : start + words], self.device_N[start : start + words]

    def put(self, array: Int32) -> Tensor:
        """Write an array of any shape; returns its twin."""
        host, device = self.reserve(array.size)
        host[:] = array.reshape(-1)
        return device.view(array.shape)

    def send(self) -> None:
        """Copy what was written, in the current stream's order."""
        self.device_N[: self._used].copy_(self._buffers[0][: self._used], non_blocking=True)


def aligned(words: int) -> int:
    """The next multiple of :data:`ALIGN_WORDS`."""
    return -(-words // ALIGN_WORDS) * ALIGN_WORDS


def most_words(*, tokens: int, seats: int, max_pages: int, max_rank: int, heads_per_kv_head: int) -> int:
    """What the largest step may take: its rows, page tables, pieces of prompts and work list."""
    tokens, seats = max(tokens, seats) + 64, max(seats, 64)
    pieces = tokens // rows_of_piece(heads_per_kv_head) + seats
    blocks = tokens + 128
    items = (blocks << (-(-max_rank // 16) - 1).bit_length()) + 16
    return 3 * tokens + 4 * seats + seats * (max_pages + 16) + 4 * pieces + 4 * blocks + 8 * items + 64 * ALIGN_WORDS
