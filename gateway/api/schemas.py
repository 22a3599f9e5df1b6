"""What a client may ask for: request bodies as typed structs, every limit beside its field.

Every field of OpenAI's API is honoured, accepted without effect, or refused by name; a field that nobody
knows is refused too, so a misspelt option never goes unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from stencilpress.gateway.defaults import VersionDefaults
from stencilpress.gateway.errors import InvalidRequestError

MAX_CHOICES = 16
MAX_ANSWERS = 64
"""Prompts times choices of one request."""
MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_ELEMENTS = 1 << 18
"""Commas in a prompt or in the messages: decoding more would hold the event loop for too long."""
MAX_WAIT_MS = 3_600_000
MAX_FIELD_BYTES = 64 << 10
"""Of any other field, as JSON."""
_BULKY = ("messages", "prompt", "tokens")
_MAX_NAMED = 8
_MAX_NAME_CHARS = 64

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=512)]

CHAT_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that are accepted, and what the chat template sees: `developer` is OpenAI's newer name of `system`."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Padding against traffic analysis; accepted, never added."""


class TemplateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The variables of a chat template that a client may set."""

    enable_thinking: bool | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and plain completions share."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI, under the names that vLLM gave them.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOP_IDS)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    adapter_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """TGI's name of the adapter; ``model`` is then the base."""
    # Ours.
    max_wait_ms: Annotated[int, Meta(ge=1, le=MAX_WAIT_MS)] | None = None
    user: Text | None = None
    """Tells a canary's users apart."""
    # Accepted without effect.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message. An assistant's message may come back as the SDK gave it, with its empty fields."""

    role: str
    content: str | Annotated[list[ContentPart], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: TemplateOptions | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (False,),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI's that are not served, with the values that ask for nothing; null always does."""

REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,), "suffix": ("",)}

B = TypeVar("B", bound=msgspec.Struct)
R = TypeVar("R", bound=GenerationRequest)

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_chat = msgspec.json.Decoder(ChatRequest).decode
_decode_completion = msgspec.json.Decoder(CompletionRequest).decode


def parse_chat(body: bytes | msgspec.Raw) -> ChatRequest:
    """Read and check the body of a chat completion. Raises :class:`InvalidRequestError`."""
    request = _parse(body, ChatRequest, _decode_chat, REFUSED_IN_CHAT)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequestError(
            "'max_tokens' and 'max_completion_tokens' differ; give only one of them.", param="max_tokens"
        )
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Read and check the body of a plain completion. Raises :class:`InvalidRequestError`."""
    return _parse(body, CompletionRequest, _decode_completion, REFUSED_IN_COMPLETIONS)


def message_texts(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """The messages as the chat template sees them: texts only. Raises :class:`InvalidRequestError`."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def with_sampling(request: R, defaults: VersionDefaults) -> R:
    """The request with what it leaves out filled in from its version."""
    missing = {name: value for name, value in defaults.sampling.items() if getattr(request, name) is None}
    return msgspec.structs.replace(request, **missing) if missing else request


def with_system_prompt(request: ChatRequest, defaults: VersionDefaults) -> ChatRequest:
    """The request with its version's system prompt, unless it has one of its own."""
    messages = with_system_message(request.messages, defaults)
    return request if messages is request.messages else msgspec.structs.replace(request, messages=messages)


def with_system_message(messages: list[ChatMessage], defaults: VersionDefaults) -> list[ChatMessage]:
    """A chat with its version's system prompt, unless it has one of its own."""
    text = defaults.system_prompt
    if text is None or any(CHAT_ROLES.get(message.role) == "system" for message in messages):
        return messages
    return [ChatMessage("system", text), *messages]


def _template_message(message: ChatMessage, where: str) -> dict[str, str]:
    if message.role not in CHAT_ROLES:
        raise InvalidRequestError(
            f"Invalid value for '{where}.role': {_shown(message.role)}. Supported: {', '.join(CHAT_ROLES)}.",
            param=f"{where}.role",
        )
    seen = {"role": CHAT_ROLES[message.role], "content": _content(message, where)}
    return seen if message.name is None else {**seen, "name": message.name}


