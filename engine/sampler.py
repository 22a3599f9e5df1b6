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
    """One token per row. ``logits_NV`` has the served dtype and is not changed.

    A row whose logits hold NaN or +inf, or nothing but -inf, gets :data:`FAILED`; the others do not notice.
    """
    best_N, tokens_N = logits_NV.max(-1)
    sound: list[bool] = torch.isfinite(best_N).tolist()
    tokens: list[int] = tokens_N.tolist()
    altered = [n for n, draw in enumerate(draws) if sound[n] and not _takes_best(draw.sampling)]
    if altered:
        drawn = _draw(logits_NV[altered].float(), [draws[n] for n in altered])
        for n, token in zip(altered, drawn, strict=True):
            tokens[n] = token
    ranked = [n for n, draw in enumerate(draws) if sound[n] and draw.sampling.logprobs >= 0]
    logprobs = _logprobs(logits_NV, tokens, ranked, [draws[n].sampling.logprobs for n in ranked])
    return [
        Sampled(key, token, *logprobs.get(n, (None, ()))) if sound[n] else Sampled(key, FAILED)
        for n, (key, token) in enumerate(zip(keys, tokens, strict=True))
    ]


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


def _draw(scores_NV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Tokens of rows that are not plainly greedy. Overwrites ``scores_NV`` (fp32)."""
    for row_V, draw in zip(scores_NV, draws, strict=True):
        if draw.sampling.logit_bias:
            bias = draw.sampling.logit_bias
            row_V[_ids(list(bias), row_V)] += torch.tensor(list(bias.values()), device=row_V.device)
        if draw.sampling.heeds_history:
            _penalise(row_V, draw)
    filters = _Filters.of(draws, scores_NV)
    scores_NV.sub_(scores_NV.amax(-1, keepdim=True)).div_(filters.temperature)
    tokens_N, settled_N = _pick(scores_NV, filters, WINDOW)
    tokens: list[int] = tokens_N.tolist()
    open_rows = [n for n, settled in enumerate(settled_N.tolist()) if not settled]
    if open_rows:
        wide_N, _ = _pick(scores_NV[open_rows], filters.rows(open_rows), scores_NV.shape[1])
        for n, token in zip(open_rows, wide_N.tolist(), strict=True):
            tokens[n] = token
    return tokens


def _penalise(row_V: Tensor, draw: Draw) -> None:
    """Repetition over prompt and output (arXiv 1909.05858), frequency and presence over the output (OpenAI's API)."""
    sampling = draw.sampling
    if sampling.repetition_penalty != 1:
        seen = _ids(draw.history, row_V)
        score = row_V[seen]
        row_V[seen] = torch.where(score > 0, score / sampling.repetition_penalty, score * sampling.repetition_penalty)
    output, count = torch.unique(_ids(draw.history[draw.prompt_len :], row_V), return_counts=True)
    row_V[output] -= sampling.frequency_penalty * count + sampling.presence_penalty


def _ids(tokens: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=like.device)


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
        temperature, keep, top_p, min_p, number = torch.tensor(fields, dtype=torch.float64).T.unsqueeze(-1)
        device = scores_NV.device
        return cls(
            temperature.float().to(device),
            keep.long().to(device),
            top_p.to(device),
            min_p.to(device),
            number.to(device),
        )

    def rows(self, rows: list[int]) -> _Filters:
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


def _logprobs(
    logits_NV: Tensor, tokens: Sequence[int], rows: list[int], counts: list[int]
) -> dict[int, tuple[float, tuple[tuple[int, float], ...]]]:
    """By row: the drawn token's logprob, and the ``count`` best with theirs, of the model's own distribution."""
    if not rows:
        return {}
    logprobs_NV = logits_NV[rows].float().log_softmax(-1)
    drawn = logprobs_NV.gather(1, _ids([tokens[n] for n in rows], logits_NV).unsqueeze(1))[:, 0].tolist()
    best_NW, ids_NW = _best(logprobs_NV, min(max([1, *counts]), logits_NV.shape[1]))
    return {
        n: (drawn[i], tuple(zip(ids_NW[i, :count].tolist(), best_NW[i, :count].tolist(), strict=True)))
        for i, (n, count) in enumerate(zip(rows, counts, strict=True))
    }
