"""What bodies are accepted and how each fault is told: the field, and the limit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stencilpress.engine.messages import Welcome
from stencilpress.gateway.api.sampling import Limits, choice_seeds, max_tokens_of, sampling_of, stop_ids_of
from stencilpress.gateway.api.schemas import (
    MAX_ELEMENTS,
    MAX_MESSAGES,
    ChatRequest,
    message_texts,
    parse_chat,
    parse_completion,
)
from stencilpress.gateway.catalog.records import TenantLimits
from stencilpress.gateway.errors import ContextLengthError, InvalidRequestError

SLOW_START = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Hypothesis builds its Unicode tables on first use, which takes seconds."""

MESSAGE = {"role": "user", "content": "hi"}
LIMITS = Limits(max_model_len=100, vocab_size=1000, default_max_tokens=40, eos_ids=(2,))


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [MESSAGE], **fields}).encode()


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(chat_body(**fields))


def refusal(body: bytes, parse: Any = parse_chat) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(body)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("n", 0, "n': expected int >= 1"),
        ("n", 17, "n': expected int <= 16"),
        ("n", 10**9, "n': expected int <= 16"),
        ("n", True, "n': expected int, got bool"),
        ("max_tokens", 0, "max_tokens': expected int >= 1"),
        ("max_tokens", -1, "max_tokens': expected int >= 1"),
        ("max_tokens", 1.5, "max_tokens': expected int, got float"),
        ("max_completion_tokens", 0, "max_completion_tokens': expected int >= 1"),
        ("temperature", -0.1, "temperature': expected float >= 0.0"),
        ("temperature", 2.1, "temperature': expected float <= 2.0"),
        ("top_p", 1.1, "top_p': expected float <= 1.0"),
        ("top_p", -1, "top_p': expected float >= 0.0"),
        ("priority", -101, "priority': expected int >= -100"),
        ("priority", 101, "priority': expected int <= 100"),
        ("max_wait_ms", 0, "max_wait_ms': expected int >= 1"),
        ("max_wait_ms", 3_600_001, "max_wait_ms': expected int <= 3600000"),
        ("min_p", 2, "min_p': expected float <= 1.0"),
        ("top_k", -2, "top_k': expected int >= -1"),
        ("presence_penalty", 2.5, "presence_penalty': expected float <= 2.0"),
        ("frequency_penalty", -2.5, "frequency_penalty': expected float >= -2.0"),
        ("repetition_penalty", 0.009, "repetition_penalty': expected float >= 0.01"),
        ("seed", 2**63, "seed': expected int <= 9223372036854775807"),
        ("seed", "7", "seed': expected int, got str"),
        ("stop", ["a"] * 5, "stop': expected array of length <= 4"),
        ("stop", "", "stop': expected str of length >= 1"),
        ("stop", "x" * 257, "stop': expected str of length <= 256"),
        ("stop", ["x" * 257], "stop[0]': expected str of length <= 256"),
        ("stop_token_ids", [1] * 65, "stop_token_ids': expected array of length <= 64"),
        ("logit_bias", {"1": 101}, "logit_bias': expected float <= 100.0"),
        ("logit_bias", {"a": 1}, "logit_bias': expected int, got str"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias': expected object of length <= 1024"),
        ("top_logprobs", 21, "top_logprobs': expected int <= 20"),
        ("messages", [], "messages': expected array of length >= 1"),
        ("messages", "hi", "messages': expected array, got str"),
        ("messages", [MESSAGE] * (MAX_MESSAGES + 1), "messages': expected array of length <= 4096"),
        ("model", "", "model': expected str of length >= 1"),
        ("model", 7, "model': expected str, got int"),
        ("stream", "yes", "stream': expected bool, got str"),
        ("user", 7, "user': expected str, got int"),
        ("metadata", {"a": 1}, "metadata[...]': expected str, got int"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_limit(field: str, value: Any, told: str) -> None:
    error = refusal(chat_body(**{field: value}))
    assert told.replace("[...]", "") in error.message
    assert error.param is not None
    assert error.param.partition("[")[0] == field
    assert error.status == 400


@pytest.mark.parametrize("field", ["stop", "logit_bias", "user", "metadata", "stop_token_ids", "unknown"])
def test_a_huge_field_is_refused_before_it_is_built(field: str) -> None:
    body = chat_body(**{field: ["a"] * 1_000_000})
    assert refusal(body).param == field


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_too_many_elements_are_refused_before_they_are_built(parse: Any) -> None:
    fields = {"model": "m", "messages" if parse is parse_chat else "prompt": [1] * (MAX_ELEMENTS + 2)}
    assert str(MAX_ELEMENTS) in refusal(json.dumps(fields).encode(), parse).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("moderation", {"model": "m"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("parallel_tool_calls", True),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(chat_body(**{field: value}))
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert chat(**{field: None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("parallel_tool_calls", False),
        ("user", "u1"),
        ("metadata", {"a": "b"}),
        ("store", False),
        ("service_tier", "auto"),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
        ("prompt_cache_retention", "24h"),
        ("stop", None),
        ("stop", []),
        ("logit_bias", {}),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_field_that_asks_for_nothing_special_is_accepted(field: str, value: Any) -> None:
    assert chat(**{field: value})


@pytest.mark.parametrize("field", ["prompt_embeds", "lora_path", "adapter", "guided_json", "min_tokens", "maxtokens"])
def test_an_unknown_field_is_refused_by_name(field: str) -> None:
    error = refusal(chat_body(**{field: 1}))
    assert (error.param, error.code) == (field, "unknown_parameter")


def test_all_unknown_fields_are_named_up_to_a_bound() -> None:
    assert refusal(chat_body(foo=1, bar=2)).message == "Unknown parameter: 'foo', 'bar'."
    many = refusal(chat_body(**{f"{'k' * 1000}{i}": 1 for i in range(20)}))
    assert "and 12 more" in many.message
    assert len(many.message) < 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "stream_options": {"include_usage": True, "x": 1}}, "stream_options.x"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [MESSAGE, {"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
    ],
)
def test_a_fault_inside_a_field_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat_body(**fields)).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
    ],
)
def test_a_message_that_cannot_be_shown_to_the_model_is_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        message_texts(chat(messages=[message]).messages)
    assert caught.value.param == param


def test_messages_reach_the_template_as_texts() -> None:
    sdk_answer: dict[str, Any] = {
        "role": "assistant",
        "content": "b",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    request = chat(
        messages=[
            {"role": "developer", "content": "a"},
            {**sdk_answer, "tool_calls": None, "function_call": None},
            {"role": "user", "content": parts, "name": "eve"},
            {"role": "assistant", "content": None, "refusal": "no"},
        ]
    )
    assert message_texts(request.messages) == [
        {"role": "system", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c\nd", "name": "eve"},
        {"role": "assistant", "content": "no"},
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"m"',
        b"\xff\xfe",
        b'{"model":"\xff"}',
        b'{"model":"m","user":{"x":"\xff"}}',
        '{"model":"m"}'.encode("utf-16"),
        b'{"model":"\\ud800","messages":[]}',
        b'{"model":"m","temperature":NaN}',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_broken_json_is_told_as_such(body: bytes) -> None:
    assert refusal(body).code == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    assert "must be a JSON object" in refusal(body).message


def test_a_missing_field_is_named() -> None:
    assert refusal(b'{"model":"m"}').message == "Missing required parameter: 'messages'."
    assert refusal(b'{"messages":[]}').status == 400
    assert refusal(b'{"model":"m"}', parse_completion).param == "prompt"


@pytest.mark.parametrize("field", ["echo", "suffix", "best_of"])
def test_old_fields_of_completions_are_refused_unless_neutral(field: str) -> None:
    neutral = {"echo": False, "suffix": "", "best_of": 1}[field]
    body = {"model": "m", "prompt": "p", field: neutral}
    assert parse_completion(json.dumps(body).encode())
    assert refusal(json.dumps({**body, field: "x"}).encode(), parse_completion).param == field


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(SLOW_START)
@given(fields=st.dictionaries(st.sampled_from(ChatRequest.__struct_fields__), json_values, max_size=6))
def test_whatever_the_values_a_body_is_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        request = parse_chat(chat_body(**fields))
        message_texts(request.messages)
        sampling_of(request, LIMITS)
    except InvalidRequestError as error:
        assert error.message  # noqa: PT017 - both outcomes are fine, a crash is not


def test_defaults_are_openais() -> None:
    sampling = sampling_of(chat(), LIMITS)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1, 1, 0, -1)
    assert sampling_of(chat(logprobs=True), LIMITS).logprobs == 0
    assert sampling_of(chat(logprobs=True, top_logprobs=3), LIMITS).logprobs == 3
    assert sampling_of(chat(temperature=0, top_k=-1), LIMITS).temperature == 0
    assert 0 < sampling_of(chat(top_p=0), LIMITS).top_p < 1e-3


def test_stop_ids_are_the_models_own_and_the_requests() -> None:
    assert stop_ids_of(chat(), LIMITS) == (2,)
    assert stop_ids_of(chat(stop_token_ids=[7, 2]), LIMITS) == (2, 7)
    assert stop_ids_of(chat(ignore_eos=True, stop_token_ids=[7]), LIMITS) == (7,)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [-1, 1000, 10**20])
def test_a_token_id_outside_the_vocabulary_is_refused(field: str, token: int) -> None:
    def use() -> None:
        request = chat(**{field: {str(token): 1} if field == "logit_bias" else [token]})
        sampling_of(request, LIMITS)
        stop_ids_of(request, LIMITS)

    with pytest.raises(InvalidRequestError) as caught:
        use()
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


def test_max_tokens_is_what_was_asked_or_what_is_left() -> None:
    assert max_tokens_of(chat(max_tokens=7), [5] * 10, LIMITS, "messages") == 7
    assert max_tokens_of(chat(max_completion_tokens=90), [5] * 10, LIMITS, "messages") == 90
    assert max_tokens_of(chat(), [5] * 10, LIMITS, "messages") == 40
    assert max_tokens_of(chat(), [5] * 99, LIMITS, "messages") == 1


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "numbers", "param"),
    [
        ({}, 100, ("100", "100"), "messages"),
        ({}, 250, ("100", "250"), "messages"),
        ({"max_tokens": 91}, 10, ("100", "101", "90"), "max_tokens"),
        ({"max_completion_tokens": 10**12}, 10, ("100", "1000000000010"), "max_completion_tokens"),
    ],
)
def test_what_exceeds_the_context_is_refused_with_both_numbers(
    fields: dict[str, Any], prompt_tokens: int, numbers: tuple[str, ...], param: str
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        max_tokens_of(chat(**fields), [5] * prompt_tokens, LIMITS, "messages")
    assert all(number in caught.value.message for number in numbers)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_seeds_of_choices_are_fixed_by_the_first_and_all_differ() -> None:
    assert choice_seeds(42, 1) == [42]
    seeds = choice_seeds(42, 16)
    assert seeds == choice_seeds(42, 16)
    assert seeds[0] == 42
    assert len(set(seeds)) == 16
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert len(set(choice_seeds(None, 16))) == 16


def test_limits_come_from_the_engine() -> None:
    welcome = Welcome(1, 1, "b", "f", vocab_size=9, max_model_len=8, max_lora_rank=4, eos_ids=(1, 2))
    assert Limits.of(welcome, 5, TenantLimits()) == Limits(8, 9, 5, (1, 2))


@pytest.mark.parametrize(
    ("longest", "default", "expected"),
    [(None, None, 5), (None, 3, 3), (None, 7, 7), (4, None, 4), (6, None, 5), (6, 6, 6), (4, 2, 2)],
)
def test_a_tenants_default_goes_before_the_servers_and_its_longest_before_both(
    longest: int | None, default: int | None, expected: int
) -> None:
    welcome = Welcome(1, 1, "b", "f", vocab_size=9, max_model_len=8, max_lora_rank=4, eos_ids=(1, 2))
    limits = Limits.of(welcome, 5, TenantLimits(max_tokens=longest, default_max_tokens=default))
    assert (limits.default_max_tokens, limits.max_tokens) == (expected, longest)


def test_of_a_name_that_comes_twice_only_the_checked_value_is_read() -> None:
    bomb = b"[" + b"1," * 500_000 + b"1]"
    body = (
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "stop_token_ids": %b, "stop_token_ids": [7]}'
    )
    assert parse_chat(body % bomb).stop_token_ids == [7]
