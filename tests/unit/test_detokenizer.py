"""Incremental detokenisation against the tokenizers library, which decodes all ids at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from stencilpress.gateway.detokenizer import StopFilter, StopStrings, TokenTable, UnsupportedDecoderError
from tests.demo_base import demo_base_folder

SLOW_START = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Hypothesis builds its Unicode tables on first use, which takes seconds."""

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic: 42 + 1 = 43.\n\n    def f(x):\n\treturn x\n",
    "中文字符和日本語のテキスト、한국어 텍스트도 있습니다。",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 🏳️‍🌈 🇪🇺 é ñ Å ก็ שָׁלוֹם",
]
HARD_TEXTS = [
    "👩‍👩‍👧‍👦👨🏽‍🚀🏳️‍🌈🇪🇺",
    "中文字符，日本語、한국어。",
    "e\u0301 n\u0303 \u0e01\u0e47 שָׁלוֹם",
    "a\ufffdb \ufeffBOM \u2028 zero\u200bwidth",
    "  two  spaces \n\n\ttabs ",
    "",
]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE as Llama 3, Qwen and SmolLM have it, trained on little so that most characters are split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<｜begin▁of｜>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("名前", special=False)])
    return tokenizer


SENTENCEPIECE_DECODERS = {
    "llama-2": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "one-step": decoders.Sequence([decoders.Metaspace()]),
    "none": None,
}


@cache
def byte_fallback(decoder: str) -> Tokenizer:
    """A SentencePiece-like BPE: pieces with ▁, and one token per byte for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁a", "the", "e", "qu", "中", "é", "\ufffd", "▁<0x", "."]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool▁x>", special=False)])
    tokenizer.decoder = SENTENCEPIECE_DECODERS[decoder]
    return tokenizer


@cache
def demo_base() -> Tokenizer:
    """The real tokenizer of the demo base."""
    return Tokenizer.from_file(str(demo_base_folder() / "tokenizer.json"))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "demo-base": demo_base,
    **{name: (lambda name=name: byte_fallback(name)) for name in SENTENCEPIECE_DECODERS},  # type: ignore[misc]
}


@cache
def table(name: str) -> TokenTable:
    return TokenTable(TOKENIZERS[name]())


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in tokens]


def pieces_of(name: str, ids: list[int]) -> list[str]:
    stream = table(name).stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


def full_decode(name: str, ids: list[int]) -> str:
    text: str = TOKENIZERS[name]().decode(ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(SLOW_START, max_examples=300)
def test_any_ids_give_the_text_of_decoding_them_at_once(name: str, data: st.DataObject) -> None:
    size = TOKENIZERS[name]().get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=40))  # some ids have no token at all
    assert "".join(pieces_of(name, ids)) == full_decode(name, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(SLOW_START, max_examples=300)
def test_runs_of_byte_tokens_give_the_text_of_decoding_them_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if name in ("byte-level", "demo-base") else None
    tokens = sorted(alphabet) if alphabet else [f"<0x{byte:02X}>" for byte in range(256)]
    ids = [token for token in map(tokenizer.token_to_id, tokens) if token is not None]
    drawn = data.draw(st.lists(st.sampled_from(ids), max_size=24))
    assert "".join(pieces_of(name, drawn)) == full_decode(name, drawn)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=st.one_of(
        st.text(max_size=40), st.sampled_from(HARD_TEXTS), st.lists(st.sampled_from(HARD_TEXTS)).map("".join)
    )
)
@settings(SLOW_START, max_examples=200)
def test_encoded_text_streams_without_broken_characters(name: str, text: str) -> None:
    ids = TOKENIZERS[name]().encode(text, add_special_tokens=False).ids
    pieces = pieces_of(name, ids)
    whole = full_decode(name, ids)
    assert "".join(pieces) == whole
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd")


def test_characters_arrive_as_soon_as_they_are_complete() -> None:
    ids = byte_level().encode("龍馬傳").ids
    pieces = pieces_of("byte-level", ids)
    assert len(ids) > 3
    assert [piece for piece in pieces if piece] == ["龍", "馬", "傳"]
    assert pieces[-1] == ""


def test_byte_run_that_turns_invalid_is_not_shown_early() -> None:
    ids = ids_of(byte_fallback("llama-2"), "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "e")
    assert pieces_of("llama-2", ids) == ["", "", "", "", "\ufffd" * 4 + "e", ""]


def test_special_token_inside_a_byte_run_does_not_end_it() -> None:
    ids = ids_of(byte_fallback("llama-2"), "<0xE2>", "</s>", "<0x82>", "<0xAC>", "e")
    assert "".join(pieces_of("llama-2", ids)) == "€e" == full_decode("llama-2", ids)


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), "ByteLevel"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "at the end"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "Strip"),
    ],
)
def test_decoders_that_cannot_be_followed_are_refused_by_name(decoder: decoders.Decoder, named: str) -> None:
    tokenizer = byte_level()
    other = Tokenizer.from_str(tokenizer.to_str())
    other.decoder = decoder
    with pytest.raises(UnsupportedDecoderError, match=named):
        TokenTable(other)


def test_token_bytes_join_to_the_text() -> None:
    text = "".join(CORPUS)
    ids = byte_level().encode(text).ids
    assert b"".join(map(table("byte-level").token_bytes, ids)).decode() == text
    fallback = table("llama-2")
    assert fallback.token_bytes(*ids_of(byte_fallback("llama-2"), "<0xE2>")) == b"\xe2"
    assert fallback.token_bytes(10**6) == b""


def filtered(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    """All that a reader sees, piece by piece, and whether a stop string ended it."""
    stop_filter = StopFilter(StopStrings(stops))
    shown = []
    for piece in pieces:
        shown.append(stop_filter.push(piece))
        if stop_filter.stopped:
            return shown, True
    return [*shown, stop_filter.finish()], False


def first_stop(stops: list[str], text: str) -> int | None:
    """Where the stop string begins that is complete first, and of those the longest: by brute force."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


small_text = st.text(alphabet="ab ", max_size=30)


@given(
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=6), min_size=1, max_size=4),
    pieces=st.lists(small_text, max_size=20),
)
@settings(SLOW_START, max_examples=500)
def test_nothing_of_a_stop_string_is_shown_and_nothing_else_is_lost(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    cut = first_stop(stops, text)
    shown, stopped = filtered(stops, pieces)
    assert stopped == (cut is not None)
    assert "".join(shown) == (text if cut is None else text[:cut])


def test_stop_string_across_tokens_never_leaks_its_start() -> None:
    shown, stopped = filtered(["DEFGHIJ"], list("ABCDEFGHIJKLM"))
    assert shown == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert stopped


def test_false_start_of_a_stop_string_is_shown_once_it_cannot_complete() -> None:
    assert filtered(["aab"], ["a", "a", "a", "c"]) == (["", "", "a", "aac", ""], False)


def test_text_held_at_the_end_is_shown() -> None:
    assert filtered(["###"], ["x#", "#"]) == (["x", "", "##"], False)


def test_overlapping_stop_strings_end_at_the_one_complete_first() -> None:
    assert filtered(["abcd", "bc"], ["xabcd"]) == (["xa"], True)
    assert filtered(["c", "abc"], ["xabcd"]) == (["x"], True)
