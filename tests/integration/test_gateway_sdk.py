"""The unmodified OpenAI SDK against the gateway: every call a client makes, and its exception classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import OpenAI

from stencilpress.engine.messages import Submit
from tests.fakes.engine import Options
from tests.integration.gateway_harness import BASE_ID, EOS, VOCAB_SIZE, Gateway, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "héllo 👩‍👩‍👧‍👦 wörld 中文"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def echo(text: str, tokens: int, gateway: Gateway) -> str:
    """What the fake engine's echo of a prompt reads, by the tokenizers library itself."""
    tokenizer = gateway.services.tokenizer
    ids = tokenizer.encode(text)
    repeated = (ids * (tokens // len(ids) + 1))[:tokens]
    stream = tokenizer.table.stream()
    return "".join([*map(stream.push, repeated), stream.finish()])


def user(text: str = TEXT) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_a_plain_chat(gateway: Gateway) -> None:
    answer = await (await gateway.openai()).chat.completions.create(model="pirate", messages=user(), max_tokens=60)
    assert answer.object == "chat.completion"
    assert answer.model == "pirate@1"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == echo(TEXT, 60, gateway)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (60, 60 + answer.usage.prompt_tokens)


async def test_a_streamed_chat_has_the_text_of_the_plain_one(gateway: Gateway) -> None:
    api = await gateway.openai()
    stream = await api.chat.completions.create(
        model="pirate@2", messages=user(), max_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "pirate@2", "chat.completion.chunk")
    }
    *parts, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 60
    assert all(part.usage is None for part in parts)
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    deltas = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(deltas) == echo(TEXT, 60, gateway)
    assert "\ufffd" not in "".join(deltas[:-2])


async def test_choices_of_one_request_have_seeds_of_their_own(gateway: Gateway) -> None:
    api = await gateway.openai()
    answer = await api.chat.completions.create(model="base", messages=user("ab"), max_tokens=5, n=3, seed=42)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 15
    assert answer.usage.prompt_tokens == 2
    seeds = [submit.sampling.seed for submit in gateway.engine.submits]
    assert seeds[0] == 42
    assert len(set(seeds)) == 3
    await api.chat.completions.create(model="base", messages=user("ab"), max_tokens=5, seed=42)
    assert gateway.engine.submits[-1].sampling.seed == 42


async def test_streamed_choices_are_told_apart_by_index(gateway: Gateway) -> None:
    api = await gateway.openai()
    stream = await api.chat.completions.create(model="base", messages=user(), max_tokens=40, n=3, stream=True)
    texts, reasons, roles = ["", "", ""], ["", "", ""], [0, 0, 0]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
            roles[choice.index] += choice.delta.role == "assistant"
    assert texts == [echo(TEXT, 40, gateway)] * 3
    assert (reasons, roles) == (["length"] * 3, [1] * 3)


async def test_what_was_asked_reaches_the_engine(gateway: Gateway) -> None:
    await (await gateway.openai()).chat.completions.create(
        model="pirate@prod",
        messages=user("ab"),
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=-7,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"5": -100},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [9], "ignore_eos": True}
        | {"priority": 2, "max_wait_ms": 1500},
    )
    (submit,) = gateway.engine.submits
    sampling = submit.sampling
    assert (submit.adapter, submit.max_tokens, submit.stop_ids) == ("a" * 64, 3, (9,))
    assert (submit.priority, submit.max_wait_ms) == (-2, 1500), "a client's lower number is the engine's higher one"
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 4, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert (sampling.seed, sampling.logprobs, sampling.logit_bias) == (-7, 2, {5: -100})


async def test_tenants_are_kept_apart_in_the_engine(gateway: Gateway) -> None:
    for key in (gateway.key, gateway.other_key):
        await (await gateway.openai(key)).chat.completions.create(model="base", messages=user("ab"), max_tokens=1)
    first, second = gateway.engine.submits
    assert first.tenant != second.tenant
    assert first.salt != second.salt
    assert len(first.salt) >= 16


async def test_logprobs_name_each_token_and_its_bytes(gateway: Gateway) -> None:
    api = await gateway.openai()
    answer = await api.chat.completions.create(
        model="base", messages=user("aé"), max_tokens=3, logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.bytes) for entry in content] == [
        ("a", [97]),
        ("bytes:\\xc3", [0xC3]),
        ("bytes:\\xa9", [0xA9]),
    ]
    assert [top.token for entry in content for top in entry.top_logprobs] == [entry.token for entry in content]
    assert {entry.logprob for entry in content} == {-0.5}


async def test_streamed_logprobs_are_those_of_the_plain_answer(gateway: Gateway) -> None:
    api = await gateway.openai()
    asked: dict[str, Any] = {"model": "base", "messages": user("abcd ef"), "max_tokens": 12, "stop": ["efa"]}
    plain = await api.chat.completions.create(**asked, logprobs=True)
    stream = await api.chat.completions.create(**asked, logprobs=True, stream=True)
    entries: list[Any] = []
    text = ""
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries += (choice.logprobs.content or []) if choice.logprobs else []
    assert plain.choices[0].logprobs is not None
    assert entries == plain.choices[0].logprobs.content
    assert text == plain.choices[0].message.content == "abcd "
    assert "".join(entry.token for entry in entries) == text
    assert plain.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [70, 71], [[70, 71]]])
