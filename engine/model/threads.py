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
QUIET_WORK = 1 << 20
"""The same while no other process wants the cores."""


class Threads:
    """A narrow step, a few decodes, runs on one thread but for its large products, a wide one on all.

    A second thread has to be woken and scheduled for each product, which takes as long as many a product, and far
    longer beside a busy neighbour. Measured on two cores behind HTTP, SmolLM2-135M in bf16, 8 decodes (over 4
    adapters), tokens a second: from QUIET_WORK on 381 (341) alone and 229 (199) beside one busy process, from
    WIDE_WORK on 355 (320) and 324 (259). All threads for every product fell to 98 when another process woke up.
    """

    def __init__(self, neighbours: Neighbours | None = None) -> None:
        self._all = torch.get_num_threads()
        self._now = self._all
        self._neighbours = neighbours or Neighbours()
        self._large = WIDE_WORK

    def begin(self, rows: int) -> None:
        """Before each step."""
        self._use(self._all if rows >= WIDE_ROWS else 1)
        self._large = QUIET_WORK if self._neighbours.quiet() else WIDE_WORK

    def product(self, work: int, op: Callable[..., Tensor], *args: object) -> Tensor:
        """Run one product of so much work."""
        others = self._now
        if work < self._large or others == self._all:
            return op(*args)
        self._use(self._all)
        y = op(*args)
        self._use(others)
        return y

    def _use(self, count: int) -> None:
        if count != self._now:
            torch.set_num_threads(count)
            self._now = count
