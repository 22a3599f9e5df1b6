"""Reading a slice table on the host. Its layout is in the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
ENTRY_WORDS = 4
MAX_PROJECTIONS = 3


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Projections that read the same input. Their outputs stand side by side in y."""

    in_features: int
    out_features: tuple[int, ...]

    def columns(self, projection: int) -> slice:
        """The columns of a projection in y."""
        start = sum(self.out_features[:projection])
        return slice(start, start + self.out_features[projection])


@dataclass(frozen=True, slots=True)
class Entry:
    """What an adapter does to one (layer, group): ``scales[i]`` belongs to projection ``present[i]``.

    ``addresses`` (rank,) are the element offsets in the pool of its slices of ``slice_elems`` elements.
    """

    present: tuple[int, ...]
    scales: tuple[float, ...]
    slice_elems: int
    addresses: Words


def read_table(table: Words, layers: int, shapes: Sequence[GroupShape]) -> tuple[Entry | None, ...]:
    """All entries, ``[layer * len(shapes) + group]``; None where the adapter changes nothing."""
    count = layers * len(shapes)
    words = np.ascontiguousarray(table[: count * ENTRY_WORDS], dtype="<i8").reshape(count, ENTRY_WORDS)
    halves = words.view("<u4").reshape(count, 2 * ENTRY_WORDS)  # rank, mask, first (2), scale 0, 1, 2, slice_elems
    scales = halves[:, 4:7].copy().view("<f4")
    addresses = table[count * ENTRY_WORDS :]
    entries: list[Entry | None] = [None] * count
    for e in np.flatnonzero(halves[:, 0]).tolist():
        rank, mask, first = int(halves[e, 0]), int(halves[e, 1]), int(words[e, 1])
        present = tuple(p for p in range(MAX_PROJECTIONS) if mask >> p & 1)
        served = tuple(float(scales[e, p]) for p in present)
        entries[e] = Entry(present, served, int(halves[e, 7]), addresses[first : first + rank])
    return tuple(entries)
