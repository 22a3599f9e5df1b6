"""Smoke prompts, asked of the fake engine, which echoes: what passes, and each way not to."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import unpack_tokens
from stencilpress.gateway.catalog.records import Tenant, TenantLimits, Version
from stencilpress.gateway.defaults import VersionDefaults
from stencilpress.gateway.errors import EngineLostError, InvalidRequestError
from stencilpress.gateway.lifecycle.smoke import SmokeMessage, SmokePrompt, SmokeResult, check_prompts, run_suite
from stencilpress.gateway.tokenizer import ModelTokenizer
from tests.fakes.engine import FakeEngine, Options, running_engine
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, build_model

SOUND, BROKEN, LOST, IDLE = "a" * 64, "b" * 64, "c" * 64, "d" * 64
TENANT = Tenant(7, "acme", TenantLimits(weight=2.0), b"s" * 32, datetime.now(UTC), None)
OPTIONS = Options(
    vocab_size=VOCAB_SIZE,
    eos_ids=(EOS,),
    max_model_len=64,
    reversing=frozenset({SOUND, BROKEN}),
    broken=frozenset({BROKEN}),
    missing=frozenset({LOST}),
)


def version(digest: str, **changes: Any) -> Version:
    made = Version("helper", 1, digest, "b", False, (8,), ("q_proj",), 1, ("x",), datetime.now(UTC))
    return dataclasses.replace(made, **changes)


def prompt(text: str, **changes: Any) -> SmokePrompt:
    return SmokePrompt(messages=[SmokeMessage("user", text)], max_tokens=len(text), **changes)


@asynccontextmanager
async def pressed(folder: Path) -> AsyncIterator[tuple[EngineClient, ModelTokenizer, FakeEngine]]:
    tokenizer = ModelTokenizer(build_model(folder / "model"))
    with running_engine(folder / "engine.sock", OPTIONS) as engine:
        async with EngineClient(folder / "engine.sock") as client:
            await client.wait_ready()
            yield client, tokenizer, engine


async def run(folder: Path, digest: str, *prompts: SmokePrompt, **changes: Any) -> tuple[bool, list[SmokeResult]]:
    async with pressed(folder) as (client, tokenizer, _):
        return await run_suite(client, tokenizer, TENANT, version(digest, **changes), prompts)


async def test_a_version_that_answers_as_it_must_passes(tmp_path: Path) -> None:
    passed, (first, second) = await run(tmp_path, SOUND, prompt("abc", must_match="^cba$"), prompt("de"))
    assert passed
    assert first == SmokeResult(
        passed=True, text="cba", base_text="abc", error="", finite=True, matched=True, same_as_base=False
    )
    assert (second.text, second.matched) == ("ed", None)


async def test_requests_are_greedy_and_the_tenants_own(tmp_path: Path) -> None:
    async with pressed(tmp_path) as (client, tokenizer, engine):
        await run_suite(client, tokenizer, TENANT, version(SOUND), [prompt("abc")])
        assert [submit.adapter for submit in engine.submits] == [SOUND, ""]
        for submit in engine.submits:
            assert (submit.tenant, submit.weight, submit.salt) == (7, 2.0, b"s" * 32)
            assert (submit.sampling.temperature, submit.sampling.logprobs) == (0.0, 0)


async def test_the_versions_system_prompt_is_part_of_the_question(tmp_path: Path) -> None:
    async with pressed(tmp_path) as (client, tokenizer, engine):
        made = version(SOUND, defaults=VersionDefaults(system_prompt="xy"))
        await run_suite(client, tokenizer, TENANT, made, [prompt("abc")])
        assert {tuple(unpack_tokens(submit.prompt)) for submit in engine.submits} == {tuple(tokenizer.encode("xyabc"))}


async def test_one_answer_of_its_own_is_enough_but_none_is_not(tmp_path: Path) -> None:
    passed, _ = await run(tmp_path, SOUND, prompt("aba"), prompt("abc"))  # the first reads the same backwards
    assert passed
    passed, results = await run(tmp_path, IDLE, prompt("abc"), prompt("de"))
    assert not passed
    assert all(result.passed and result.same_as_base for result in results)


@pytest.mark.parametrize(
    ("digest", "changes", "field"),
    [
        (BROKEN, {}, {"finite": False}),
        (LOST, {}, {"error": "the engine refused: adapter_unavailable"}),
        (SOUND, {"must_match": "abc"}, {"matched": False}),
        (SOUND, {"must_match": r"(c+)+\d"}, {"matched": False}),
    ],
)
async def test_each_way_to_fail(tmp_path: Path, digest: str, changes: dict[str, Any], field: dict[str, Any]) -> None:
    passed, (result, good) = await run(tmp_path, digest, prompt("abc", **changes), prompt("de"))
    assert not passed
    assert not result.passed
    for name, value in field.items():
        assert getattr(result, name) == value
    assert good.passed == (digest == SOUND)


async def test_a_prompt_that_does_not_fit_fails_by_name(tmp_path: Path) -> None:
    passed, (result,) = await run(tmp_path, SOUND, prompt("abcdefgh" * 20))
    assert not passed
    assert result.error


async def test_without_an_engine_there_is_no_verdict(tmp_path: Path) -> None:
    async with pressed(tmp_path) as (client, tokenizer, engine):
        engine.pause()
        engine.crash()
        with pytest.raises(EngineLostError):
            await run_suite(client, tokenizer, TENANT, version(SOUND), [prompt("abc")])


async def test_an_expression_that_never_ends_fails_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stencilpress.gateway.lifecycle.smoke.MATCH_LIMIT_S", 1.0)
    hard = SmokePrompt(messages=[SmokeMessage("user", "a" * 40)], max_tokens=40, must_match="(a+)+$b")
    passed, (result,) = await run(tmp_path, SOUND, hard)
    assert not passed
    assert result.matched is False


async def test_patterns_are_checked_when_they_are_set() -> None:
    await check_prompts([prompt("a"), prompt("a", must_match="[a-z]+")])
    with pytest.raises(InvalidRequestError) as caught:
        await check_prompts([prompt("a"), prompt("a", must_match="[a-z")])
    assert caught.value.param == "prompts[1].must_match"
