"""The token that each seat drew last, kept on the device: the next step starts from it before the host has seen it."""

# T rows, N rows that draw, S seats

from __future__ import annotations

import torch
from torch import Tensor

from stencilpress.kernels.argmax.triton_argmax import best_tokens


class Feedback:
    """``idle`` is a seat beside the real ones, for rows that are nobody's."""

    def __init__(self, seats: int, device: torch.device) -> None:
        self.idle = seats
        self._last_S = torch.zeros(seats + 1, dtype=torch.int32, device=device)

    def known(self, tokens_T: Tensor, seats_T: Tensor) -> Tensor:
        """``tokens_T`` with what the rows' seats drew last where they are negative (:data:`~engine.plan.PENDING`).

        A draw that failed gives token 0: its request has ended, and what its row computes now goes nowhere.
        """
        last_T = self._last_S.index_select(0, seats_T)
        return torch.where(tokens_T < 0, last_T, tokens_T).clamp_(min=0)

    def keep(self, tokens_N: Tensor, seats_N: Tensor) -> None:
        """Remember what these seats drew, int32."""
        self._last_S.index_copy_(0, seats_N.long(), tokens_N)

    def draw_best(self, logits_NV: Tensor, seats_N: Tensor, tokens_N: Tensor) -> None:
        """Write the most likely tokens, :data:`~engine.plan.FAILED` where a logit too many is not finite; keep them."""
        best_tokens(logits_NV, seats_N, tokens_N, self._last_S)
