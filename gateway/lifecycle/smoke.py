"""Smoke prompts: what a version must answer before ``prod`` points at it.

A prompt passes if the version answers without an error, every logprob is finite, and the text matches what it must. A
suite passes if all its prompts do and the version does not give the base's own answer to every one: then it does
nothing, for instance because its weights are zero. Prompts run greedily, as requests of the adapter's tenant.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from stencilpress.engine.client import EngineError, Stream
from stencilpress.engine.messages import Finished, Sampling, Submit, Welcome, pack_tokens
from stencilpress.gateway.catalog.records import Tenant, Version
from stencilpress.gateway.errors import EngineLostError, InvalidRequestError, OverloadedError
from stencilpress.gateway.template import TemplateError
from stencilpress.gateway.tokenizer import ModelTokenizer, NoChatTemplateError, PromptTooLongError
from stencilpress.gateway.worker_process import run_worker

MAX_PROMPTS = 20
MAX_TEXT_CHARS = 8192
MAX_SHOWN_CHARS = 2000
MATCH_LIMIT_S = 10.0
_WORKER = "stencilpress.gateway.lifecycle.match_worker"
_PASSING = frozenset({"overloaded", "engine_lost", "deadline"})
"""Ends that say nothing of the adapter."""

ShortText = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)]


class SmokeMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: ShortText


class SmokePrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One chat. `must_match` is a regular expression that the answer must contain."""

    messages: Annotated[list[SmokeMessage], Meta(min_length=1, max_length=16)]
    max_tokens: Annotated[int, Meta(ge=1, le=256)] = 32
    must_match: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None


class SmokeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt. `error` is "" where the version answered."""

    passed: bool
    text: str
    base_text: str
    error: str
    finite: bool
    matched: bool | None
    same_as_base: bool


class Engine(Protocol):
    """What is needed of the engine's client."""

    @property
    def welcome(self) -> Welcome: ...

    async def submit(self, request: Submit) -> Stream: ...


async def check_prompts(prompts: Sequence[SmokePrompt]) -> None:
    """Raises :class:`InvalidRequestError` for a pattern that is no regular expression or takes too long on nothing."""
    found = await _match([(prompt.must_match or "", "") for prompt in prompts])
    for index, outcome in enumerate(found):
        if outcome is None:
            field = f"prompts[{index}].must_match"
            raise InvalidRequestError(f"{field}: is not a regular expression that can be used", param=field)


async def run_suite(
    engine: Engine, tokenizer: ModelTokenizer, tenant: Tenant, version: Version, prompts: Sequence[SmokePrompt]
) -> tuple[bool, list[SmokeResult]]:
    """Ask the version and the base every prompt. Whether the suite passed, and the result of each.

    Raises :class:`EngineLostError`, :class:`OverloadedError`: then there is no verdict.
    """
    asker = _Asker(engine, tokenizer, tenant)
    pairs = [await asker.both(version, prompt) for prompt in prompts]
    matched = await _match(
        [(prompt.must_match or "", answer.text) for prompt, (answer, _) in zip(prompts, pairs, strict=True)]
    )
    results = [
        _result(prompt, answer, base, found)
        for prompt, (answer, base), found in zip(prompts, pairs, matched, strict=True)
    ]
    passed = all(result.passed for result in results) and not all(result.same_as_base for result in results)
    return passed, results


class _Answer(msgspec.Struct, frozen=True):
    text: str = ""
    tokens: tuple[int, ...] = ()
    finite: bool = True
    error: str = ""


class _Asker:
    def __init__(self, engine: Engine, tokenizer: ModelTokenizer, tenant: Tenant) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._tenant = tenant

    async def both(self, version: Version, prompt: SmokePrompt) -> tuple[_Answer, _Answer]:
        """The version's answer and the base's, to the same tokens."""
        try:
            tokens = await asyncio.to_thread(self._encode, version, prompt)
        except (TemplateError, NoChatTemplateError, PromptTooLongError) as error:
            refused = _Answer(error=str(error) or "the prompt does not fit the model")
            return refused, refused
        return await self._ask(version.digest, tokens, prompt), await self._ask("", tokens, prompt)

    def _encode(self, version: Version, prompt: SmokePrompt) -> list[int]:
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        system = version.defaults.system_prompt
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return self._tokenizer.encode_chat(messages, {}, self._welcome().max_model_len - prompt.max_tokens)

    async def _ask(self, digest: str, tokens: list[int], prompt: SmokePrompt) -> _Answer:
        tenant = self._tenant
        submit = Submit(
            id=0,  # the client numbers it
            prompt=pack_tokens(tokens),
            adapter=digest,
            max_tokens=prompt.max_tokens,
            sampling=Sampling(temperature=0.0, logprobs=0),
            stop_ids=self._welcome().eos_ids,
            tenant=tenant.id,
            weight=tenant.limits.weight,
            salt=tenant.prefix_salt,
        )
        try:
            stream = await self._engine.submit(submit)
        except EngineError:
            raise EngineLostError("The engine is not available; try again shortly.") from None
        try:
            return await self._collect(stream, frozenset(submit.stop_ids))
        finally:
            await stream.aclose()

    async def _collect(self, stream: Stream, stop_ids: frozenset[int]) -> _Answer:
        decoder, texts, ids, finite = self._tokenizer.table.stream(), list[str](), list[int](), True
        end: Finished | None = None
        async for tokens, finished in stream:
            for token in tokens:
                ids.append(token.token)
                finite = finite and token.logprob is not None and math.isfinite(token.logprob)
                if token.token not in stop_ids:
                    texts.append(decoder.push(token.token))
            end = finished or end
        if end is None or (end.reason == "error" and end.code in _PASSING) or end.reason == "aborted":
            if end is not None and end.code == "overloaded":
                raise OverloadedError("The server is overloaded; try again shortly.")
            raise EngineLostError("The engine stopped while it was working on the smoke prompts; try again.")
        error = "" if end.reason != "error" else f"the engine refused: {end.code}"
        return _Answer("".join(texts) + decoder.finish(), tuple(ids), finite, error)

    def _welcome(self) -> Welcome:
        try:
            return self._engine.welcome
        except EngineError:
            raise EngineLostError("The engine is not available; try again shortly.") from None


def _result(prompt: SmokePrompt, answer: _Answer, base: _Answer, found: bool | None) -> SmokeResult:
    matched = found is True if prompt.must_match is not None else None
    return SmokeResult(
        passed=not answer.error and answer.finite and matched is not False,
        text=answer.text[:MAX_SHOWN_CHARS],
        base_text=base.text[:MAX_SHOWN_CHARS],
        error=answer.error,
        finite=answer.finite,
        matched=matched,
        same_as_base=answer.tokens == base.tokens,
    )


async def _match(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Whether each text contains its pattern; None for all if that takes too long."""
    if not any(pattern for pattern, _ in pairs):
        return [True for _ in pairs]
    try:
        status, output = await run_worker(_WORKER, msgspec.json.encode(pairs), MATCH_LIMIT_S)
    except TimeoutError:
        status, output = -1, b""
    if status:
        return [None for _ in pairs]
    return msgspec.json.decode(output, type=list[bool | None])
