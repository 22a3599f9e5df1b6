"""The objects of OpenAI's wire format that both endpoints' answers are made of."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stencilpress.engine.messages import Finished
from stencilpress.gateway.answer import FinishReason, ShownToken
from stencilpress.gateway.detokenizer import TokenTable
from stencilpress.gateway.stream import ChunkShape

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one endpoint words its answers."""

    id_prefix: str
    object: str
    chunks: ChunkShape
    choice: Callable[[str], dict[str, Any]]
    """The members of a plain response's choice that hold the text."""


def response_head(endpoint: Endpoint, model: str) -> dict[str, Any]:
    """The members that are the same in every chunk of a response."""
    return {"id": endpoint.id_prefix + os.urandom(16).hex(), "created": int(time.time()), "model": model}


@functools.lru_cache(1)
def chat_endpoint(table: TokenTable) -> Endpoint:
    return Endpoint(
        "chatcmpl-",
        "chat.completion",
        ChunkShape(
            "chat.completion.chunk",
            before_text=b'"delta":{"content":',
            after_text=b"}",
            opening=b'"delta":{"role":"assistant","content":""}',
            closing=b'"delta":{}',
            logprobs=lambda tokens: _chat_logprobs(tokens, table),
        ),
        lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    )


@functools.lru_cache(1)
def completion_endpoint(table: TokenTable) -> Endpoint:
    return Endpoint(
        "cmpl-",
        "text_completion",
        ChunkShape(
            "text_completion",
            before_text=b'"text":',
            after_text=b"",
            opening=b"",
            closing=b'"text":""',
            logprobs=lambda tokens: _completion_logprobs(tokens, table),
        ),
        lambda text: {"text": text},
    )


def plain_choice(
    endpoint: Endpoint, index: int, text: str, tokens: Sequence[ShownToken] | None, reason: FinishReason
) -> dict[str, Any]:
    """One choice of a plain response; ``tokens`` is None when logprobs were not asked for."""
    logprobs = None if tokens is None else endpoint.chunks.logprobs(tokens)
    return {"index": index, **endpoint.choice(text), "logprobs": logprobs, "finish_reason": reason}


def usage(finished: Sequence[Finished], answer_tokens: int, choices_per_prompt: int) -> dict[str, Any]:
    """Tokens as they are billed. ``finished`` is in the order of the choices; a prompt counts once for all of its."""
    prompts = finished[::choices_per_prompt]
    prompt_tokens = sum(one.prompt_tokens for one in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }


def _chat_logprobs(tokens: Sequence[ShownToken], table: TokenTable) -> dict[str, Any]:
    content = [
        {**_spelled(shown.token, shown.logprob, table), "top_logprobs": [_spelled(*top, table) for top in shown.top]}
        for shown in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[ShownToken], table: TokenTable) -> dict[str, Any]:
    return {
        "tokens": [spelling(table.token_bytes(shown.token)) for shown in tokens],
        "token_logprobs": [max(shown.logprob, LEAST_LOGPROB) for shown in tokens],
        "top_logprobs": [
            {spelling(table.token_bytes(token)): max(logprob, LEAST_LOGPROB) for token, logprob in shown.top}
            for shown in tokens
        ],
        "text_offset": [shown.offset for shown in tokens],
    }


def _spelled(token: int, logprob: float, table: TokenTable) -> dict[str, Any]:
    data = table.token_bytes(token)
    return {"token": spelling(data), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


def spelling(data: bytes) -> str:
    """A token's text; a token that is a part of a character is spelled as OpenAI does, ``bytes:\\xe2\\x80``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