async def test_a_plain_completion_takes_text_or_ids(gateway: Gateway, prompt: Any) -> None:
    answer = await (await gateway.openai()).completions.create(model="pirate", prompt=prompt, max_tokens=4)
    assert answer.object == "text_completion"
    assert (answer.model, answer.choices[0].finish_reason) == ("pirate@1", "length")
    text = answer.choices[0].text
    assert len(text) == 4
    assert text == text[:2] * 2


async def test_several_prompts_with_several_choices_are_numbered_in_order(gateway: Gateway) -> None:
    api = await gateway.openai()
    answer = await api.completions.create(model="base", prompt=["ab", "cde"], max_tokens=6, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["ababab", "ababab", "cdecde", "cdecde"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)
    stream = await api.completions.create(model="base", prompt=["ab", "cde"], max_tokens=6, n=2, stream=True)
    texts = [""] * 4
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


async def test_logprobs_of_a_completion_have_offsets(gateway: Gateway) -> None:
    answer = await (await gateway.openai()).completions.create(model="base", prompt="aéb", max_tokens=4, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -0.5}


async def test_the_models_own_end_is_a_stop_and_is_not_shown(gateway: Gateway) -> None:
    answer = await (await gateway.openai()).completions.create(model="base", prompt=[70, EOS], max_tokens=9, logprobs=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert len(choice.text) == 1
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


async def test_models_are_listed_and_looked_up(gateway: Gateway) -> None:
    api = await gateway.openai()
    listed = [model async for model in api.models.list()]
    assert [model.id for model in listed] == [BASE_ID, "press-1b", "pirate"]
    assert {model.object for model in listed} == {"model"}
    roots = {"pirate": "pirate@1", "pirate@2": "pirate@2", BASE_ID: BASE_ID, f"{BASE_ID}:pirate": "pirate@1"}
    for name, root in roots.items():
        model = await api.models.retrieve(name)
        assert model.id == name
        assert model.model_dump()["root"] == root
    others = (await gateway.openai(gateway.other_key)).models.list()
    assert [model.id async for model in others] == [BASE_ID, "press-1b"]


async def test_errors_become_the_sdks_exceptions(gateway: Gateway) -> None:
    api = await gateway.openai()

    async def ask(api: openai.AsyncOpenAI = api, **fields: Any) -> None:
        await api.chat.completions.create(**{"model": "base", "messages": user("ab"), **fields})

    with pytest.raises(openai.AuthenticationError) as refused:
        await ask(await gateway.openai("sp_wrong"))
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        await ask(model="nobody")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await ask(await gateway.openai(gateway.other_key), model="pirate")
    with pytest.raises(openai.BadRequestError) as too_many:
        await ask(n=17)
    assert too_many.value.param == "n"
    with pytest.raises(openai.BadRequestError) as streamed:
        await ask(n=17, stream=True)
    assert streamed.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        await api.embeddings.create(model="base", input="x")


async def test_raw_responses_and_request_ids(gateway: Gateway) -> None:
    api = await gateway.openai()
    raw = await api.chat.completions.with_raw_response.create(model="base", messages=user("ab"), max_tokens=2)
    parsed = raw.parse()
    assert raw.headers["content-type"] == "application/json"
    assert parsed._request_id == raw.headers["x-request-id"]
    assert parsed._request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as refused:
        await api.chat.completions.create(model="base", messages=[])
    assert refused.value.request_id != parsed._request_id


async def test_the_sync_client_streams_too(gateway: Gateway) -> None:
    def read() -> str:
        with OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as api:
            stream = api.chat.completions.create(model="base", messages=user(), max_tokens=30, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(read) == echo(TEXT, 30, gateway)


async def test_the_sdks_stream_helper_accumulates(gateway: Gateway) -> None:
    api = await gateway.openai()
    async with api.chat.completions.stream(model="base", messages=user(), max_tokens=60, stop="中") as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT.partition("中")[0]


async def test_many_streams_at_once_do_not_mix(gateway: Gateway) -> None:
    api = await gateway.openai()

    async def one(text: str) -> str:
        stream = await api.completions.create(model="base", prompt=text, max_tokens=50, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    prompts = [f"{i}:" for i in range(40)]
    answers = await asyncio.gather(*map(one, prompts))
    assert answers == [echo(prompt, 50, gateway) for prompt in prompts]


async def test_a_missing_adapter_is_told_before_the_stream_begins(tmp_path: Path) -> None:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), missing=frozenset({"a" * 64}))
    async with running_gateway(tmp_path, options) as gateway:
        api = await gateway.openai()
        with pytest.raises(openai.InternalServerError) as refused:
            await api.chat.completions.create(model="pirate", messages=user("ab"), stream=True)
        assert (refused.value.status_code, refused.value.code) == (503, "adapter_unavailable")
        assert refused.value.response.headers["x-should-retry"] == "false"


def submitted(gateway: Gateway) -> Submit:
    (submit,) = gateway.engine.submits
    return submit


async def test_the_default_length_is_what_is_left_and_bounded(tmp_path: Path) -> None:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=40)
    for bound, expected in [(4096, 38), (9, 9)]:
        async with running_gateway(tmp_path / str(bound), options, default_max_tokens=bound) as gateway:
            await (await gateway.openai()).chat.completions.create(model="base", messages=user("ab"))
            assert submitted(gateway).max_tokens == expected
