"""``POST /v1/completions``: prompts as text or token ids, one or several."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.api.generate import engine_welcome, find_route, plan_generation, respond
from stencilpress.gateway.api.sampling import prompt_too_long
from stencilpress.gateway.api.schemas import MAX_ANSWERS, CompletionRequest, parse_completion, with_sampling
from stencilpress.gateway.api.wire import completion_endpoint
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.services import SERVICES, off_loop
from stencilpress.gateway.tokenizer import ModelTokenizer, PromptTooLongError


async def create_completion(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    caller = await authenticate(request)
    body = await read_body(request, services.settings)
    read = partial(_read, body, services.tokenizer, engine_welcome(services).max_model_len)
    asked, prompts = await off_loop(services, caller.tenant_id, len(body), read)
    route = await find_route(services, caller, asked)
    asked = with_sampling(asked, route.defaults)
    generation = await plan_generation(services, caller, route, asked, prompts, "prompt")
    return await respond(request, asked, generation, completion_endpoint(services.tokenizer.table))


def _read(body: bytes, tokenizer: ModelTokenizer, max_model_len: int) -> tuple[CompletionRequest, list[list[int]]]:
    asked = parse_completion(body)
    prompts = _prompts(asked.prompt)
    if len(prompts) * (asked.n or 1) > MAX_ANSWERS:
        raise _bad_prompt(f"{len(prompts)} prompts with n={asked.n or 1} are more than {MAX_ANSWERS} answers")
    try:
        return asked, [
            tokenizer.encode(prompt, max_model_len) if isinstance(prompt, str) else prompt for prompt in prompts
        ]
    except PromptTooLongError:
        raise prompt_too_long(max_model_len, f"more than {max_model_len}", "prompt") from None


def _prompts(given: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """One text, several texts, one list of ids or several lists: never a mixture, never an empty prompt."""
    if isinstance(given, str):
        given = [given]
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    ids = [token for token in given if isinstance(token, int)]
    lists = [prompt for prompt in given if isinstance(prompt, list)]
    if max(len(texts), len(ids), len(lists)) < len(given):
        raise _bad_prompt("a list holds texts, or token ids, or lists of token ids, but no mixture")
    prompts = texts or lists or [ids]
    if not all(prompts):
        raise _bad_prompt("a prompt is empty")
    return prompts


def _bad_prompt(text: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for 'prompt': {text}.", param="prompt")
