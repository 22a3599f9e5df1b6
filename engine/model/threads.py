"""How many threads run each operation of a step on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WIDE_ROWS = 64
WIDE_POSITIONS = 8192
"""From so many rows, or positions attended by decodes, on a step is wide."""
WIDE_WORK = 4 << 20
"""Weight elements times (1 + rows / 16) from which a product is worth all threads: about 0.25 ms of one core."""


class Threads:
    """A second thread has to be woken, which takes as long as many an operation: 10 to 60 us with passive waiting
    (spinning is faster until a neighbour wants the core, then several times slower). So a narrow step, a few
    decodes, runs on one thread but for its large products, and a wide one on all of them.

    Measured on two cores, SmolLM2-135M in bf16, 8 decodes over 4 adapters: 31 ms a step; with two threads for all
    operations 45 ms passive, 29 ms spinning on an idle machine, over 60 ms spinning beside one busy process.
    """

    def __init__(self) -> None:
        self._all = torch.get_num_threads()
        self._now = self._all

    def begin(self, rows: int, positions: int) -> None:
        """Before each step."""
        self._use(self._all if rows >= WIDE_ROWS or positions >= WIDE_POSITIONS else 1)

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
