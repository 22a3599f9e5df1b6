"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from aiohttp import web

from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.api.generate import engine_welcome, find_route, plan_generation, respond
from stencilpress.gateway.api.sampling import prompt_too_long
from stencilpress.gateway.api.schemas import (
    ChatRequest,
    TemplateOptions,
    message_texts,
    parse_chat,
    with_sampling,
    with_system_prompt,
)
from stencilpress.gateway.api.wire import chat_endpoint
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.keys import Principal
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.route import Route
from stencilpress.gateway.services import SERVICES, Services, off_loop
from stencilpress.gateway.template import TemplateError
from stencilpress.gateway.tokenizer import ModelTokenizer, NoChatTemplateError, PromptTooLongError


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    caller = await authenticate(request)
    body = await read_body(request, services.settings)
    asked, route, prompt = await read_chat(services, caller, body)
    generation = await plan_generation(services, caller, route, asked, [prompt], "messages")
    return await respond(request, asked, generation, chat_endpoint(services.tokenizer.table))


async def read_chat(
    services: Services, caller: Principal, body: bytes | msgspec.Raw
) -> tuple[ChatRequest, Route, list[int]]:
    """The request with its version's defaults, where it goes, and its prompt's ids.

    Raises :class:`InvalidRequestError`, :class:`ModelNotFoundError`, and :class:`EngineLostError` without an engine,
    whose context bounds what is read.
    """
    max_model_len, size = engine_welcome(services).max_model_len, memoryview(body).nbytes
    asked = await off_loop(services, caller.tenant_id, size, partial(parse_chat, body))
    route = await find_route(services, caller, asked)
    asked = with_system_prompt(with_sampling(asked, route.defaults), route.defaults)
    size += len(route.defaults.system_prompt or "")
    encode = partial(_prompt_ids, asked, services.tokenizer, max_model_len)
    return asked, route, await off_loop(services, caller.tenant_id, size, encode)


def _prompt_ids(asked: ChatRequest, tokenizer: ModelTokenizer, max_model_len: int) -> list[int]:
    return chat_ids(tokenizer, message_texts(asked.messages), asked.chat_template_kwargs, max_model_len)


def chat_ids(
    tokenizer: ModelTokenizer,
    messages: Sequence[Mapping[str, str]],
    options: TemplateOptions | None,
    max_model_len: int,
    generation_prompt: bool = True,
) -> list[int]:
    """A chat's prompt as token ids. Raises :class:`InvalidRequestError`."""
    variables = msgspec.to_builtins(options) if options else {}
    try:
        return tokenizer.encode_chat(messages, variables, max_model_len, generation_prompt=generation_prompt)
    except PromptTooLongError:
        raise prompt_too_long(max_model_len, f"more than {max_model_len}", "messages") from None
    except NoChatTemplateError:
        raise InvalidRequestError(
            "This model has no chat template. Use /v1/completions with a prompt in the model's own format, or add "
            "chat_template.jinja to the model's folder.",
            param="model",
            code="no_chat_template",
        ) from None
    except TemplateError as error:
        raise InvalidRequestError(str(error), param="messages") from None
