"""From a checked request to its answers: submit to the engine, then stream or collect."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import msgspec
from aiohttp import web

from stencilpress.engine.client import EngineBusyError, EngineUnavailableError, Stream
from stencilpress.engine.messages import Submit, Welcome, pack_tokens
from stencilpress.gateway.accounting import Charge
from stencilpress.gateway.answer import Answer, Delta, FinishReason, ShownToken, TextRules
from stencilpress.gateway.api.sampling import Limits, choice_seeds, max_tokens_of, sampling_of, stop_ids_of
from stencilpress.gateway.api.schemas import GenerationRequest
from stencilpress.gateway.api.wire import Endpoint, plain_choice, response_head, usage
from stencilpress.gateway.detokenizer import StopStrings
from stencilpress.gateway.errors import (
    DeadlineExceededError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
    RequestTimeoutError,
    UnavailableError,
)
from stencilpress.gateway.keys import Principal, check_model
from stencilpress.gateway.metrics import ActiveRequest
from stencilpress.gateway.middleware import ARRIVED_AT, RATE_HEADERS, REQUEST_ID, to_api_error
from stencilpress.gateway.observation import CURRENT
from stencilpress.gateway.route import Route
from stencilpress.gateway.services import SERVICES, Services
from stencilpress.gateway.stream import ChunkEncoder, EventStream
from stencilpress.gateway.usage.recorder import Meter


class Generation(msgspec.Struct, frozen=True):
    """A request that is ready for the engine. Choice ``i`` is submit ``i``; a prompt's choices are neighbours."""

    model: str
    """What the answer calls the model: the resolved name."""
    submits: Sequence[Submit]
    rules: TextRules
    choices_per_prompt: int
    caller: Principal
    route: Route
    prompt_tokens: int
    most_tokens: int
    """Of the prompts and of the longest answers that they allow."""


async def find_route(services: Services, caller: Principal, request: GenerationRequest) -> Route:
    """Resolve the model, or TGI's ``adapter_id`` in its place. A canary's users are told apart by ``user`` or key.

    Raises :class:`ModelNotFoundError`, :class:`InvalidRequestError` when both fields name adapters.
    """
    model = request.model
    if request.adapter_id is not None and request.adapter_id != model:
        if model not in services.router.base.names:
            raise InvalidRequestError("'adapter_id' and 'model' name different adapters.", param="adapter_id")
        model = request.adapter_id
    route = await services.router.resolve(caller.tenant_id, model, request.user or caller.key_id)
    check_model(caller, model, route.adapter)
    return route


async def plan_generation(
    services: Services,
    caller: Principal,
    route: Route,
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    prompt_field: str,
) -> Generation:
    """Check the request against the engine's limits. Raises an :class:`ApiError`."""
    limits = Limits.of(engine_welcome(services), services.settings.default_max_tokens, caller.limits)
    stop_ids = stop_ids_of(request, limits)
    template = Submit(
        id=0,  # the client numbers it
        prompt=b"",
        adapter=route.digest,
        max_tokens=0,
        sampling=sampling_of(request, limits),
        stop_ids=stop_ids,
        tenant=caller.tenant_id,
        weight=caller.limits.weight,
        salt=caller.salt,
        priority=-(request.priority or 0),  # clients count as vLLM does: the lower, the earlier
        max_wait_ms=_max_wait_ms(request.max_wait_ms, services.settings.max_wait_s),
    )
    submits: list[Submit] = []
    for prompt in prompts:
        max_tokens = max_tokens_of(request, prompt, limits, prompt_field)
        submits += _submits(template, prompt, max_tokens, choice_seeds(request.seed, request.n))
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    rules = TextRules(
        services.tokenizer.table,
        frozenset(stop_ids),
        StopStrings(stops) if stops else None,
        template.sampling.logprobs >= 0,
    )
    prompt_tokens = sum(map(len, prompts))
    most_tokens = prompt_tokens + sum([submit.max_tokens for submit in submits])
    return Generation(route.echo, submits, rules, request.n or 1, caller, route, prompt_tokens, most_tokens)


