"""Steps with prompts in them as CUDA graphs: launched kernel by kernel, they keep the host busy for longer than the
device.

Rows of a graph that a step does not use are nobody's, as in ``graphs``, and so are decodes, pieces of prompts and items
of work lists: a graph has room for a number of each (``prompt_kinds``), what a step has of them is data. A step whose
own kind has no graph is served by one that has more room; when that has cost what a capture costs, it gets its own.
"""

# T rows, D decodes, N rows that are drawn from, X hidden size, V vocabulary, S sequences, P pages

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stencilpress.engine.cuda.eager import drawn_logits
from stencilpress.engine.cuda.feedback import Feedback
from stencilpress.engine.cuda.graphs import RANKS, REACHES, captured
from stencilpress.engine.cuda.inputs import Inputs, Int32
from stencilpress.engine.cuda.products import Products
from stencilpress.engine.cuda.prompt_kinds import (
    BLOCKS,
    ITEMS,
    LADDER,
    MOST_PROMPTS,
    Kind,
    Kinds,
    Plans,
    best,
    lacking,
)
from stencilpress.engine.cuda.rows import StepRows
from stencilpress.engine.limits import Limits
from stencilpress.engine.model.triton_llama import Adapted, DeviceRows, TritonDecoder
from stencilpress.kernels.attention.triton_decode import choose_splits
from stencilpress.kernels.attention.triton_prefill import rows_of_piece
from stencilpress.kernels.compile_ahead import compiling_only
from stencilpress.kernels.sgmv.cuda_sgmv import room_is_free
from stencilpress.kernels.sgmv.triton_work import SgmvWork, Tile, list_words

CAPTURED_AT = 8
"""A kind without a graph gets one when it has occurred so often, less often if many rows were idle meanwhile: a capture
costs about as much as four steps, or 1,100 idle rows."""
CAPTURES_APART = 16
"""Steps between two captures, each of which holds the others up."""
MOST_GRAPHS = 128
"""What the driver keeps for graphs is memory beside the pool."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the numbers of a kind of step lie: each array on the host and on the device."""

    tokens_T: tuple[Int32, Tensor]
    positions_T: tuple[Int32, Tensor]
    slots_T: tuple[Int32, Tensor]
    lengths_D: tuple[Int32, Tensor]
    seats_D: tuple[Int32, Tensor]
    pieces: tuple[Int32, Tensor]
    many: tuple[Int32, SgmvWork] | None
    few: tuple[Int32, SgmvWork] | None

    @property
    def works(self) -> tuple[SgmvWork, ...]:
        return tuple(place[1] for place in (self.many, self.few) if place is not None)


