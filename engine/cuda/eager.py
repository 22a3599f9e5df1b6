"""Any step, launched kernel by kernel: steps with prompts whose shapes no graph has (``prompt_graphs``)."""

# T rows, X hidden size, N rows that are drawn from, V vocabulary

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import Tensor

from stencilpress.engine.cuda.feedback import Feedback
from stencilpress.engine.cuda.inputs import Inputs
from stencilpress.engine.cuda.rows import StepRows
from stencilpress.engine.model.triton_llama import ALL_GROUPS, Adapted, DeviceRows, TritonDecoder
from stencilpress.kernels.attention.triton_decode import choose_splits
from stencilpress.kernels.sgmv.triton_work import AdapterRows, SgmvWork, Tile, apart, choose_tile, list_words, plan_work

PAGE_STEP = 16
"""Widths of page tables are multiples of this: kernels are compiled for strides that are."""
TILES = (Tile(1, 16), Tile(16, 16), Tile(64, 16), Tile(64, 64))
"""What :func:`choose_tile` may give."""
WARM_ROWS = 64
"""More than those for which our own products are faster, which come before other kernels."""


class EagerSteps:
    """Runs any step. Nothing here waits for the device."""

    def __init__(self, decoder: TritonDecoder, inputs: Inputs, feedback: Feedback) -> None:
        self._decoder = decoder
        self._inputs = inputs
        self._feedback = feedback

    def every_logit(self, rows: StepRows) -> Tensor:
        """Logits of all rows (T, V)."""
        return self._decoder.logits(*self._decoder.forward(self._sent(rows)[0]))

    def logits(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Logits of the rows that draw (N, V), in the order of ``rows.draws``, and their seats (N,) on the device."""
        target, draw_rows, draw_seats = self._sent(rows)
        return drawn_logits(self._decoder, *self._decoder.forward(target), draw_rows), draw_seats

    def warm(self) -> None:
        """Compile what :meth:`logits` launches, by steps that change nothing."""
        idle = np.zeros(WARM_ROWS, dtype=np.int32)
        for tile, (blocks, factor) in product(TILES, ((8, 1), (8, 2), (16, 1), (16, 2), (128, 1))):
            self._inputs.begin()
            decodes = 8 * (blocks % 16 == 0)  # also none
            tokens, positions, lengths = (self._inputs.put(values) for values in (idle, idle, idle[:decodes]))
            slots, pages = self._inputs.put(idle - np.int32(1)), self._inputs.put(idle[:PAGE_STEP].reshape(1, -1))
            pieces, list_N = self._inputs.put(idle[:4].reshape(1, 4)), self._list(blocks, factor * blocks)
            self._inputs.send()
            work = SgmvWork.over(list_N, tile, blocks, factor * blocks, self._decoder.entries)
            adapted = Adapted((work,), ALL_GROUPS)
            rows = DeviceRows(tokens, positions, slots, lengths, pages.expand(8, -1), 1, pieces, adapted)
            x_TX, residual_TX = self._decoder.forward(rows)
            self._decoder.logits(x_TX, residual_TX)
            torch.cuda.current_stream().synchronize()  # the inputs' buffers are written again

    def largest(self, tokens: int, draws: int, adapters: int, max_rank: int) -> Tensor:
        """Logits (draws, V) of a step of so many rows that changes nothing, with as much scratch as any step takes."""
        device = self._inputs.device_N.device
        zeros_T, zeros_N = (torch.zeros(count, dtype=torch.int32, device=device) for count in (tokens, draws))
        blocks = 8 * adapters
        items = blocks * -(-max_rank // 16)
        list_N = torch.zeros(list_words(blocks, items), dtype=torch.int32, device=device)
        work = SgmvWork.over(list_N, Tile(64, 16), blocks, items, self._decoder.entries)
        rows = DeviceRows(
            zeros_T, zeros_T, zeros_T - 1, zeros_T[:0], zeros_T.view(-1, 1), 1, None, Adapted((work,), ALL_GROUPS)
        )
        return drawn_logits(self._decoder, *self._decoder.forward(rows), zeros_N)

    def _list(self, blocks: int, items: int) -> Tensor:
        host, device = self._inputs.reserve(list_words(blocks, items))
        host[:] = 0
        return device

    def _sent(self, rows: StepRows) -> tuple[DeviceRows, Tensor, Tensor]:
        """The step on the device, the rows that draw, and their seats."""
        inputs = self._inputs
        inputs.begin()
        pages_SP = np.zeros((len(rows.pages_SP), _up(rows.pages_SP.shape[1], PAGE_STEP)), dtype=np.int32)
        pages_SP[:, : rows.pages_SP.shape[1]] = rows.pages_SP
        arrays = (rows.tokens_T, rows.positions_T, rows.slots_T, rows.lengths_D, pages_SP, rows.pieces_N4)
        tokens, positions, slots, lengths, pages, pieces = map(inputs.put, arrays)
        seats, draw_rows, draw_seats = map(inputs.put, (rows.seats_D, rows.draw_rows, rows.draw_seats))
        adapted = self._adapted(rows) if rows.adapters else None
        inputs.send()
        splits = 1
        if len(seats):
            tokens[: len(seats)] = self._feedback.known(tokens[: len(seats)], seats)
            splits = choose_splits(len(rows.lengths_D), self._decoder.kv.kv_heads, rows.longest, pages.device)
        some = pieces if len(rows.pieces_N4) else None
        return DeviceRows(tokens, positions, slots, lengths, pages, splits, some, adapted), draw_rows, draw_seats

    def _adapted(self, rows: StepRows) -> Adapted:
        return Adapted(tuple(self._work(part) for part in apart(rows.adapters) if part), rows.groups)

    def _work(self, segments: list[AdapterRows]) -> SgmvWork:
        plan = plan_work(segments, choose_tile(segments))
        blocks, items = (_capacity(plan.tile, len(part)) for part in (plan.blocks_B4, plan.items_W4))
        host, list_N = self._inputs.reserve(list_words(blocks, items))
        work = SgmvWork.over(list_N, plan.tile, blocks, items, self._decoder.entries)
        work.pack(plan, host)
        return work


def drawn_logits(decoder: TritonDecoder, x_TX: Tensor, residual_TX: Tensor, rows_N: Tensor) -> Tensor:
    """Logits (N, V) of some rows of a forward's results."""
    if not len(rows_N):
        return x_TX.new_empty(0, decoder.spec.vocab_size)
    return decoder.logits(x_TX.index_select(0, rows_N), residual_TX.index_select(0, rows_N))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _capacity(tile: Tile, count: int) -> int:
    """Few capacities, since kernels are compiled for a size's divisors; those of fewer than 16 blocks are apart."""
    return 8 if count <= 8 and tile.rows > 1 else _up(count, 16)