def _max_wait_ms(asked_ms: int | None, allowed_s: float) -> int:
    """The shorter of what the caller and the operator allow; 0 if neither limits it."""
    limits = [limit_ms for limit_ms in (asked_ms or 0, math.ceil(allowed_s * 1000)) if limit_ms]
    return min(limits, default=0)


def _submits(template: Submit, prompt: list[int], max_tokens: int, seeds: Sequence[int]) -> Iterator[Submit]:
    """One submit per choice of a prompt."""
    packed = pack_tokens(prompt)
    for seed in seeds:
        sampling = msgspec.structs.replace(template.sampling, seed=seed)
        yield msgspec.structs.replace(template, prompt=packed, max_tokens=max_tokens, sampling=sampling)


async def respond(
    request: web.Request, asked: GenerationRequest, generation: Generation, endpoint: Endpoint
) -> web.StreamResponse:
    """Answer in the way that was asked for."""
    services = request.app[SERVICES]
    async with answers(services, generation, request[REQUEST_ID], request[ARRIVED_AT]) as open_answers:
        request[RATE_HEADERS] = open_answers.charge.headers
        if not asked.stream:
            return await _collect(open_answers, generation, endpoint)
        include_usage = asked.stream_options is not None and asked.stream_options.include_usage
        encoder = ChunkEncoder(
            endpoint.chunks,
            response_head(endpoint, generation.model),
            len(open_answers.each),
            include_usage=include_usage,
            logprobs=generation.rules.logprobs,
        )
        return await _stream(request, open_answers, encoder, generation.choices_per_prompt)


Consume = Callable[[int, Delta], Awaitable[None] | None]
"""Takes the index of a choice and its next delta; what it returns is waited for, None is not."""


class OpenAnswers:
    """The answers of one generation while they are made, timed as they come."""

    def __init__(self, services: Services, charge: Charge, active: ActiveRequest) -> None:
        self.each: list[Answer] = []
        self.charge = charge
        self._active = active
        self._services = services
        self._first = True

    async def follow(self, consume: Consume) -> None:
        """Hand every delta to ``consume``; choices advance independently of each other.

        Raises :class:`RequestTimeoutError` when the request's time is over.
        """
        try:
            async with asyncio.timeout(_rest_of_request_s(self._services, self.charge.meter.arrived_at)) as scope:
                await self._follow_all(consume)
        except TimeoutError:
            if not scope.expired():
                raise
            raise _took_too_long(self._services) from None

    async def _follow_all(self, consume: Consume) -> None:
        if len(self.each) == 1:
            await self._follow(self.each[0], consume)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for answer in self.each:
                    group.create_task(self._follow(answer, consume))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def usage(self, choices_per_prompt: int) -> dict[str, object]:
        """The tokens that are billed, once all answers have ended."""
        finished = [await answer.settle() for answer in self.each]
        return usage(finished, sum(answer.answer_tokens for answer in self.each), choices_per_prompt)

    async def _follow(self, answer: Answer, consume: Consume) -> None:
        meter = self.charge.meter
        last = 0.0
        try:
            async for delta in answer:
                now = time.perf_counter()
                if last:
                    meter.gap(now - last, delta.token_count)
                last = now
                pending = consume(answer.index, delta)
                if pending is not None:
                    await pending
                if self._first:  # noted when it is out: nobody waits for that
                    self._first = False
                    self._note_first(now)
        except EngineLostError:
            if self._services.drain.draining:
                raise UnavailableError("The server is shutting down; try again shortly.") from None
            raise

    def _note_first(self, now: float) -> None:
        meter = self.charge.meter
        self._services.metrics.time_to_first_token.observe(now - meter.arrived_at)
        meter.first(now)
        self._active.begin()
        CURRENT.get().first_token(now)


