"""Drawing the next token of each row from its logits.

A draw depends on the row's logits, its parameters and ``(seed, position)``, on nothing else in the batch: a hash of
the two gives one uniform number, which is looked up in the cumulative distribution of the tokens sorted by
probability, ties by id. All filters keep a prefix of that order. The order of operations: logit bias, repetition,
frequency and presence penalties, temperature, top-k, top-p over what top-k left, min-p.
"""

# N rows, V vocabulary, W candidates

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stencilpress.engine.messages import Sampling
from stencilpress.engine.plan import FAILED, Draw, RequestKey, Sampled

WINDOW = 256
"""Candidates sorted at first. The whole vocabulary is sorted only for rows that turn out to need more."""
GREEDY_BELOW = 1e-5
"""A lower temperature is zero: scores divided by it would not fit fp32."""
_MASK = (1 << 64) - 1


def sample(logits_NV: Tensor, keys: Sequence[RequestKey], draws: Sequence[Draw]) -> list[Sampled]:
    """One token per row, and what goes with it. An accelerator is waited for once."""
    return draw(logits_NV, keys, draws).read()


def draw(logits_NV: Tensor, keys: Sequence[RequestKey], draws: Sequence[Draw]) -> Drawn:
    """Draw one token per row, in order on an accelerator's current stream; nothing here waits for it.

    ``logits_NV`` has the served dtype and is not changed. A row whose logits hold NaN or +inf, or nothing but -inf,
    gets :data:`FAILED`; the others do not notice.
    """
    best_N, tokens_N = logits_NV.max(-1)
    sound_N = torch.isfinite(best_N)
    altered = [n for n, draw in enumerate(draws) if not _takes_best(draw.sampling)]
    if altered:
        rows_A = upload(np.array(altered), logits_NV.device)
        scores_AV = logits_NV.index_select(0, rows_A).float()
        filters = _altered(scores_AV, [draws[n] for n in altered])
        drawn_A, settled_A = _pick(scores_AV, filters, WINDOW)
        settled_A |= ~sound_N.index_select(0, rows_A)
        tokens_N = tokens_N.index_copy(0, rows_A, _widened(scores_AV, filters, settled_A, drawn_A))
    logprobs = _Logprobs(logits_NV, [n for n, draw in enumerate(draws) if draw.sampling.logprobs >= 0], draws)
    return Drawn(keys, tokens_N, sound_N, logprobs)


class Drawn:
    """What a step draws. ``tokens_N`` (int32) is on the device, where the next step may start from it."""

    def __init__(self, keys: Sequence[RequestKey], tokens_N: Tensor, sound_N: Tensor, logprobs: _Logprobs) -> None:
        self.tokens_N = torch.where(sound_N, tokens_N, FAILED).int()
        self._keys = keys
        self._logprobs = logprobs
        parts = [self.tokens_N, *logprobs.of(tokens_N)]
        self._sizes = [part.numel() for part in parts]
        numbers = torch.cat([part.double().flatten() for part in parts])  # fp64 holds every one of them exactly
        self._numbers, self._arrived = _download(numbers)

    def read(self) -> list[Sampled]:
        """Wait for the numbers; one answer per row."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, *ranks = (part.tolist() for part in torch.split(self._numbers, self._sizes))
        ranked = self._logprobs.by_row(*ranks) if ranks else {}
        return [
            Sampled(key, int(token), *ranked.get(n, (None, ()))) if token != FAILED else Sampled(key, FAILED)
            for n, (key, token) in enumerate(zip(self._keys, tokens, strict=True))
        ]


_Ranked = dict[int, tuple[float, tuple[tuple[int, float], ...]]]


def _download(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Numbers on their way to the host, and the event of their arrival."""
    if not numbers.is_cuda:
        return numbers, None
    here = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    here.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return here, arrived


def _widened(scores_AV: Tensor, filters: _Filters, settled_A: Tensor, drawn_A: Tensor) -> Tensor:
    """The tokens, those of rows that are not settled drawn from the whole vocabulary."""
    if scores_AV.is_cuda:
        from stencilpress.kernels.draw.triton_wide import draw_wide  # Triton is there on machines with a GPU only

        keep_A, top_p_A, min_p_A, uniform_A = filters.columns()
        draw_wide(scores_AV, scores_AV.logsumexp(-1), settled_A, keep_A, top_p_A, min_p_A, uniform_A, drawn_A)
        return drawn_A
    unsettled = (~settled_A).nonzero()[:, 0]
    if len(unsettled):
        wide, _ = _pick(scores_AV[unsettled], filters.rows(unsettled), scores_AV.shape[1])
        return drawn_A.index_copy(0, unsettled, wide)
    return drawn_A


