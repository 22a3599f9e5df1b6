"""How many threads run each operation of a step on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stencilpress.engine.threads import Neighbours

WIDE_ROWS = 64
"""From so many rows on a step is wide."""
WIDE_WORK = 4 << 20
"""Weight elements times (1 + rows / 16) from which a product is worth all threads: about 0.25 ms of one core."""


class Threads:
    """While the cores are ours a step runs on all of them. Beside a busy neighbour a second thread has to be woken and
    scheduled for each operation, which takes as long as many an operation: then a narrow step, a few decodes, runs on
    one thread but for its large products. So does a narrow step with adapters always: its many small operations
    suffer from the gateway alone (150 tokens a second on two threads behind HTTP, 260 on one).

    Measured on two cores, SmolLM2-135M in bf16, 8 decodes (over 4 adapters): 17 (25) ms a step on two threads alone,
    66 (153) ms on two beside one busy process, 23 (31) ms on one thread with or without it.
    """

    def __init__(self, neighbours: Neighbours | None = None) -> None:
        self._all = torch.get_num_threads()
        self._now = self._all
        self._neighbours = neighbours or Neighbours()

    def begin(self, rows: int) -> None:
        """Before each step."""
        self._use(self._all if rows >= WIDE_ROWS or self._neighbours.quiet() else 1)

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
