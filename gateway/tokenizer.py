"""The base model's tokenizer: text to ids for prompts, ids to text for answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stencilpress.gateway.detokenizer import TokenTable
from stencilpress.gateway.template import (
    BREAK,
    ChatTemplate,
    TemplateError,
    control_token_pattern,
    defuse,
    load_chat_template,
)

PLACEHOLDER = "placeholder"
PIECE_CHARS = 64 << 10
"""A longer text is first counted in pieces: megabytes at once take more than a gigabyte, only to be refused."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class NoChatTemplateError(ValueError):
    """The base model has no chat template."""


class PromptTooLongError(ValueError):
    """The prompt has more tokens than it may have; how many was not counted."""


class ModelTokenizer:
    """Encodes prompts and knows what tokens mean. Thread-safe: encoding leaves the interpreter lock."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ``OSError`` or ``ValueError`` for a folder whose tokenizer or template cannot be used."""
        self._tokenizer = Tokenizer.from_str((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.table = TokenTable(self._tokenizer)
        special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]
        self._control_tokens = control_token_pattern(special)
        self._template = load_chat_template(model_dir, _named_tokens(model_dir))
        self._cuts = _cuts(self._tokenizer)
        self._known: dict[str, list[int]] = {"": []}
        """Ids of what stands between cuts in every prompt: control tokens, and the template's own words."""
        if self._cuts is not None and self._template is not None:
            self._learn(self._template, self._cuts)

    @property
    def vocab_size(self) -> int:
        """Ids are below this number."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_strings(self, ids: Sequence[int]) -> list[str | None]:
        """The ids as the vocabulary spells them."""
        return [self._tokenizer.id_to_token(id_) for id_ in ids]

    def encode(self, text: str, most: int = sys.maxsize, *, special: bool = True) -> list[int]:
        """Ids of a raw prompt: control tokens in it are meant, and, if ``special``, the model's own first is added.

        Raises :class:`PromptTooLongError` for a long text of surely more than ``most`` tokens.
        """
        return self._encode(text, most, special=special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        variables: Mapping[str, Any] | None = None,
        most: int = sys.maxsize,
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a chat, up to where the assistant's answer begins, or, without ``generation_prompt``, of its messages.

        Equal to Hugging Face's ``apply_chat_template``, except that a control token inside a message stays
        text: only the template can end a turn or begin one.
        Raises :class:`NoChatTemplateError`, :class:`~stencilpress.gateway.template.TemplateError`, and
        :class:`PromptTooLongError` as :meth:`encode` does.
        """
        if self._template is None:
            raise NoChatTemplateError
        safe = [{key: defuse(value, self._control_tokens) for key, value in message.items()} for message in messages]
        prompt = self._template.render(safe, variables, generation_prompt=generation_prompt)
        if BREAK not in prompt:
            return self._encode_prompt(prompt, most)
        ids: list[int] = []
        for part in prompt.split(BREAK):
            ids += self._encode(part, most, special=False)
            if len(ids) > most:
                raise PromptTooLongError
        return ids

    def _learn(self, template: ChatTemplate, cuts: re.Pattern[str]) -> None:
        """Encode once what a template puts around any message."""
        with suppress(TemplateError):  # one that wants other messages than this
            parts = cuts.split(template.render([{"role": "user", "content": PLACEHOLDER}]))
            for part in parts:
                if PLACEHOLDER not in part:
                    self._known[part] = self._encode(part, sys.maxsize, special=False)

    def _encode_prompt(self, prompt: str, most: int) -> list[int]:
        """As :meth:`_encode` does it, without the parts that are known."""
        if self._cuts is None:
            return self._encode(prompt, most, special=False)
        ids: list[int] = []
        for part in self._cuts.split(prompt):
            known = self._known.get(part)
            ids += self._encode(part, most, special=False) if known is None else known
        return ids

    def _encode(self, text: str, most: int, *, special: bool) -> list[int]:
        if len(text) > PIECE_CHARS:
            self._refuse_long(text, most)
        # The batch call releases the interpreter lock and computes no offsets; the single call does neither.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def _refuse_long(self, text: str, most: int) -> None:
        """Count in pieces, up to twice ``most``: cuts through words make a few tokens more, never twice as many."""
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            count += len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0])
            if count > 2 * most:
                raise PromptTooLongError


def _cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the added tokens, at which a text may be cut and its parts encoded alone; None where that is not so."""
    facts = json.loads(tokenizer.to_str())
    added = facts["added_tokens"]
    reaching = any(token[flag] for token in added for flag in ("lstrip", "rstrip", "single_word", "normalized"))
    first_differs = '"first"' in json.dumps(facts["pre_tokenizer"])  # Metaspace's prepend_scheme
    if reaching or first_differs or not added:
        return None
    longest_first = sorted((token["content"] for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _named_tokens(model_dir: Path) -> dict[str, str]:
    """The tokens that templates call by name, as ``tokenizer_config.json`` gives them."""
    path = model_dir / "tokenizer_config.json"
    if not path.exists():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    named = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