@asynccontextmanager
async def answers(
    services: Services, generation: Generation, request_id: str, arrived_at: float
) -> AsyncIterator[OpenAnswers]:
    """Reserve the quota and submit everything; at the end, however it comes, abort what still runs and settle.

    Raises :class:`RateLimitError` for a request that is over a limit, :class:`DeadlineExceededError` where fetching its
    adapter takes longer than it may wait, :class:`RequestTimeoutError` where it takes longer than a request may.
    """
    metrics, came_s = services.metrics, time.monotonic()
    with (
        services.drain.answering(),
        metrics.answers_open.track_inprogress(),
        metrics.adapters.request(generation.route.adapter) as active,
    ):
        charge = await services.accounting.admit(
            generation.caller,
            generation.route,
            request_id,
            generation.prompt_tokens,
            generation.most_tokens,
            arrived_at,
        )
        opened = OpenAnswers(services, charge, active)
        try:
            async with AsyncExitStack() as kept:
                await _bring_in(services, generation.submits[0], kept, came_s, arrived_at)
                for index, submit in enumerate(generation.submits):
                    opened.each.append(await _submit(services, submit, index, generation.rules, came_s))
                yield opened
        except BaseException as error:
            charge.note(error)
            raise
        finally:  # none of this waits, so a cancelled request is settled all the same
            charge.close(opened.each)
            if opened.each:
                _count(services, generation, opened.each, charge.meter)


def _count(services: Services, generation: Generation, each: Sequence[Answer], meter: Meter) -> None:
    """What was generated is the server's; what is of a tenant or in its log line is what went into answers."""
    metrics, prompt_tokens = services.metrics, generation.prompt_tokens
    answer_tokens = sum(answer.answer_tokens for answer in each)
    metrics.prompt_tokens.inc(prompt_tokens)
    metrics.completion_tokens.inc(sum(answer.completion_tokens for answer in each))
    metrics.tenants.add(
        generation.caller.tenant,
        prompt_tokens,
        answer_tokens,
        ttft_ms=meter.ttft_ms,
        gaps=meter.gaps,
        gaps_ms=meter.gaps_ms,
    )
    metrics.inter_token.add(meter.gaps, meter.gaps_ms)
    finished = [answer.finished for answer in each if answer.finished is not None]
    if finished:
        metrics.queue.observe(max(one.queue_ms for one in finished))
        if cold_start_ms := max(one.cold_start_ms for one in finished):
            metrics.cold_start.observe(cold_start_ms)
    observed = CURRENT.get()
    observed.model, observed.adapter = generation.model, generation.route.adapter
    observed.prompt_tokens, observed.completion_tokens = prompt_tokens, answer_tokens


async def _bring_in(services: Services, submit: Submit, kept: AsyncExitStack, came_s: float, arrived_at: float) -> None:
    """Have a request's adapter on this host, and keep it there until ``kept`` ends. A store that is slow, or answers
    nothing, holds up nobody for longer than may be; what it sends is kept for the next request."""
    rest_s = _rest_of_request_s(services, arrived_at)
    wait_s = _in_time(submit, came_s).max_wait_ms / 1000 or rest_s
    try:
        async with asyncio.timeout(min(wait_s, rest_s)) as scope:
            await kept.enter_async_context(services.using(submit.adapter, submit.tenant))
    except TimeoutError:
        if not scope.expired():
            raise
        raise (_too_late() if wait_s < rest_s else _took_too_long(services)) from None


def _rest_of_request_s(services: Services, arrived_at: float) -> float:
    """How long the request may go on that came then."""
    return services.settings.request_limit_s - (time.perf_counter() - arrived_at)


def _took_too_long(services: Services) -> RequestTimeoutError:
    return RequestTimeoutError(f"The answer took longer than {services.settings.request_limit_s:g} s.")


