"""From a checked request to what the engine draws by."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence

import msgspec

from stencilpress.engine.messages import Sampling, Welcome
from stencilpress.gateway.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.errors import ContextLengthError, InvalidRequestError

LEAST_TOP_P = 1e-6
"""Stands for 0, which keeps the most likely token alone."""


class Limits(msgspec.Struct, frozen=True):
    """What an answer may use at most. ``default_max_tokens`` bounds a request that sets no limit of its own."""

    max_model_len: int
    vocab_size: int
    default_max_tokens: int
    eos_ids: tuple[int, ...]
    max_tokens: int | None = None
    """The most that a request of the tenant may ask for."""

    @classmethod
    def of(cls, welcome: Welcome, default_max_tokens: int, plan: TenantLimits) -> Limits:
        """The engine's, and of the server's and the tenant's the narrower."""
        default = plan.default_max_tokens or default_max_tokens
        if plan.max_tokens is not None:
            default = min(default, plan.max_tokens)
        return cls(welcome.max_model_len, welcome.vocab_size, default, welcome.eos_ids, plan.max_tokens)


def sampling_of(request: GenerationRequest, limits: Limits) -> Sampling:
    """All but the seed; what was left out takes OpenAI's defaults. Raises :class:`InvalidRequestError`."""
    _check_ids("logit_bias", request.logit_bias or (), limits.vocab_size)
    return Sampling(
        temperature=_or(request.temperature, 1.0),
        top_p=max(_or(request.top_p, 1.0), LEAST_TOP_P),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logprobs=_logprobs(request),
        logit_bias=request.logit_bias or {},
    )


def stop_ids_of(request: GenerationRequest, limits: Limits) -> tuple[int, ...]:
    """Tokens that end the answer: the model's own unless ``ignore_eos``, and the request's."""
    own = request.stop_token_ids or []
    _check_ids("stop_token_ids", own, limits.vocab_size)
    return tuple(dict.fromkeys([*(() if request.ignore_eos else limits.eos_ids), *own]))


def max_tokens_of(request: GenerationRequest, prompt: Sequence[int], limits: Limits, prompt_field: str) -> int:
    """The most tokens that the answer to ``prompt`` may have.

    Raises :class:`ContextLengthError` naming both numbers, and :class:`InvalidRequestError` for an empty prompt
    or one with an id outside the vocabulary.
    """
    left = limits.max_model_len - len(prompt)
    if left < 1:
        raise prompt_too_long(limits.max_model_len, str(len(prompt)), prompt_field)
    _check_prompt(prompt, limits, prompt_field)
    field, asked = _asked_max_tokens(request)
    if asked is None:
        return min(left, limits.default_max_tokens)
    if limits.max_tokens is not None and asked > limits.max_tokens:
        raise InvalidRequestError(
            f"Invalid value for '{field}': {asked} is more than your tenant may ask for, {limits.max_tokens}.",
            param=field,
        )
    if asked > left:
        raise ContextLengthError(
            f"This model's maximum context length is {limits.max_model_len} tokens. You asked for "
            f"{len(prompt) + asked} tokens: {len(prompt)} in the prompt and {asked} in the answer. "
            f"'{field}' can be at most {left} here.",
            param=field,
        )
    return asked


def prompt_too_long(max_model_len: int, has: str, field: str) -> ContextLengthError:
    """The error of a prompt that leaves no room for an answer; ``has`` is its number of tokens, or a lower bound."""
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens, of which at least one is the answer's. "
        f"Your prompt has {has} tokens; shorten it.",
        param=field,
    )


def _check_prompt(prompt: Sequence[int], limits: Limits, field: str) -> None:
    if not prompt:
        raise InvalidRequestError(f"Invalid value for '{field}': the prompt is empty.", param=field)
    if not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
        raise InvalidRequestError(
            f"Invalid value for '{field}': token ids are between 0 and {limits.vocab_size - 1}.", param=field
        )


def choice_seeds(seed: int | None, n: int | None) -> list[int]:
    """One seed per choice. The first is the request's own, so a text does not change with ``n``."""
    choices = n or 1
    if seed is None:
        return [secrets.randbits(63) for _ in range(choices)]
    return [seed, *(_derived(seed, choice) for choice in range(1, choices))]


def _derived(seed: int, choice: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _asked_max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _logprobs(request: GenerationRequest) -> int:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    if isinstance(request, CompletionRequest) and request.logprobs is not None:
        return request.logprobs
    return -1


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"Invalid value for '{field}': token id {token} is not between 0 and {vocab_size - 1}.", param=field
            )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
