"""``/tokenize`` and ``/detokenize`` against the tokenizer's own library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from stencilpress.gateway.catalog.adapters import set_defaults
from stencilpress.gateway.catalog.tenants import get_tenant
from stencilpress.gateway.defaults import VersionDefaults
from tests.integration.gateway_harness import Gateway, running_gateway

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    "{% if enable_thinking %}zz{% endif %}"
)
TEXT = "zz qqq Grüße <|eos|> 日本"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path, template=TEMPLATE) as running:
        yield running


@pytest.fixture
def reference(gateway: Gateway) -> Tokenizer:
    return Tokenizer.from_file(str(Path(gateway.services.settings.model_dir) / "tokenizer.json"))


async def test_a_text_is_tokenised_as_completions_do(gateway: Gateway, reference: Tokenizer) -> None:
    status, answer = await gateway.post("/tokenize", {"model": "pirate", "prompt": TEXT, "return_token_strs": True})
    encoded = reference.encode(TEXT)
    expected = {"tokens": encoded.ids, "count": len(encoded.ids), "max_model_len": 512, "token_strs": encoded.tokens}
    assert (status, answer) == (200, expected)
    status, answer = await gateway.post("/detokenize", {"model": "pirate", "tokens": encoded.ids})
    assert (status, answer) == (200, {"prompt": TEXT})


@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        ({}, "ab>"),
        ({"add_generation_prompt": False}, "ab"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "add_special_tokens": False}, "ab>zz"),
    ],
)
async def test_a_chat_is_tokenised_as_chats_are(
    gateway: Gateway, reference: Tokenizer, options: dict[str, Any], rendered: str
) -> None:
    status, answer = await gateway.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}], **options})
    assert status == 200
    assert answer["tokens"] == reference.encode(rendered, add_special_tokens=False).ids
    assert answer["token_strs"] is None


async def test_a_chats_count_is_that_of_its_usage(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": TEXT}]
    _, counted = await gateway.post("/tokenize", {"messages": messages})
    _, answer = await gateway.post("/v1/chat/completions", {"model": "base", "messages": messages, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == counted["count"]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "invalid_value", "prompt"),
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/tokenize", {"promt": "a"}, "unknown_parameter", "promt"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "unsupported_parameter", "tools"),
        ("/tokenize", {"prompt": "a b " * 20_000}, "context_length_exceeded", "prompt"),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, "model_not_found", "model"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "invalid_value",
            "add_special_tokens",
        ),
        ("/detokenize", {"tokens": [10**9]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens[0]"),
        ("/detokenize", {}, "missing_required_parameter", "tokens"),
        ("/detokenize", {"model": "nobody", "tokens": []}, "model_not_found", "model"),
    ],
)
async def test_what_cannot_be_answered_is_named(
    gateway: Gateway, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    status, answer = await gateway.post(path, body)
    assert status in (400, 404)
    assert (answer["error"]["code"], answer["error"]["param"]) == (code, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_key_is_needed(gateway: Gateway, path: str) -> None:
    assert (await gateway.post(path, {}, headers={"Authorization": "Bearer no"}))[0] == 401


async def test_a_versions_system_prompt_counts_as_in_a_chat(gateway: Gateway) -> None:
    services = gateway.services
    demo = await get_tenant(services.db, "demo")
    await set_defaults(services.db, demo.id, "pirate", 1, VersionDefaults(system_prompt="qq zz talk like a pirate"))
    await services.changes.poll()
    asked = {"model": "pirate", "messages": [{"role": "user", "content": "ab"}]}
    _, counted = await gateway.post("/tokenize", asked)
    _, answer = await gateway.post("/v1/chat/completions", {**asked, "max_tokens": 1})
    assert counted["count"] == answer["usage"]["prompt_tokens"]
    _, plain = await gateway.post("/tokenize", {**asked, "model": "pirate@2"})
    assert plain["count"] < counted["count"]
    own = [{"role": "system", "content": ""}, *asked["messages"]]
    _, replaced = await gateway.post("/tokenize", {"model": "pirate", "messages": own})
    assert replaced["count"] == plain["count"]
