"""Token ids to text, one token at a time, exactly as decoding all of them at once would do it.

For every sequence of ids, the joined results of :meth:`Detokenizer.push` and :meth:`Detokenizer.finish` equal
``Tokenizer.decode(ids, skip_special_tokens=True)``, and no piece ends inside a character. A token costs one
table look-up and one step of an incremental UTF-8 decoder.

``tokenizers.decoders.DecodeStream`` is not used: it has no final flush, so a text that ends inside a character
loses its tail, and it raises when a run of byte tokens that began as valid UTF-8 turns out not to be.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class UnsupportedDecoderError(ValueError):
    """A tokenizer whose decoder cannot be followed token by token; the text names it."""


class Detokenizer:
    """The text of one stream. Made by :meth:`TokenTable.stream`; not shared between streams."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes: may be empty, never ends inside a character."""
        raise NotImplementedError

    def finish(self) -> str:
        """What is still held back when the stream ends: U+FFFD for an unfinished character."""
        raise NotImplementedError


class TokenTable:
    """What each token id adds to a text; one for all streams of a tokenizer.

    Raises :class:`UnsupportedDecoderError` for decoders other than byte-level, metaspace, none, and the
    replace / byte-fallback / fuse / strip sequence of SentencePiece models.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        facts = json.loads(tokenizer.to_str())
        special = {token["id"] for token in facts["added_tokens"] if token["special"]}
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        names: list[str | None] = [None] * (max(vocab.values(), default=-1) + 1)
        for name, token in vocab.items():
            names[token] = name
        for added in facts["added_tokens"]:  # an added token wins over a vocabulary entry of the same id
            names[added["id"]] = added["content"]
        kept = [None if token in special else name for token, name in enumerate(names)]
        decoder = facts["decoder"]
        if decoder is not None and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        kind = None if decoder is None else decoder["type"]
        self._bytes = [_token_bytes(name, kind) for name in names]
        self._new = _stream_factory(kept, decoder)

    def stream(self) -> Detokenizer:
        """A detokenizer for one new stream."""
        return self._new()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for by itself, special tokens included (for logprobs)."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""


def _stream_factory(names: Sequence[str | None], decoder: dict[str, Any] | None) -> Callable[[], Detokenizer]:
    """Choose how the text is built. ``names[id]`` is None for ids that are skipped."""
    if decoder is None:
        joined: list[str | int | None] = list(names)
        return lambda: _PieceDetokenizer(joined, separator=" ")
    match decoder["type"]:
        case "ByteLevel":
            raw = [b"" if name is None else byte_level_bytes(name) for name in names]
            return lambda: _ByteDetokenizer(raw)
        case "Metaspace":
            mark = decoder["replacement"]
            spaced: list[str | int | None] = [None if name is None else name.replace(mark, " ") for name in names]
            if decoder["prepend_scheme"] == "never":
                return lambda: _PieceDetokenizer(spaced)
            unspaced = [None if name is None else name.replace(mark, "") for name in names]
            return lambda: _PieceDetokenizer(spaced, first=unspaced)
        case "Sequence":
            return _sentencepiece_factory(names, decoder["decoders"])
    raise UnsupportedDecoderError(f"tokenizer decoder {decoder['type']!r} is not supported")


def _sentencepiece_factory(names: Sequence[str | None], steps: list[dict[str, Any]]) -> Callable[[], Detokenizer]:
    """The steps of a SentencePiece model, in this order: Replace…, ByteFallback, Fuse, Strip at the start."""
    kinds = [step["type"] for step in steps]
    if not re.fullmatch("(Replace )*(ByteFallback )?(Fuse (Strip )?)?", "".join(f"{kind} " for kind in kinds)):
        raise UnsupportedDecoderError(f"tokenizer decoder sequence {' → '.join(kinds)} is not supported")
    texts = list(names)
    for step in steps:
        if step["type"] != "Replace":
            break
        if "String" not in step["pattern"]:
            raise UnsupportedDecoderError("tokenizer decoder Replace with a regular expression is not supported")
        texts = [text and text.replace(step["pattern"]["String"], step["content"]) for text in texts]
    strip = ("", 0)
    if kinds[-1:] == ["Strip"]:
        strip = (steps[-1]["content"], steps[-1]["start"])
        if steps[-1]["stop"]:
            raise UnsupportedDecoderError("tokenizer decoder Strip at the end is not supported")
    bytes_too = "ByteFallback" in kinds
    pieces: list[str | int | None] = [_byte_value(text) if bytes_too else text for text in texts]
    return lambda: _PieceDetokenizer(pieces, strip=strip)


def _byte_value(name: str | None) -> str | int | None:
    match = _BYTE_TOKEN.fullmatch(name) if name is not None else None
    return name if match is None else int(match[1], 16)


class _ByteDetokenizer(Detokenizer):
    """Byte-level BPE: tokens are runs of bytes, the text is their UTF-8 with the usual replacements."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decode = _new_utf8_decoder("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._pieces[token]) if token < len(self._pieces) else ""

    def finish(self) -> str:
        return self._decode(b"", True)


