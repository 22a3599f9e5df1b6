"""A person starts the server and streams from it; nothing here kills anything."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from bench.server import Server
from tests.demo_base import NAME as BASE
from tests.e2e.conftest import stencilpress

pytestmark = pytest.mark.timeout(300)

ADAPTERS = ("json", "pirate", "support", "terse")
QUESTION = "How do I reset my password?"


def client(server: Server, key: str | None = None) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key or server.key, max_retries=0, timeout=120)


async def answer(server: Server, model: str, key: str | None = None) -> str:
    """The text of one greedy streamed chat."""
    text = ""
    async with client(server, key) as api:
        stream = await api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=32,
            stream=True,
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    return text


async def test_each_adapter_answers_in_its_own_voice_in_one_batch(server: Server) -> None:
    alone = [await answer(server, model) for model in (BASE, *ADAPTERS)]
    together = await asyncio.gather(*(answer(server, model) for model in (BASE, *ADAPTERS)))
    assert together == alone
    assert len(set(alone)) == len(alone)


async def test_the_model_list_names_base_and_adapters(server: Server) -> None:
    async with client(server) as api:
        listed = {model.id async for model in api.models.list()}
    assert {BASE, *ADAPTERS} <= listed


async def test_a_bad_key_and_an_unknown_model_are_refused_with_the_sdks_own_errors(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        await answer(server, "pirate", key="sk-wrong")
    with pytest.raises(openai.NotFoundError):
        await answer(server, "nobody")


async def test_a_rejected_adapter_disturbs_no_stream_and_leaves_no_version(
    server: Server, demo_data: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(Path("examples/adapters/pirate"), bad)
    weights = bad / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    expected = await answer(server, "pirate")
    running = asyncio.create_task(answer(server, "pirate"))
    done = await asyncio.to_thread(
        stencilpress, "adapter", "add", str(bad), "--tenant", "demo", "--name", "bad", data=demo_data
    )
    assert done.returncode == 1
    assert await running == expected
    with pytest.raises(openai.NotFoundError):
        await answer(server, "bad")
    assert not any((demo_data / "v1" / "staging").iterdir())


async def test_an_adapter_added_while_serving_is_served_at_once(server: Server, demo_data: Path) -> None:
    source = "examples/adapters/terse"
    name = "a-copy"
    done = await asyncio.to_thread(
        stencilpress, "adapter", "add", source, "--tenant", "demo", "--name", name, data=demo_data
    )
    assert done.returncode == 0, done.stderr
    assert await answer(server, name) == await answer(server, "terse")


def test_a_second_server_on_the_same_folder_is_refused(server: Server, demo_data: Path) -> None:
    done = stencilpress("serve", "--port", "0", data=demo_data)
    assert done.returncode != 0
    assert "already" in done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_printed_curl_command_works_when_pasted(server: Server) -> None:
    [command] = [line.strip() for line in server.log.read_text().splitlines() if line.strip().startswith("curl ")]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "data: [DONE]" in done.stdout
