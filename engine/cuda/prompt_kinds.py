"""What tells one graph of steps with prompts from another, and which graphs may serve a step. Nothing here touches a
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from stencilpress.engine.cuda.graphs import RANKS, REACHES, item_factors
from stencilpress.engine.cuda.rows import StepRows
from stencilpress.engine.model.triton_llama import ALL_GROUPS, ATTENTION_GROUPS, covering_groups
from stencilpress.kernels.sgmv.triton_work import Tile, WorkPlan, apart, plan_work

LADDER = (64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1280, 1536, 2048)
"""Rows of graphs. A step of more keeps the device busy for longer than the host takes to launch it."""
FEW_LONG_DECODES = 16
"""Up to so many decodes are cut into runs, if they are long."""
MOST_PROMPTS = 32
BLOCK_ROWS, WIDE_RANKS = 64, 64
"""Of blocks of many rows: rows, and rank slices of an item where ranks are higher than a single row's."""
ITEMS = (32, 64, 128, 256, 384, 512, 768, 1024)
"""Room for items of single rows. In Triton programs without any cost time, the more so the more there are."""
BLOCKS = (15, 32, 64)
"""Room for blocks of many rows. Fewer than sixteen are cut finer, to fill the device."""
COVERING_ATTENTION = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
COVERING_ALL = (256, 512, 1024, 1536, 2048)
"""Rows of graphs that have room for more adapters than most steps have, by the groups that these change."""
IDLE_ROWS = 128
"""Steps that leave so many rows of a graph idle, 20 us each, are worth a graph of their own twice as soon."""


class Kind(NamedTuple):
    """Rows and decodes that a graph has room for, in how many runs the decodes' positions are cut; groups that
    adapters change, items of single rows, blocks of many rows, and items of a block (on average)."""

    rows: int
    decodes: int
    splits: int
    groups: int = 0
    items: int = 0
    blocks: int = 0
    factor: int = 1

    def covers(self, other: Kind) -> bool:
        """Whether what the other serves may be served by this one. Runs may be joined, but no shorter ones cut."""
        return (
            self.splits in (1, other.splits)
            and self.groups & other.groups == other.groups
            and self.rows >= other.rows
            and self.decodes >= other.decodes
            and self.items >= other.items
            and self.blocks >= other.blocks
            and self.factor >= other.factor
        )


class Plans(NamedTuple):
    """A step's work lists: adapters of many rows in blocks, those of few row by row."""

    many: WorkPlan | None
    few: WorkPlan | None


class Kinds:
    """The kinds of one engine. ``sequences`` bounds those of a step; ``splits`` says, of a number of decodes and the
    longest, in how many runs positions are cut; ``items_are_free``: room for items of single rows costs no time."""

    def __init__(
        self,
        *,
        sequences: int,
        max_tokens: int,
        max_rank: int,
        splits: Callable[[int, int], int],
        items_are_free: bool = False,
    ) -> None:
        self.sizes: Sequence[int] = [size for size in LADDER if size < max_tokens + LADDER[0]]
        self.tile = Tile(BLOCK_ROWS, WIDE_RANKS if max_rank > RANKS else RANKS)
        self.factors = item_factors(max_rank, WIDE_RANKS)
        self._sequences = sequences
        self._most_items = _at_least(ITEMS, sequences * -(-max_rank // RANKS)) or ITEMS[-1]
        # prompts of a few rows each may have more items than decodes: further rooms are for those steps
        self._items = tuple(n for n in ITEMS if n >= self._most_items) if items_are_free else ITEMS
        self._some_items = _at_least(self._items, sequences) or ITEMS[-1]
        self._splits = splits

    def plans(self, rows: StepRows) -> Plans:
        """Of a step's adapters."""
        many, few = apart(rows.adapters)
        return Plans(plan_work(many, self.tile) if many else None, plan_work(few, Tile(1, RANKS)) if few else None)

    def of(self, rows: StepRows, plans: Plans) -> Kind | None:
        """The kind that just has room for a step; None where there is too much of something."""
        decodes, sequences = len(rows.lengths_D), len(rows.pages_SP)
        size = _at_least(self.sizes, len(rows.tokens_T))
        if not size or sequences > self._sequences or sequences - decodes > MOST_PROMPTS:
            return None
        room, splits = self._room(size), 1
        if rows.longest > REACHES[0]:
            room = FEW_LONG_DECODES if decodes <= FEW_LONG_DECODES else room
            splits = self._splits(room, rows.longest)
        kind = Kind(size, room, splits)
        if plans.many is not None:
            blocks = _at_least(BLOCKS, len(plans.many.blocks_B4))
            factor = _at_least(self.factors, -(-len(plans.many.items_W4) // max(1, blocks)))
            if not blocks or not factor:
                return None
            kind = kind._replace(blocks=blocks, factor=factor)
        if plans.few is not None:
            items = _at_least(self._items, len(plans.few.items_W4))
            if not items:
                return None
            kind = kind._replace(items=items)
        if kind.blocks or kind.items:
            return kind._replace(groups=covering_groups(rows.groups))
        return kind

    def common(self) -> Iterator[Kind]:
        """What is captured before the engine serves, largest first: any step without adapters; few adapters of many
        rows each; and graphs with room for one item a sequence, and for any adapters."""
        most = BLOCKS[-1], self.factors[-1]
        for size in reversed(self.sizes):
            base = Kind(size, self._room(size), 1)
            yield base
            if size in COVERING_ATTENTION or size == self.sizes[-1]:
                yield base._replace(groups=ATTENTION_GROUPS, blocks=BLOCKS[0])
                for items in dict.fromkeys((self._some_items, self._most_items)):
                    yield Kind(*base[:3], ATTENTION_GROUPS, items, *most)
            if size in COVERING_ALL or size == self.sizes[-1]:
                yield Kind(*base[:3], ALL_GROUPS, self._most_items, *most)

    def possible(self) -> Iterator[Kind]:
        """Kinds whose kernels are those of all that may occur."""
        for blocks, factor, room in product(BLOCKS[:2], self.factors, (FEW_LONG_DECODES, self._sequences)):
            size = _at_least(self.sizes, room) or self.sizes[-1]
            yield Kind(size, min(size, room), 1, ALL_GROUPS, self._items[0], blocks, factor)

    def _room(self, size: int) -> int:
        return min(size, self._sequences)


def lacking(wanted: Kind, served: Kind) -> int:
    """What a step that another kind's graph has served counts for towards a graph of its own."""
    return 1 + (served.rows - wanted.rows) // IDLE_ROWS


def best(kinds: Sequence[Kind], wanted: Kind) -> Kind | None:
    """The kind that costs least of those that may serve ``wanted``."""
    return min((kind for kind in kinds if kind.covers(wanted)), default=None)


def _at_least(numbers: Sequence[int], least: int) -> int:
    """The first of ascending numbers that is large enough, 0 if none is."""
    return next((number for number in numbers if number >= least), 0)
