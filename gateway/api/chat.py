"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.api.generate import engine_welcome, plan_generation, respond
from stencilpress.gateway.api.sampling import prompt_too_long
from stencilpress.gateway.api.schemas import ChatRequest, parse_chat, template_messages
from stencilpress.gateway.api.wire import chat_endpoint
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.services import SERVICES, Services, off_loop
from stencilpress.gateway.template import TemplateError
from stencilpress.gateway.tokenizer import ModelTokenizer, NoChatTemplateError, PromptTooLongError


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    caller = await authenticate(request)
    body = await read_body(request, services.settings)
    asked, prompt = await off_loop(services, caller.tenant_id, len(body), chat_reader(services, body))
    generation = await plan_generation(services, caller, asked, [prompt], "messages")
    return await respond(request, asked, generation, chat_endpoint(services.tokenizer.table))


def chat_reader(services: Services, body: bytes | msgspec.Raw) -> Callable[[], tuple[ChatRequest, list[int]]]:
    """What reads a body: a call for :func:`off_loop`, which raises :class:`InvalidRequestError`.

    Raises :class:`EngineLostError` without an engine, whose context bounds what is read.
    """
    return partial(_read, body, services.tokenizer, engine_welcome(services).max_model_len)


def _read(body: bytes | msgspec.Raw, tokenizer: ModelTokenizer, max_model_len: int) -> tuple[ChatRequest, list[int]]:
    """The request and its prompt's ids."""
    asked = parse_chat(body)
    variables = msgspec.to_builtins(asked.chat_template_kwargs) if asked.chat_template_kwargs else {}
    try:
        return asked, tokenizer.encode_chat(template_messages(asked), variables, max_model_len)
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
