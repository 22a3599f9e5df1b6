"""The sampler against transformers' processors and warpers, and against brute force over the sorted distribution."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stencilpress.engine.messages import Sampling
from stencilpress.engine.plan import FAILED, Draw, Sampled
from stencilpress.engine.sampler import WINDOW, sample, uniform

VOCAB = 3000
HISTORY = [5, 9, 5, 2, 2900, 9, 9, 7]
PROMPT_LEN = 3


def _draw(position: int = 0, **sampling: Any) -> Draw:
    return Draw(Sampling(**sampling), HISTORY, PROMPT_LEN, position)


def _sample(logits: Tensor, draws: list[Draw]) -> list[Sampled]:
    return sample(logits, [(0, n) for n in range(len(draws))], draws)


def _tokens(logits: Tensor, draws: list[Draw]) -> list[int]:
    return [sampled.token for sampled in _sample(logits, draws)]


def _logits(rows: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * spread


def _by_transformers(logits: Tensor, sampling: Sampling) -> Tensor:
    """The filtered distribution (rows, V), fp64."""
    steps = LogitsProcessorList()
    if sampling.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()}))
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores: Tensor = steps(torch.tensor([HISTORY] * len(logits)), logits.clone())
    return scores.double().softmax(-1)


def _look_up(probabilities: Tensor, number: float) -> int:
    """Inverse of the cumulative distribution, most likely first, equal ones by id."""
    p, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    index = int((p.cumsum(-1) <= number * float(p.sum())).sum())
    return int(ids[min(index, int((p > 0).sum()) - 1)])


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.9},
        {"top_k": 1},
        {"top_k": 40, "temperature": 1.5},
        {"top_k": WINDOW + 100, "temperature": 2.0},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"top_p": 0.999, "temperature": 2.0},
        {"min_p": 0.02, "temperature": 1.5},
        {"top_k": 60, "top_p": 0.8, "min_p": 0.01, "temperature": 1.2},
        {"top_k": WINDOW + 50, "top_p": 0.97, "temperature": 2.0},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "logit_bias": {5: 4.0, 100: 8.0, 9: -100.0}},
    ],
)
def test_draws_are_those_of_transformers_distribution(sampling: dict[str, Any]) -> None:
    logits = _logits(1)
    probabilities = _by_transformers(logits, Sampling(**sampling))[0]
    draws = [_draw(position, seed=17, **sampling) for position in range(300)]

    tokens = _tokens(logits.expand(300, -1), draws)

    assert tokens == [_look_up(probabilities, uniform(17, position)) for position in range(300)]


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.001}, {"top_p": 0.99999}])
def test_ties_go_by_id(sampling: dict[str, Any]) -> None:
    """Half precision makes many equal logits: at the window's end, and all of them in a flat row."""
    rows = torch.stack((_logits(1, spread=0.5)[0].bfloat16(), torch.zeros(VOCAB, dtype=torch.bfloat16)))
    draws = [_draw(position, seed=3, **sampling) for position in range(100)]

    for row in rows:
        best = row.float().sort(descending=True, stable=True)
        p = best.values.double().softmax(-1)
        keep = p.cumsum(-1) - p < sampling.get("top_p", 1) if sampling.get("top_p", 1) < 1 else torch.ones_like(p) > 0
        keep &= (torch.arange(VOCAB) < sampling.get("top_k", VOCAB)) & (p >= sampling.get("min_p", 0) * p[0])
        kept = torch.zeros(VOCAB, dtype=torch.float64).index_copy(0, best.indices[keep], p[keep])
        expected = [_look_up(kept, uniform(3, position)) for position in range(100)]
        assert _tokens(row.expand(100, -1), draws) == expected


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = _logits(1)
    output = Counter(HISTORY[PROMPT_LEN:])
    expected = logits[0].clone()
    for token, count in output.items():
        expected[token] -= 0.7 * count + 1.1
    draws = [_draw(n, seed=4, frequency_penalty=0.7, presence_penalty=1.1) for n in range(100)]

    tokens = _tokens(logits.expand(100, -1), draws)

    assert tokens == [_look_up(expected.double().softmax(-1), uniform(4, n)) for n in range(100)]


