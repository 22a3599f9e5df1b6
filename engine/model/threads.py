"""How many threads run each operation of a step on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WIDE_ROWS = 64
"""From so many rows on a step is wide."""
WIDE_WORK = 4 << 20
"""Weight elements times (1 + rows / 16) from which a product is worth all threads: about 0.25 ms of one core."""


class Threads:
    """A narrow step, a few decodes, runs on one thread but for its large products, a wide one on all.

    A second thread has to be woken and scheduled for each product, which takes as long as many a product; beside a
    busy neighbour, and the gateway is one, it takes far longer. Measured on two cores behind HTTP, SmolLM2-135M in
    bf16, 8 decodes over 4 adapters: 348 tokens a second this way; 290 to 303 with all threads for all products of a
    quiet machine, falling to 98 when another process wakes up.
    """

    def __init__(self) -> None:
        self._all = torch.get_num_threads()
        self._now = self._all

    def begin(self, rows: int) -> None:
        """Before each step."""
        self._use(self._all if rows >= WIDE_ROWS else 1)

    def product(self, work: int, op: Callable[..., Tensor], *args: object) -> Tensor:
        """Run one product of so much work."""
        others = self._now
        if work < WIDE_WORK or others == self._all:
            return op(*args)
        self._use(self._all)
        y = op(*args)
        self._use(others)
        return y

    def _use(self, count: int) -> None:
        if count != self._now:
            torch.set_num_threads(count)
            self._now = count
