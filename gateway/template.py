"""Chat templates: messages to one prompt text, as Hugging Face tokenizers render them.

Only the base model's own template, which the operator chose, is ever rendered; a template in an adapter is
ignored. It runs in Jinja2's immutable sandbox all the same. The sandbox limits what a template may touch,
not what it may compute.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

BREAK = "\ufdd0"
"""A Unicode noncharacter that :func:`defuse` puts inside a control token, to be taken out by the encoder."""

_TEMPLATE_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class TemplateError(ValueError):
    """The template refused the messages, or failed on them; the text is for the caller."""


class _RaisedByTemplateError(jinja2.TemplateError):
    """``raise_exception(...)`` in a template: the only text of a template that a caller gets to see."""


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what a model writes, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja2 reads

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Raises :class:`TemplateError` when the source does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the names a template may use, ``bos_token`` and so on."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._constants = {**environment.globals, "tools": None, "documents": None, **special_tokens}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The prompt, up to where the assistant's answer begins if asked. ``variables`` are the template's options."""
        given = {"messages": messages, "add_generation_prompt": generation_prompt, **(variables or {})}
        try:
            # As `render` does it, but for the globals, which that would gather anew: half of a short template's time.
            context = self._template.new_context({**self._constants, **given}, shared=True)
            return "".join(self._template.root_render_func(context))
        except _RaisedByTemplateError as error:
            raise TemplateError(f"The model's chat template refused the messages: {error.message}") from error
        except (*_TEMPLATE_FAULTS, RecursionError) as error:
            raise TemplateError("The model's chat template cannot render these messages.") from error


def load_chat_template(model_dir: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a model folder: ``chat_template.jinja``, else the tokenizer's; None if it has none."""
    source = _template_source(model_dir)
    return None if source is None else ChatTemplate(source, special_tokens)


def _template_source(model_dir: Path) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    config = model_dir / "tokenizer_config.json"
    if not config.exists():
        return None
    stored: str | list[dict[str, str]] | None = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(stored, list):  # several by name, as older tokenizers have them
        return {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored


def control_token_pattern(control_tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches, without consuming it, the place before any control token: overlapping ones are all found."""
    longest_first = sorted((token for token in control_tokens if len(token) > 1), key=len, reverse=True)
    return re.compile(f"(?={'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def defuse(text: str, control_tokens: re.Pattern[str]) -> str:
    """Break every control token in a user's text after its first character, so that it stays text.

    A text without one, that is nearly every text, is returned unchanged. A stray :data:`BREAK` becomes U+FFFD.
    """
    if BREAK in text:
        text = text.replace(BREAK, "\ufffd")
    starts = [match.start() for match in control_tokens.finditer(text)]
    if not starts:
        return text
    cuts = [0, *(start + 1 for start in starts), len(text)]
    return BREAK.join(text[begin:end] for begin, end in itertools.pairwise(cuts))


def _raise_exception(message: str) -> None:
    raise _RaisedByTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja2's own filter, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