def only_best(draws: Sequence[Draw]) -> bool:
    """Whether every row's token is simply its most likely one, and nobody asks for logprobs."""
    return all(draw.sampling.logprobs < 0 and _takes_best(draw.sampling) for draw in draws)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) of output ``position`` under ``seed``: splitmix64's finaliser (Steele et al. 2014) twice."""
    return (_mix(_mix(seed & _MASK) + position & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = z + 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


def _takes_best(sampling: Sampling) -> bool:
    """Whether the token is simply the most likely one."""
    return sampling.temperature < GREEDY_BELOW and not sampling.logit_bias and not sampling.heeds_history


# Altered scores


def _altered(scores_NV: Tensor, draws: Sequence[Draw]) -> _Filters:
    """Overwrite the scores (fp32) of rows that are not plainly greedy up to the temperature; the filters remain."""
    _add(scores_NV, [(list(draw.sampling.logit_bias), list(draw.sampling.logit_bias.values())) for draw in draws])
    _repeat(scores_NV, draws)
    _add(scores_NV, [_of_output(draw) for draw in draws])
    filters = _Filters.of(draws, scores_NV)
    scores_NV.sub_(scores_NV.amax(-1, keepdim=True)).div_(filters.temperature)
    return filters


def _repeat(scores_NV: Tensor, draws: Sequence[Draw]) -> None:
    """Repetition penalty, over prompt and output (arXiv 1909.05858)."""
    penalties = [draw.sampling.repetition_penalty for draw in draws]
    seen = [np.unique(draw.history) if p != 1 else _NONE for draw, p in zip(draws, penalties, strict=True)]
    counts = [len(ids) for ids in seen]
    if not sum(counts):
        return
    device = scores_NV.device
    rows, ids = upload(np.repeat(np.arange(len(draws)), counts), device), upload(np.concatenate(seen), device)
    penalty = upload(np.repeat(np.array(penalties, dtype=np.float32), counts), device)
    score = scores_NV[rows, ids]
    scores_NV[rows, ids] = torch.where(score > 0, score / penalty, score * penalty)


def _of_output(draw: Draw) -> tuple[Sequence[int], Sequence[float]]:
    """Frequency and presence penalties, over the output (OpenAI's API)."""
    sampling = draw.sampling
    if not (sampling.frequency_penalty or sampling.presence_penalty):
        return (), ()
    ids, counts = np.unique(np.array(draw.history[draw.prompt_len :], dtype=np.int64), return_counts=True)
    return ids.tolist(), (-sampling.frequency_penalty * counts - sampling.presence_penalty).tolist()


def _add(scores_NV: Tensor, terms: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
    """Add numbers to some tokens of each row; none twice."""
    counts = [len(ids) for ids, _ in terms]
    if not sum(counts):
        return
    device = scores_NV.device
    rows = upload(np.repeat(np.arange(len(terms)), counts), device)
    ids = upload(np.array([token for ids, _ in terms for token in ids]), device)
    values = upload(np.array([value for _, values in terms for value in values], dtype=np.float32), device)
    scores_NV[rows, ids] += values


_NONE = np.empty(0, dtype=np.int64)


def upload(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Without waiting for an accelerator."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


# The draw


@dataclass(frozen=True, slots=True)
class _Filters:
    """Per row, (N, 1): ``keep`` is top-k (greedy 1, off V), ``uniform`` fp64 the number to look up."""

    temperature: Tensor
    keep: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, draws: Sequence[Draw], scores_NV: Tensor) -> _Filters:
        size = scores_NV.shape[1]
        fields = [
            (
                max(draw.sampling.temperature, GREEDY_BELOW),
                1 if draw.sampling.temperature < GREEDY_BELOW else min(draw.sampling.top_k or size, size),
                draw.sampling.top_p,
                draw.sampling.min_p,
                uniform(draw.sampling.seed, draw.position),
            )
            for draw in draws
        ]
        temperature, keep, top_p, min_p, number = upload(np.array(fields), scores_NV.device).T.unsqueeze(-1)
        return cls(temperature.float(), keep.long(), top_p, min_p, number)

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``keep``, ``top_p``, ``min_p`` and ``uniform`` (N,), each packed."""
        numbers = (self.keep, self.top_p, self.min_p, self.uniform)
        keep, top_p, min_p, uniform = (number[:, 0].contiguous() for number in numbers)
        return keep, top_p, min_p, uniform

    def rows(self, rows: Tensor) -> _Filters:
        return _Filters(*(getattr(self, name)[rows] for name in self.__slots__))


def _pick(scores_NV: Tensor, filters: _Filters, window: int) -> tuple[Tensor, Tensor]:
    """Tokens (N,), and whether the ``window`` best candidates were enough to know them.

    A score at the window's end may have equals outside: it counts as mass, but which token has it is not known.
    """
    size = scores_NV.shape[1]
    window = min(window, size)
    scores_NW, ids_NW = _best(scores_NV, window)
    p_NW = (scores_NW - scores_NV.logsumexp(-1, keepdim=True)).double().exp()
    upto_NW = p_NW.cumsum(-1)
    kept_mass = torch.where(filters.keep < size, upto_NW.gather(1, filters.keep.clamp(max=window) - 1), 1.0)
    stays_NW = ((upto_NW - p_NW < filters.top_p * kept_mass) | (filters.top_p >= 1)) & (
        p_NW >= filters.min_p * p_NW[:, :1]
    )
    count = torch.minimum(stays_NW.sum(-1, keepdim=True), filters.keep).clamp(min=1)
    ends_inside = (count < window) | (filters.keep <= window)
    total = torch.where(ends_inside, upto_NW.gather(1, count - 1), 1.0)
    index = (upto_NW <= filters.uniform * total).sum(-1, keepdim=True).minimum(count - 1)
    tokens_N = ids_NW.gather(1, index)[:, 0]
    if window == size:
        return tokens_N, torch.ones_like(tokens_N, dtype=torch.bool)
    known = (scores_NW > scores_NW[:, -1:]).sum(-1, keepdim=True)
    mass_known = (filters.keep <= window) | (filters.keep == size) | (filters.top_p >= 1)
    unfiltered = (filters.keep == size) & (filters.top_p >= 1) & (filters.min_p == 0)
    return tokens_N, ((ends_inside | unfiltered) & mass_known & (index < known))[:, 0]


def _best(scores_NV: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The highest scores and their ids (N, window), equal ones by id."""
    if window == scores_NV.shape[1]:
        return scores_NV.sort(dim=-1, descending=True, stable=True)
    ids_NW = scores_NV.topk(window, dim=-1, sorted=False).indices.sort(dim=-1).values
    scores_NW, order_NW = scores_NV.gather(1, ids_NW).sort(dim=-1, descending=True, stable=True)
    return scores_NW, ids_NW.gather(1, order_NW)


# Logprobs


class _Logprobs:
    """The logprobs that some rows ask for, of the model's own distribution."""

    def __init__(self, logits_NV: Tensor, rows: list[int], draws: Sequence[Draw]) -> None:
        self.rows = rows
        self._counts = [draws[n].sampling.logprobs for n in rows]
        if rows:
            self._rows_R = upload(np.array(rows), logits_NV.device)
            self._logprobs_RV = logits_NV.index_select(0, self._rows_R).float().log_softmax(-1)
            self._best_RW, self._ids_RW = _best(self._logprobs_RV, min(max([1, *self._counts]), logits_NV.shape[1]))

    def of(self, tokens_N: Tensor) -> tuple[Tensor, ...]:
        """The drawn tokens' logprobs (R,), the best tokens and theirs (R, W); nothing if nobody asks."""
        if not self.rows:
            return ()
        drawn_R = self._logprobs_RV.gather(1, tokens_N.index_select(0, self._rows_R).unsqueeze(1))[:, 0]
        return drawn_R, self._ids_RW, self._best_RW

    def by_row(self, drawn: list[float], ids: list[float], best: list[float]) -> _Ranked:
        """By row: the drawn token's logprob, and as many of the best as it asks for, from :meth:`of` on the host."""
        width = len(best) // len(self.rows)
        return {
            n: (drawn[i], tuple((int(ids[w]), best[w]) for w in range(i * width, i * width + count)))
            for i, (n, count) in enumerate(zip(self.rows, self._counts, strict=True))
        }