async def _submit(services: Services, submit: Submit, index: int, rules: TextRules, came_s: float) -> Answer:
    try:
        stream = await services.engine.submit(_in_time(submit, came_s))
    except EngineBusyError:
        raise OverloadedError("The server is overloaded; try again shortly.") from None
    except EngineUnavailableError:
        raise _no_engine() from None
    except ValueError:
        raise InvalidRequestError("The prompt is too long for this server.", code="capacity_exceeded") from None
    return Answer(stream, index, rules, partial(_resubmit, services, submit, came_s))


async def _resubmit(services: Services, submit: Submit, came_s: float) -> Stream | None:
    """Submit a request again whose engine is gone before it had any token; None where nobody can take it. How long it
    may wait still counts from when it came. Raises :class:`DeadlineExceededError`."""
    limit_s = services.settings.resubmit_limit_s
    if not limit_s or services.drain.draining:
        return None
    rest = _in_time(submit, came_s)
    rest_s = rest.max_wait_ms / 1000 or limit_s
    try:
        stream = await services.engine.resubmit(rest, min(limit_s, rest_s))
    except EngineBusyError:
        return None
    if stream is None and rest_s < limit_s and not services.drain.draining:
        raise _too_late()
    return stream


def _in_time(submit: Submit, came_s: float) -> Submit:
    """With what is left of the time that it may wait. Raises :class:`DeadlineExceededError` if nothing is."""
    if not submit.max_wait_ms:
        return submit
    rest_ms = submit.max_wait_ms - round((time.monotonic() - came_s) * 1000)
    if rest_ms <= 0:
        raise _too_late()
    return msgspec.structs.replace(submit, max_wait_ms=rest_ms)


def _too_late() -> DeadlineExceededError:
    return DeadlineExceededError("The request waited too long for its turn.")


def engine_welcome(services: Services) -> Welcome:
    """The engine's limits. Raises :class:`EngineLostError` without an engine."""
    try:
        return services.engine.welcome
    except EngineUnavailableError:
        raise _no_engine() from None


def _no_engine() -> EngineLostError:
    return EngineLostError("The engine is not available; try again shortly.")


async def _collect(opened: OpenAnswers, generation: Generation, endpoint: Endpoint) -> web.Response:
    """One JSON object with all choices."""
    texts: list[list[str]] = [[] for _ in opened.each]
    tokens: list[list[ShownToken]] = [[] for _ in opened.each]
    reasons: list[FinishReason] = ["stop" for _ in opened.each]

    def keep(index: int, delta: Delta) -> None:
        texts[index].append(delta.text)
        tokens[index].extend(delta.tokens)
        reasons[index] = delta.finish_reason or reasons[index]

    await opened.follow(keep)
    choices = [
        plain_choice(endpoint, index, "".join(text), shown if generation.rules.logprobs else None, reason)
        for index, (text, shown, reason) in enumerate(zip(texts, tokens, reasons, strict=True))
    ]
    body = {
        **response_head(endpoint, generation.model),
        "object": endpoint.object,
        "choices": choices,
        "usage": await opened.usage(generation.choices_per_prompt),
    }
    opened.charge.meter.deliver(sum(answer.answer_tokens for answer in opened.each))
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _stream(
    request: web.Request, opened: OpenAnswers, encoder: ChunkEncoder, choices_per_prompt: int
) -> web.StreamResponse:
    """Events as the text comes. A failure before the first becomes a response of its own, after it an event."""
    services = request.app[SERVICES]
    events = EventStream(request, services.settings.write_limit_s, services.metrics)

    deliver, write_now = opened.charge.meter.deliver, events.write_now

    def send(index: int, delta: Delta) -> Awaitable[None] | None:
        deliver(delta.token_count)
        data = encoder.delta(index, delta)
        return None if write_now(data) else events.send(data)

    try:
        await events.prepare()
        await opened.follow(send)
        usage = await opened.usage(choices_per_prompt) if encoder.include_usage else None
        return await events.finish(encoder.end(usage))
    except ConnectionError:
        raise
    except Exception as error:
        if not events.started:
            events.take_back()
            raise
        opened.charge.note(error)
        return await events.fail(to_api_error(error, request))