class _PieceDetokenizer(Detokenizer):
    """Tokens are pieces of text, single bytes (``int``) or nothing (``None``).

    A run of single bytes is text if all of it is valid UTF-8 and one U+FFFD per byte otherwise, so a run is
    held back until the token after it: a later byte can still turn all of it.
    """

    def __init__(
        self,
        pieces: Sequence[str | int | None],
        *,
        first: Sequence[str | None] | None = None,
        separator: str = "",
        strip: tuple[str, int] = ("", 0),
    ) -> None:
        self._pieces = pieces
        self._first = first
        self._separator = separator
        self._strip_char, self._strip_left = strip
        self._run = bytearray()
        self._at_start = True

    def push(self, token: int) -> str:
        piece = self._pieces[token] if token < len(self._pieces) else None
        if piece is None:
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            self._at_start = False
            return ""
        if self._at_start:
            self._at_start = False
            return self._stripped(piece if self._first is None else self._first[token] or "")
        text = self._separator + piece
        return self._stripped(self._take_run() + text if self._run else text)

    def finish(self) -> str:
        return self._stripped(self._take_run())

    def _take_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        """Drop what is left to drop at the very start of the text."""
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins for bytes of GPT-2's byte-level BPE: character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_level_alphabet()


def byte_level_bytes(name: str) -> bytes:
    """Bytes of a byte-level token; a token with any other character (an added one) is its own text."""
    try:
        return bytes([_BYTE_OF[char] for char in name])
    except KeyError:
        return name.encode()


def _token_bytes(name: str | None, kind: str | None) -> bytes:
    if name is None:
        return b""
    if kind == "ByteLevel":
        return byte_level_bytes(name)
    value = _byte_value(name)
    return bytes([value]) if isinstance(value, int) else name.replace("▁", " ").encode()


class StopStrings:
    """Stop strings of one request as an Aho-Corasick automaton; shared by its choices.

    Alfred V. Aho and Margaret J. Corasick, "Efficient string matching", CACM 18(6), 1975. The depth of the
    automaton's state is the length of the longest suffix of the text that may still become a stop string,
    which is exactly what has to be held back; a character costs amortised constant time.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]
        """Length of the longest stop string that ends in a state, 0 for none."""
        for stop in stops:
            self._add(stop)
        self.fail = self._failures()
        self.first_characters = frozenset(self.next[0])

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.depth.append(self.depth[state] + 1)
                self.next.append({})
                self.match.append(0)
            state = self.next[state][char]
        self.match[state] = len(stop)

    def _failures(self) -> list[int]:
        fail = [0] * len(self.next)
        queue = list(self.next[0].values())
        for state in queue:  # grows while it is read: breadth first
            for char, child in self.next[state].items():
                fail[child] = self.step(fail, fail[state], char)
                self.match[child] = self.match[child] or self.match[fail[child]]
                queue.append(child)
        return fail

    def step(self, fail: Sequence[int], state: int, char: str) -> int:
        """The state after ``char``."""
        while state and char not in self.next[state]:
            state = fail[state]
        return self.next[state].get(char, 0)


class StopFilter:
    """Lets the text of one choice through up to the first stop string, and never a part of one.

    "First" is the stop string that is complete first, whatever the tokens were.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown. Sets ``stopped`` when a stop string is complete."""
        stops = self._stops
        if not self._state and stops.first_characters.isdisjoint(text):
            return text
        text = self._held + text
        state = self._state
        for end in range(len(self._held), len(text)):
            state = stops.step(stops.fail, state, text[end])
            if stops.match[state]:
                self.stopped = True
                self._state, self._held = 0, ""
                return text[: end + 1 - stops.match[state]]
        self._state = state
        shown = len(text) - stops.depth[state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, once it is certain that no stop string will be completed."""
        held, self._held, self._state = self._held, "", 0
        return held