def test_greedy_takes_the_best_after_bias_and_penalties() -> None:
    logits = _logits(1)
    best = int(logits.argmax())
    history = [best] * 4
    cases = [
        (Sampling(temperature=0.0), best),
        (Sampling(temperature=1e-7), best),
        (Sampling(temperature=0.0, logit_bias={8: 100.0}), 8),
        (Sampling(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0), _second(logits)),
        (Sampling(temperature=0.0, top_k=5, top_p=0.1, seed=9), best),
    ]

    tokens = _tokens(logits.expand(len(cases), -1), [Draw(s, history, 1, 3) for s, _ in cases])

    assert tokens == [token for _, token in cases]


def _second(logits: Tensor) -> int:
    return int(logits[0].topk(2).indices[1])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = random.Random(6)
    logits = _logits(40)
    draws = [
        _draw(
            rng.randrange(100),
            seed=rng.getrandbits(63),
            temperature=rng.choice((0.0, 0.5, 1.0, 2.0)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 3, 400)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            logprobs=rng.choice((-1, 0, 4)),
        )
        for _ in range(40)
    ]

    together = _sample(logits, draws)

    for n in range(40):
        (alone,) = sample(logits[n : n + 1], [(0, n)], [draws[n]])
        assert (alone.key, alone.token) == (together[n].key, together[n].token)
        assert alone.logprob == pytest.approx(together[n].logprob)


def test_logprobs_are_those_of_the_model() -> None:
    logits = _logits(3).bfloat16()
    expected = logits.float().log_softmax(-1)
    draws = [
        _draw(temperature=0.0, logprobs=0),
        _draw(temperature=0.3, top_k=2, logit_bias={77: 50.0}, logprobs=5),
        _draw(temperature=0.0),
    ]

    first, second, third = _sample(logits, draws)

    assert first.logprob == pytest.approx(float(expected[0].max()))
    assert first.top == ()
    assert second.token == 77
    assert second.logprob == pytest.approx(float(expected[1, 77]))
    order = sorted(range(VOCAB), key=lambda token: (-float(expected[1, token]), token))[:5]
    assert [token for token, _ in second.top] == order
    assert [logprob for _, logprob in second.top] == pytest.approx(expected[1, order].tolist())
    assert (third.logprob, third.top) == (None, ())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = _logits(3)
    draws = [_draw(n, seed=2, temperature=temperature, logprobs=2) for n in range(3)]
    sound = _sample(logits, draws)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 40] = bad

    first, failed, third = _sample(logits, draws)

    assert failed == Sampled((0, 1), FAILED)
    assert [first, third] == [sound[0], sound[2]]


def test_the_number_is_a_hash_of_seed_and_position() -> None:
    """The first output of splitmix64 from state 1234567 is published; the second round runs on it."""
    first = 6457827717110365317
    expected = (first + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        expected = (expected ^ expected >> shift) * factor % 2**64
    expected ^= expected >> 31
    assert uniform(1234567, 0) == (expected >> 11) / 2**53

    numbers = [uniform(seed, position) for seed in (0, 1, -5, 2**64 - 1) for position in range(2000)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < max(numbers) < 1
    tenths = Counter(int(number * 10) for number in numbers)
    assert sum((count - 800) ** 2 / 800 for count in tenths.values()) < 27.9, "chi-squared, 9 degrees, 0.001"


def test_extreme_parameters_stay_in_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, -1e4, 88.0, 3e38], [-3e38, -3e38, 1.0, -math.inf]])
    draws = [
        _small(temperature=2.0, top_p=0.0),
        _small(temperature=1e-4, min_p=1.0, logit_bias={1: -100.0}),
    ]

    assert _tokens(logits, draws) == [3, 2]


def _small(**sampling: Any) -> Draw:
    return Draw(Sampling(seed=1, **sampling), [1, 2], 1, 1)
