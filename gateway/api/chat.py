"""``POST /v1/chat/completions``."""

from __future__ import annotations

import msgspec
from aiohttp import web

from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.api.generate import plan_generation, respond
from stencilpress.gateway.api.schemas import ChatRequest, parse_chat, template_messages
from stencilpress.gateway.api.wire import chat_endpoint
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.services import SERVICES, off_loop
from stencilpress.gateway.template import TemplateError
from stencilpress.gateway.tokenizer import ModelTokenizer, NoChatTemplateError


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    caller = await authenticate(request)
    body = await read_body(request, services.settings)
    asked, prompt = await off_loop(services, caller.tenant_id, len(body), lambda: read_chat(body, services.tokenizer))
    generation = await plan_generation(services, caller, asked, [prompt], "messages")
    return await respond(request, asked, generation, chat_endpoint(services.tokenizer.table))


def read_chat(body: bytes | msgspec.Raw, tokenizer: ModelTokenizer) -> tuple[ChatRequest, list[int]]:
    """The request and its prompt's ids. Raises :class:`InvalidRequestError`."""
    asked = parse_chat(body)
    variables = msgspec.to_builtins(asked.chat_template_kwargs) if asked.chat_template_kwargs else {}
    try:
        return asked, tokenizer.encode_chat(template_messages(asked), variables)
    except NoChatTemplateError:
        raise InvalidRequestError(
            "This model has no chat template. Use /v1/completions with a prompt in the model's own format, or add "
            "chat_template.jinja to the model's folder.",
            param="model",
            code="no_chat_template",
        ) from None
    except TemplateError as error:
        raise InvalidRequestError(str(error), param="messages") from None