def _content(message: ChatMessage, where: str) -> str:
    content = message.content if message.content is not None else message.refusal
    if content is None:
        raise InvalidRequestError(f"'{where}.content' is missing.", param=f"{where}.content")
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                f"Invalid value for '{where}.content[{i}]': only parts of type 'text' are supported.",
                param=f"{where}.content[{i}]",
            )
    return "\n".join(part.text for part in content if part.text is not None)


def _parse(body: bytes | msgspec.Raw, kind: type[R], decode: Any, refused: dict[str, tuple[Any, ...]]) -> R:
    request = _parse_at_once(body, decode) or parse_fields(body, kind, refused, decode)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("'stream_options' needs 'stream' to be true.", param="stream_options")
    return request


def _parse_at_once(body: bytes | msgspec.Raw, decode: Callable[[bytes | msgspec.Raw], R]) -> R | None:
    """The request, where nothing is wrong with it and no field can be too large: as nearly always.

    None leaves it to :func:`parse_fields`, which looks field by field and knows what to say.
    """
    if memoryview(body).nbytes > MAX_FIELD_BYTES:
        return None
    try:
        return decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def parse_fields(
    body: bytes | msgspec.Raw, kind: type[B], refused: dict[str, tuple[Any, ...]], decode: Any = None
) -> B:
    """Read a body of any kind. ``refused`` are known fields that are not served, with the values that ask for nothing.

    Raises :class:`InvalidRequestError`.
    """
    decode = decode or msgspec.json.Decoder(kind).decode
    try:
        str(body, "utf-8")
        fields = _decode_object(body)
        _check_names(fields, kind, refused)
        _check_sizes(fields)
        _check_refused(fields, refused)
        asked = {name: raw for name, raw in fields.items() if name not in refused}
        request: B = decode(msgspec.json.encode(asked))  # of a name that comes twice only what was checked
    except UnicodeDecodeError:
        raise InvalidRequestError("The body is not valid UTF-8.", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequestError("The body is not valid JSON.", code="invalid_json") from None
    return request


def _check_names(
    fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct], refused: dict[str, tuple[Any, ...]]
) -> None:
    unknown = [name for name in fields if name not in kind.__struct_fields__ and name not in refused]
    if unknown:
        named = ", ".join(_shown(name) for name in unknown[:_MAX_NAMED])
        more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
        raise InvalidRequestError(
            f"Unknown parameter: {named}{more}.", param=unknown[0][:_MAX_NAME_CHARS], code="unknown_parameter"
        )


def _check_sizes(fields: dict[str, msgspec.Raw]) -> None:
    """Before anything is built of a field: msgspec checks the length of an array after decoding all of it."""
    for name, raw in fields.items():
        if name in _BULKY:
            if bytes(raw).count(b",") > MAX_ELEMENTS:
                raise InvalidRequestError(f"'{name}' has more than {MAX_ELEMENTS} elements.", param=name)
        elif memoryview(raw).nbytes > MAX_FIELD_BYTES:
            raise InvalidRequestError(f"'{name}' is longer than {MAX_FIELD_BYTES} bytes.", param=name)


def _check_refused(fields: dict[str, msgspec.Raw], refused: dict[str, tuple[Any, ...]]) -> None:
    for name in fields.keys() & refused.keys():
        value = msgspec.json.decode(fields[name])
        if value is not None and not any(value == allowed for allowed in refused[name]):
            raise InvalidRequestError(
                f"'{name}' is not supported by this server.", param=name, code="unsupported_parameter"
            )


def validation_error(text: str) -> InvalidRequestError:
    """msgspec names the place in JSONPath; clients expect OpenAI's ``param``."""
    if missing := re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*?)`)?", text):
        name = f"{missing[2]}.{missing[1]}" if missing[2] else missing[1]
        return InvalidRequestError(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    expected, _, path = text.partition(" - at ")
    found = re.search(r"\$\.?(.*?)`", path)
    param = found[1].removesuffix("[...]") if found else ""
    if unknown := re.match(r"Object contains unknown field `(.*)`", expected):
        name = f"{param}.{unknown[1][:_MAX_NAME_CHARS]}".strip(".")
        return InvalidRequestError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
    expected = expected.replace("`", "").replace(" | null", "")
    if not param:
        return InvalidRequestError(f"The body must be a JSON object: {expected}.")
    return InvalidRequestError(f"Invalid value for '{param}': {expected[0].lower()}{expected[1:]}.", param=param)


def _shown(name: str) -> str:
    return f"'{name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + '…'}'"
