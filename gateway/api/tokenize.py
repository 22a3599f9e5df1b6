"""``POST /tokenize`` and ``POST /detokenize``, as vLLM has them: what a prompt amounts to, before it is paid for."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from stencilpress.gateway.api.body import read_body
from stencilpress.gateway.api.chat import chat_ids
from stencilpress.gateway.api.generate import engine_welcome
from stencilpress.gateway.api.sampling import prompt_too_long
from stencilpress.gateway.api.schemas import (
    MAX_ELEMENTS,
    MAX_MESSAGES,
    ChatMessage,
    TemplateOptions,
    Text,
    message_texts,
    parse_fields,
    with_system_message,
)
from stencilpress.gateway.defaults import NO_DEFAULTS, VersionDefaults
from stencilpress.gateway.errors import InvalidRequestError
from stencilpress.gateway.keys import Principal, check_model
from stencilpress.gateway.middleware import authenticate
from stencilpress.gateway.services import SERVICES, Services, off_loop
from stencilpress.gateway.tokenizer import PromptTooLongError

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a chat. All models have the base's tokenizer; one's version may bring a system prompt for chats."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    user: Text | None = None
    """Tells a canary's users apart, as in a request for an answer."""


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelName | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_ELEMENTS)]


REFUSED: dict[str, tuple[Any, ...]] = {"continue_final_message": (False,), "tools": ([],), "chat_template": ()}


async def tokenize(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    caller = await authenticate(request)
    body = await read_body(request, services.settings)
    max_model_len = engine_welcome(services).max_model_len

    parse = partial(parse_fields, body, TokenizeRequest, REFUSED)
    asked = await off_loop(services, caller.tenant_id, len(body), parse)
    defaults = await _defaults_of(services, caller, asked)
    size = len(body) + len(defaults.system_prompt or "")
    ids = await off_loop(services, caller.tenant_id, size, partial(_ids, services, asked, defaults, max_model_len))
    strings = services.tokenizer.token_strings(ids) if asked.return_token_strs else None
    return _json({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings})


async def detokenize(request: web.Request) -> web.Response:
    services = request.app[SERVICES]
    caller = await authenticate(request)
    body = await read_body(request, services.settings)
    asked, text = await off_loop(services, caller.tenant_id, len(body), lambda: _text(services, body))
    await _defaults_of(services, caller, asked)
    return _json({"prompt": text})


async def _defaults_of(
    services: Services, caller: Principal, asked: TokenizeRequest | DetokenizeRequest
) -> VersionDefaults:
    """What the version brings along that a request for the model would get. Raises :class:`ModelNotFoundError`."""
    if asked.model is None:
        return NO_DEFAULTS
    user = asked.user if isinstance(asked, TokenizeRequest) else None
    route = await services.router.resolve(caller.tenant_id, asked.model, user or caller.key_id)
    check_model(caller, asked.model, route.adapter)
    return route.defaults


def _text(services: Services, body: bytes) -> tuple[DetokenizeRequest, str]:
    asked = parse_fields(body, DetokenizeRequest, {})
    if max(asked.tokens, default=0) >= services.tokenizer.vocab_size:
        text = f"token ids are below {services.tokenizer.vocab_size}"
        raise InvalidRequestError(f"Invalid value for 'tokens': {text}.", param="tokens")
    return asked, services.tokenizer.decode(asked.tokens)


def _ids(services: Services, asked: TokenizeRequest, defaults: VersionDefaults, max_model_len: int) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequestError("Give either 'prompt' or 'messages'.", param="prompt")
    if asked.messages is not None:
        if asked.add_special_tokens:
            text = "'add_special_tokens' is for 'prompt': a chat template writes its own."
            raise InvalidRequestError(text, param="add_special_tokens")
        generation_prompt = asked.add_generation_prompt is not False
        messages = message_texts(with_system_message(asked.messages, defaults))
        return chat_ids(services.tokenizer, messages, asked.chat_template_kwargs, max_model_len, generation_prompt)
    try:
        special = asked.add_special_tokens is not False
        return services.tokenizer.encode(asked.prompt or "", max_model_len, special=special)
    except PromptTooLongError:
        raise prompt_too_long(max_model_len, f"more than {max_model_len}", "prompt") from None


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
