"""The engine as a process: real model and adapters, a pool so small that they push each other out."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import Finished, Sampling, Submit, pack_tokens
from stencilpress.engine.spec import load_spec, page_geometry
from tests.fakes.engine import listen
from tests.unit.tiny_models import VOCAB, save_adapter, save_model

LIMIT_S = 50.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def adapters_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def digests(adapters_dir: Path, model_dir: Path) -> list[str]:
    targets = ["q_proj", "v_proj", "down_proj"]
    return [save_adapter(adapters_dir, model_dir, seed=i, r=r, target_modules=targets) for i, r in enumerate((2, 4, 8))]


@contextmanager
def engine(path: Path, model_dir: Path, adapters_dir: Path, **settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """An engine process that listens at ``path``; killed if it still lives at the end."""
    listener = listen(path)
    environ = {
        "STENCILPRESS_MODEL_DIR": str(model_dir),
        "STENCILPRESS_ADAPTERS_DIR": str(adapters_dir),
        "STENCILPRESS_DEVICE": "cpu",
        "STENCILPRESS_THREADS": "1",
        "STENCILPRESS_ENGINE_FD": str(listener.fileno()),
        **{f"STENCILPRESS_{name.upper()}": str(value) for name, value in settings.items()},
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "stencilpress.engine"],
        env={**os.environ, **environ},
        pass_fds=[listener.fileno(), *([int(str(settings["lifeline_fd"]))] if "lifeline_fd" in settings else [])],
    )
    listener.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def generate(client: EngineClient, submit: Submit) -> tuple[list[int], Finished]:
    text: list[int] = []
    async for tokens, finished in await client.submit(submit):
        text += [token.token for token in tokens]
        if finished is not None:
            return text, finished
    raise AssertionError("no terminal message")


async def test_texts_do_not_depend_on_neighbours_preemption_or_eviction(
    tmp_path: Path, model_dir: Path, adapters_dir: Path, digests: list[str]
) -> None:
    """The same requests one by one and all at once; SIGTERM then ends a running one with its terminal message."""
    page_bytes = page_geometry(load_spec(model_dir), 64).page_bytes
    submits = [
        Submit(
            0,
            pack_tokens([(7 * i + j) % VOCAB for j in range(5 + 13 * i)]),
            ["", *digests][i % 4],
            90,
            Sampling(temperature=i % 2, seed=i),
        )
        for i in range(6)
    ]
    with engine(tmp_path / "sock", model_dir, adapters_dir, pool_bytes=11 * page_bytes, max_loras=3) as process:
        async with asyncio.timeout(LIMIT_S), EngineClient(tmp_path / "sock") as client:
            await client.wait_ready()
            alone = [await generate(client, submit) for submit in submits]
            assert all(finished.reason == "length" for _, finished in alone)
            assert len({tuple(text) for text, _ in alone}) == len(alone)
            quiet = await client.stats()
            together = await asyncio.gather(*(generate(client, submit) for submit in submits))
            assert [text for text, _ in together] == [text for text, _ in alone]
            stats = await client.stats()
            assert stats.preemptions > quiet.preemptions
            assert stats.adapter_evictions > quiet.adapter_evictions
            assert stats.pages_kv == 0
            assert (await client.ensure(digests[0])).error == ""
            assert (await client.ensure("0" * 64)).error == "adapter is not stored here"
            stream = await client.submit(Submit(0, pack_tokens([1]), digests[1], 200, Sampling()))
            await anext(stream)
            process.send_signal(signal.SIGTERM)
            *_, (_, finished) = [batch async for batch in stream]
            assert finished is not None
            assert finished.reason == "aborted"
            assert process.wait(LIMIT_S) == 0


async def test_a_flood_of_one_tenant_lets_anothers_request_through(
    tmp_path: Path, model_dir: Path, adapters_dir: Path, digests: list[str]
) -> None:
    """Sixty long requests wait at one gateway; at another one a short request ends long before them."""
    flooding = Submit(0, pack_tokens([1, 2, 3]), digests[0], 150, Sampling(), tenant=1)
    small = Submit(0, pack_tokens([4, 5]), digests[1], 5, Sampling(), tenant=2)
    ended: list[Finished] = []

    async def flood(client: EngineClient) -> None:
        ended.append((await generate(client, flooding))[1])

    with engine(tmp_path / "sock", model_dir, adapters_dir, max_num_seqs=2, max_loras=1, max_waiting=60):
        async with (
            asyncio.timeout(LIMIT_S),
            EngineClient(tmp_path / "sock") as greedy,
            EngineClient(tmp_path / "sock") as polite,
        ):
            await asyncio.gather(greedy.wait_ready(), polite.wait_ready())
            tasks = [asyncio.create_task(flood(greedy)) for _ in range(62)]
            while (await greedy.stats()).waiting < 50:  # noqa: ASYNC110 - the engine tells when it is asked
                await asyncio.sleep(0.01)
            text, finished = await generate(polite, small)
            assert (len(text), finished.reason) == (5, "length")
            assert len(ended) <= 6, "two run, and those that end before the slot is free"
            late = Submit(0, pack_tokens([4]), digests[0], 5, Sampling(), tenant=1, max_wait_ms=1)
            _, refused = await generate(greedy, late)
            assert (refused.reason, refused.code) == ("error", "deadline")
            for task in tasks:
                task.cancel()


def test_the_engine_ends_with_its_supervisor(tmp_path: Path, model_dir: Path, adapters_dir: Path) -> None:
    """The lifeline is held before the model is loaded."""
    ours, theirs = os.pipe()
    with engine(tmp_path / "sock", model_dir, adapters_dir, lifeline_fd=ours) as process:
        os.close(ours)
        os.close(theirs)
        assert process.wait(LIMIT_S) == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"STENCILPRESS_MAX_LORAS": "many"}, "STENCILPRESS_MAX_LORAS"),
        ({"STENCILPRESS_MODEL_DIR": ""}, "STENCILPRESS_MODEL_DIR"),
        ({"STENCILPRESS_MODEL_DIR": "/nowhere"}, "config.json"),
        ({"STENCILPRESS_ENGINE_FD": ""}, "STENCILPRESS_ENGINE_FD"),
    ],
    ids=["bad value", "missing variable", "no model", "no socket"],
)
def test_what_cannot_be_served_is_said_in_one_line(model_dir: Path, changes: dict[str, str], line: str) -> None:
    environ = {
        **os.environ,
        "STENCILPRESS_MODEL_DIR": str(model_dir),
        "STENCILPRESS_ADAPTERS_DIR": "/nowhere",
        "STENCILPRESS_ENGINE_FD": "0",
        **changes,
    }
    done = subprocess.run(
        [sys.executable, "-m", "stencilpress.engine"], env=environ, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    [said] = done.stderr.decode().splitlines()
    assert said.startswith("engine: ")
    assert line in said


async def test_a_warm_prefix_changes_no_answer_and_is_nobody_elses(
    tmp_path: Path, model_dir: Path, adapters_dir: Path, digests: list[str]
) -> None:
    """Answers with a warm cache equal those of an engine without one, alone and together, base and adapters."""
    geometry = page_geometry(load_spec(model_dir), 64)
    prompt = [(7 * j) % VOCAB for j in range(3 * geometry.page_tokens + 5)]
    full = len(prompt) // geometry.page_tokens * geometry.page_tokens

    def submit(tokens: list[int], adapter: str, tenant: int = 1, salt: bytes = b"one") -> Submit:
        return Submit(0, pack_tokens(tokens), adapter, 24, Sampling(temperature=0), tenant=tenant, salt=salt)

    mine = [submit(prompt[:length], adapter) for adapter in ("", digests[0]) for length in (full, full + 1, full + 5)]
    settings = {"pool_bytes": 60 * geometry.page_bytes}
    async with asyncio.timeout(LIMIT_S):
        with engine(tmp_path / "cold", model_dir, adapters_dir, prefix_caching=0, **settings):
            async with EngineClient(tmp_path / "cold") as client:
                await client.wait_ready()
                cold = [await generate(client, one) for one in mine]
                assert {finished.cached_tokens for _, finished in cold} == {0}
        with engine(tmp_path / "warm", model_dir, adapters_dir, **settings):
            async with EngineClient(tmp_path / "warm") as client:
                await client.wait_ready()
                warm = [await generate(client, one) for one in mine]
                again = await asyncio.gather(*(generate(client, one) for one in mine))
                assert [text for text, _ in warm] == [text for text, _ in cold]
                assert [text for text, _ in again] == [text for text, _ in cold]
                page = geometry.page_tokens
                assert [f.cached_tokens for _, f in warm] == [0, full, full] * 2
                assert [f.cached_tokens for _, f in again] == [full - page, full, full] * 2
                for other in (
                    submit(prompt, digests[1]),
                    submit(prompt, "", tenant=2),
                    submit(prompt, "", salt=b"two"),
                    submit(prompt, "", salt=b""),
                ):
                    assert (await generate(client, other))[1].cached_tokens == 0
                stats = await client.stats()
                assert stats.pages_kv == 0
                assert stats.pages_cached > 0
                assert stats.cached_tokens == sum(f.cached_tokens for _, f in (*warm, *again))


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    fields = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_a_thousand_loads_and_deletions_while_a_stream_runs_leave_no_page_and_no_byte(
    tmp_path: Path, model_dir: Path, adapters_dir: Path, digests: list[str]
) -> None:
    """Versions come and are deleted, half of them while a request runs on them, which ends on what it began with."""
    geometry = page_geometry(load_spec(model_dir), 64)

    def submit(adapter: str, tokens: int, salt: bytes = b"one") -> Submit:
        return Submit(0, pack_tokens([1, 2, 3] * 9), adapter, tokens, Sampling(temperature=0), tenant=1, salt=salt)

    async def cycle(client: EngineClient, digest: str, early: bool) -> list[int]:
        stream = await client.submit(submit(digest, 3))
        text = [token.token for token in (await anext(stream))[0]]
        if early:
            await client.forget(digest)
        text += [token.token async for tokens, _ in stream for token in tokens]
        await client.forget(digest)
        return text

    settings = {"pool_bytes": 40 * geometry.page_bytes, "max_model_len": 4096}
    with engine(tmp_path / "sock", model_dir, adapters_dir, **settings) as process:
        async with asyncio.timeout(LIMIT_S), EngineClient(tmp_path / "sock") as client:
            await client.wait_ready()
            quiet = await client.stats()
            texts = [(await generate(client, submit(digest, 3)))[0] for digest in digests]
            for digest in digests:
                await client.forget(digest)
            assert (await client.stats()).pages_free == quiet.pages_free == quiet.pages_total
            long = asyncio.create_task(generate(client, submit("", 200, salt=b"")))
            for n in range(200):
                await cycle(client, digests[n % 3], early=n % 2 == 0)
            before = resident_bytes(process)
            for n in range(1000):
                assert await cycle(client, digests[n % 3], early=n % 2 == 0) == texts[n % 3]
                if long.done():
                    assert long.result()[1].reason == "length"
                    long = asyncio.create_task(generate(client, submit("", 200, salt=b"")))
            await long
            stats = await client.stats()
            while stats.pages_free < stats.pages_total:  # a step launched ahead of the last answer holds its adapter
                stats = await client.stats()
            assert stats.adapter_loads >= 1200
            assert (stats.pages_free, stats.adapters_host, stats.adapter_host_bytes) == (stats.pages_total, 0, 0)
            assert resident_bytes(process) < before + (16 << 20)
