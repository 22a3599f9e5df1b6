"""Memory in which the programs of one launch hand each other sums (``rows.cu``)."""

from __future__ import annotations

import torch

EMPTY = -1
"""What a word holds that no sum is in, as int32."""


class Mailboxes:
    """Words that are all EMPTY between launches: their readers leave them so. Serves one stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[torch.Tensor] = []  # a graph may hold the address of any

    def words(self, count: int) -> torch.Tensor:
        """At least so many int32 words, at one address as long as no more are asked for."""
        if not self._buffers or len(self._buffers[-1]) < count:
            self._buffers.append(torch.full((count,), EMPTY, dtype=torch.int32, device=self._device))
        return self._buffers[-1]