class PromptGraphs:
    """Runs steps of up to ``LADDER[-1]`` rows that have prompts. ``memory`` is the decode graphs' own."""

    def __init__(
        self,
        decoder: TritonDecoder,
        inputs: Inputs,
        feedback: Feedback,
        products: Products,
        memory: Any,
        limits: Limits,
        *,
        max_rank: int,
    ) -> None:
        device = inputs.device_N.device
        sequences, max_pages = max(limits.seats, LADDER[0]), limits.pages_for(limits.max_model_len)
        self._decoder = decoder
        self._one_layer = decoder.first_layer()
        self._inputs = inputs
        self._feedback = feedback
        self._products = products
        self._memory = memory
        self._reaches = (*(reach for reach in REACHES if reach < limits.max_model_len), limits.max_model_len)
        self._kinds = Kinds(
            sequences=sequences,
            max_tokens=limits.max_num_batched_tokens,
            max_rank=max_rank,
            splits=self._splits,
            items_are_free=room_is_free(decoder.pool, decoder.shapes, Tile(1, RANKS), ITEMS[-1], ITEMS[-1]),
        )
        self._piece_rows = rows_of_piece(decoder.spec.num_heads // decoder.spec.num_kv_heads)
        self._tables_SP = torch.zeros(sequences, max_pages, dtype=torch.int32, device=device)
        shape = self._kinds.sizes[-1], decoder.spec.hidden_size
        self._x_TX, self._residual_TX = (torch.zeros(shape, dtype=decoder.pool.dtype, device=device) for _ in range(2))
        most = BLOCKS[-1], BLOCKS[-1] * self._kinds.factors[-1]
        self._many = SgmvWork.allocate(self._kinds.tile, *most, decoder.entries, device)
        self._few = SgmvWork.allocate(Tile(1, RANKS), ITEMS[-1], ITEMS[-1], decoder.entries, device)
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._missed: Counter[Kind] = Counter()
        self._since_capture = 0

    def logits(self, rows: StepRows) -> tuple[Tensor, Tensor] | None:
        """As :meth:`EagerSteps.logits`; None where no graph has room for the step, and nothing was done."""
        plans = self._kinds.plans(rows)
        wanted = self._kinds.of(rows, plans)
        if wanted is None:
            return None
        kind = wanted if self._memory is None else self._serving(wanted)
        return None if kind is None else self._run(rows, plans, kind)

    def compile(self) -> None:
        """Compile what no other step launches."""
        with compiling_only():
            for kind in self._kinds.possible():
                self._launch_one_layer(kind)

    def warm(self) -> None:
        """Load what any step may need, and capture what most do."""
        self._kinds.sizes = self._products.worthwhile(self._kinds.sizes)
        for kind in self._kinds.possible():
            self._launch_one_layer(kind)
        for kind in self._kinds.common():
            self._capture(kind)

    def rehearse(self) -> int:
        """Capture the largest graphs, for the memory that it takes. Returns how many there may be."""
        for kind in self._kinds.common():
            if kind.rows == self._kinds.sizes[-1]:
                self._capture(kind)
        return MOST_GRAPHS

    def _splits(self, decodes: int, longest: int) -> int:
        reach = next(reach for reach in self._reaches if reach >= longest)
        return choose_splits(decodes, self._decoder.kv.kv_heads, reach, self._inputs.device_N.device)

    def _run(self, rows: StepRows, plans: Plans, kind: Kind) -> tuple[Tensor, Tensor]:
        self._inputs.begin()
        places = self._places(kind)
        draw_rows, draw_seats = self._send(rows, plans, places)
        if kind in self._graphs:
            self._graphs[kind].replay()
        else:
            self._compute(kind, places, self._decoder)
        x_TX, residual_TX = self._x_TX[: kind.rows], self._residual_TX[: kind.rows]
        return drawn_logits(self._decoder, x_TX, residual_TX, draw_rows), draw_seats

    def _serving(self, wanted: Kind) -> Kind | None:
        """The kind whose graph serves a step. One that keeps coming, or wastes much of another's, gets its own."""
        self._since_capture += 1
        if wanted in self._graphs:
            return wanted
        found = best(list(self._graphs), wanted)
        self._missed[wanted] += 1 if found is None else lacking(wanted, found)
        often = self._missed[wanted] >= CAPTURED_AT and self._since_capture >= CAPTURES_APART
        if not often or len(self._graphs) >= MOST_GRAPHS:
            return found
        self._capture(wanted)
        self._since_capture = 0
        return wanted

    # A step's numbers

    def _places(self, kind: Kind) -> _Places:
        """Reserve what a step of a kind writes; its arrays lie where they lay the last time."""
        inputs = self._inputs
        tokens, positions, slots = (inputs.reserve(kind.rows) for _ in range(3))
        lengths, seats = (inputs.reserve(kind.decodes) for _ in range(2))
        pieces = inputs.reserve(4 * (kind.rows // self._piece_rows + MOST_PROMPTS))
        many = few = None
        if kind.blocks:
            items = kind.factor * kind.blocks
            host, list_N = inputs.reserve(list_words(kind.blocks, items))
            many = host, self._many.within(list_N, self._kinds.tile, kind.blocks, items)
        if kind.items:
            host, list_N = inputs.reserve(list_words(kind.items, kind.items))
            few = host, self._few.within(list_N, Tile(1, RANKS), kind.items, kind.items)
        return _Places(tokens, positions, slots, lengths, seats, pieces, many, few)

    def _send(self, rows: StepRows, plans: Plans, places: _Places) -> tuple[Tensor, Tensor]:
        """Give a step's numbers to the device; the rows that draw, and their seats."""
        for (host, _), values, idle in (
            (places.tokens_T, rows.tokens_T, 0),
            (places.positions_T, rows.positions_T, 0),
            (places.slots_T, rows.slots_T, -1),
            (places.lengths_D, rows.lengths_D, 0),
            (places.seats_D, rows.seats_D, self._feedback.idle),
            (places.pieces, rows.pieces_N4.reshape(-1), 0),
        ):
            host[: len(values)] = values
            host[len(values) :] = idle
        for place, plan in ((places.many, plans.many), (places.few, plans.few)):
            if place is None:
                continue
            if plan is None:
                place[0][:] = 0
            else:
                place[1].pack(plan, place[0])
        draw_rows, draw_seats, pages_SP = map(self._inputs.put, (rows.draw_rows, rows.draw_seats, rows.pages_SP))
        self._inputs.send()
        self._tables_SP[: len(pages_SP), : pages_SP.shape[1]].copy_(pages_SP)
        return draw_rows, draw_seats

    # Graphs

    def _launch_one_layer(self, kind: Kind) -> _Places:
        """All kernels of a kind, in order on the current stream, on inputs that change nothing."""
        self._inputs.again()
        places = self._places(kind)
        self._inputs.device_N.zero_()
        places.slots_T[1].fill_(-1)
        places.seats_D[1].fill_(self._feedback.idle)
        self._compute(kind, places, self._one_layer)
        return places

    def _capture(self, kind: Kind) -> None:
        """Record the graph. Nothing may compile meanwhile: its kernels are launched before."""
        places = self._launch_one_layer(kind)
        with self._products.fastest(kind.rows):
            self._graphs[kind] = captured(self._memory, lambda: self._compute(kind, places, self._decoder))

    def _compute(self, kind: Kind, places: _Places, decoder: TritonDecoder) -> None:
        tokens_T, seats_D = places.tokens_T[1], places.seats_D[1]
        tokens_T[: kind.decodes] = self._feedback.known(tokens_T[: kind.decodes], seats_D)
        rows = DeviceRows(
            tokens_T,
            places.positions_T[1],
            places.slots_T[1],
            places.lengths_D[1],
            self._tables_SP,
            kind.splits,
            places.pieces[1].view(-1, 4),
            Adapted(places.works, kind.groups) if places.works else None,
        )
        x_TX, residual_TX = decoder.forward(rows)
        self._x_TX[: kind.rows].copy_(x_TX)
        self._residual_TX[: kind.rows].copy_(residual_TX)
