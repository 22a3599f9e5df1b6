"""The conversion against what transformers, torch and tokenizers make of the same file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from stencilpress.gguf_base import GgufError, convert, to_bf16_bits
from tests.unit.tiny_gguf import SPECIAL, write_tiny_gguf

TEXTS = ["hello world", "in 2012", " 12  123", "½ ² ٣٤", "数字12と漢字", "👩‍👩‍👧 ok\n\n\tx", "it's 3.14!", ""]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def folder(gguf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted")
    found = convert(gguf_path, out)
    assert found.license == "apache-2.0"
    assert found.stored_types == ("F16", "F32", "Q4_1", "Q8_0")
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_tensors_equal_transformers_own_conversion(gguf_path: Path, folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    wanted = {name: t.bfloat16() for name, t in expected.state_dict().items() if name != "lm_head.weight"}
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name


def test_transformers_loads_the_folder_and_computes_the_same(gguf_path: Path, folder: Path) -> None:
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, dtype=torch.float32)
    assert ours.config.rope_parameters == theirs.config.rope_parameters
    assert ours.config.rms_norm_eps == 1e-5
    assert ours.config.tie_word_embeddings
    theirs.load_state_dict({name: tensor.bfloat16().float() for name, tensor in theirs.state_dict().items()})
    token_ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(ours(token_ids).logits, theirs(token_ids).logits)


def test_every_digit_is_a_token_of_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" 12 hello").tokens == ["Ġ", "1", "2", "Ġ", "hello"]
    assert tokenizer.encode("  w").tokens == ["Ġ", "Ġw"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_and_transformers_agrees(folder: Path, tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    assert tokenizer.decode(token_ids) == text
    assert AutoTokenizer.from_pretrained(folder).encode(text) == token_ids


def test_special_tokens_and_chat_template(folder: Path, tokenizer: Tokenizer) -> None:
    assert [tokenizer.encode(token).ids for token in SPECIAL] == [[0], [1], [2]]
    assert tokenizer.decode([1, *tokenizer.encode("hello").ids, 2]) == "hello"
    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 2)
    assert loaded.model_max_length == 128
    text = loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_bf16_rounding_equals_torch() -> None:
    patterns = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([patterns, ties, ties + np.uint32(1), ties - np.uint32(1)]).view(np.float32)
    ours = torch.from_numpy(to_bf16_bits(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()].view(torch.int16), theirs[~theirs.isnan()].view(torch.int16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2'"),
        ({"pre_tokenizer": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
    ],
)
def test_what_cannot_be_translated_exactly_is_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    write_tiny_gguf(tmp_path / "odd.gguf", **change)
    with pytest.raises(GgufError, match=message):
        convert(tmp_path / "odd.gguf", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
