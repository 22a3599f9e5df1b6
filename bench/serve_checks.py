"""When the serve bench holds: how far from float32 an answer may be, and what a load came to.

Errors are the server's against transformers + PEFT in float32; what transformers + PEFT themselves lose in the base's
dtype sets the scale. Of first tokens the RMS error may be 1.5 times theirs over all models together and 2.5 times for
one, whose few values depend on each other, plus 0.01 nats; a single one may be 8 times theirs plus 0.05 nats.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.results import percentile
from bench.serve_client import Stream

CLEAR = 6
"""RMS errors of transformers' logits by which the best token must lead, to be the only right one."""


class Checks:
    """Prints each check as a line; ``failed`` names those that did not hold."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def note(self, name: str, holds: bool, text: str) -> None:
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {text}", flush=True)
        if not holds:
            self.failed.append(name)


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of top log-probabilities in nats: the server's, and those of transformers + PEFT in the base's dtype."""

    ours: list[float]
    theirs: list[float]

    @classmethod
    def of(cls, top: Mapping[int, float], exact: Tensor, half: Tensor) -> Errors:
        """Of one place: the server's log-probabilities by token, the references' logits (V)."""
        want, other = exact.log_softmax(-1), half.log_softmax(-1)
        ours = [logprob - float(want[token]) for token, logprob in top.items()]
        return cls(ours, [float(other[token] - want[token]) for token in top])

    @classmethod
    def together(cls, parts: Sequence[Errors]) -> Errors:
        return cls([e for part in parts for e in part.ours], [e for part in parts for e in part.theirs])

    @property
    def rms(self) -> tuple[float, float]:
        """The server's, and theirs."""
        ours, theirs = (math.sqrt(statistics.fmean(e * e for e in errors)) for errors in (self.ours, self.theirs))
        return ours, theirs

    @property
    def largest(self) -> tuple[float, float]:
        """The server's, and theirs."""
        return max(map(abs, self.ours)), max(map(abs, self.theirs))


def first_tokens_hold(models: Sequence[Errors]) -> bool:
    """Whether first tokens are as near to float32 as the module's docstring wants, one :class:`Errors` a model."""
    ours, theirs = Errors.together(models).rms
    return ours <= 1.5 * theirs + 0.01 and all(map(_model_holds, models))


def _model_holds(model: Errors) -> bool:
    ours, theirs = model.rms
    return ours <= 2.5 * theirs + 0.01 and model.largest[0] <= 8 * theirs + 0.05


def version_holds(place: Errors) -> bool:
    """Whether one answer is of the version that it should be: five values, so the largest counts."""
    ours, theirs = place.largest
    return ours <= 3 * theirs + 0.05


def judge_greedy(tokens: Sequence[int], exact: Tensor, half: Tensor) -> Counter[str]:
    """How many of an answer's tokens were ``clear``, and of those ``wrong``; ``unclear``, and of those too ``far`` off.

    ``exact`` and ``half`` (T, V) are the references' logits at the tokens' places. A place is clear where the best
    float32 logit leads by more than :data:`CLEAR` RMS errors of ``half``; elsewhere the token's float32 logit may be
    below the best by so much.
    """
    limit = CLEAR * float((half - exact).square().mean().sqrt())
    best = exact.topk(2, -1).values
    clear = best[:, 0] - best[:, 1] > limit
    behind = best[:, 0] - exact[torch.arange(len(tokens)), torch.tensor(tokens)]
    counts = {"clear": clear, "wrong": clear & (behind > 0), "unclear": ~clear, "far": ~clear & ~(behind <= limit)}
    return Counter({name: int(places.sum()) for name, places in counts.items()})


def whole(streams: Sequence[Stream], tokens: int) -> bool:
    """Whether every stream came to its end with so many tokens."""
    return all(one.end == "done" and one.tokens == tokens and one.finish == "length" for one in streams)


def load_figures(streams: Sequence[Stream]) -> dict[str, float]:
    """Metrics of streams that began at once, by name; seconds count from the first request to the last end."""
    first = [1000 * (one.times_s[0] - one.sent_s) for one in streams if one.times_s]
    pairs = (zip(one.times_s, one.times_s[1:], strict=False) for one in streams)
    gaps = [1000 * (later - sooner) for times in pairs for sooner, later in times]
    elapsed_s = max(one.ended_s for one in streams) - min(one.sent_s for one in streams)
    return {
        "out_tok_s": sum(one.tokens for one in streams) / elapsed_s,
        "ttft_p50_ms": percentile(first, 0.5),
        "ttft_p99_ms": percentile(first, 0.99),
        "itl_p99_ms": percentile(gaps, 0.99),
    }
