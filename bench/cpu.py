"""Throughput on this machine's CPU through the whole HTTP path, beside transformers and PEFT in the same run.

Every case is measured in rounds, one round of each system after the other, so that a drifting machine
drifts for all. Greedy, exactly 64 tokens each; tokens per second count from the first request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Tokenizer

from bench.peers import Peer
from bench.results import Result, median_result, record
from bench.server import Server, serving

NEW_TOKENS = 64
BASE = "smollm2-135m-instruct"
ADAPTERS = Path(__file__).parents[1] / "examples" / "adapters"
TOPICS = (
    "the tides of the sea", "a recipe for lentil soup", "how a bicycle stays upright", "the first day of winter",
    "sorting a list of names", "why bread rises in the oven", "a letter to an old friend", "the rules of chess",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One row: how many requests at once, over which adapters (empty: the base)."""

    name: str
    requests: int
    adapters: tuple[str, ...]
    peer: str


def cases(adapters: tuple[str, ...]) -> tuple[Case, ...]:
    """The CPU cases; the four adapters take the requests in turn."""
    return (
        Case("stream-1-base", 1, (), "transformers"),
        Case("batch-8-base", 8, (), "transformers"),
        Case("batch-8-4adapters", 8, adapters, "peft"),
    )


def prompts(count: int, turn: int) -> list[str]:
    """Fresh prompts of some 30 tokens: no round repeats another's."""
    return [f"Round {turn}, part {i}. Write a few sentences about {TOPICS[(turn + i) % len(TOPICS)]}, step by step, "
            "for a reader who has never heard of it." for i in range(count)]  # fmt: skip


async def ours(server: Server, case: Case, turn: int) -> float:
    """Tokens per second of one round over HTTP with streaming."""
    names = case.adapters or (BASE,)
    headers = {"Authorization": f"Bearer {server.key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        bodies = [_body(prompt, names[i % len(names)]) for i, prompt in enumerate(prompts(case.requests, turn))]
        start = time.perf_counter()
        counts = await asyncio.gather(*(_stream(session, f"{server.url}/v1/completions", body) for body in bodies))
        elapsed = time.perf_counter() - start
    if counts != [NEW_TOKENS] * case.requests:
        raise RuntimeError(f"{case.name}: wrong token counts {counts}")
    return sum(counts) / elapsed


def _body(prompt: str, model: str) -> dict[str, Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, **options}


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    async with session.post(url, json=body) as answer:
        answer.raise_for_status()
        usage = None
        async for line in answer.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or usage
    if usage is None:
        raise RuntimeError("the stream ended without usage")
    return int(usage["completion_tokens"])


def theirs(peer: Peer, tokenizer: Tokenizer, case: Case, turn: int) -> float:
    """Tokens per second of the same round through ``generate``."""
    ids = [tokenizer.encode(prompt).ids for prompt in prompts(case.requests, turn)]
    names = [case.adapters[i % len(case.adapters)] for i in range(case.requests)] if case.adapters else None
    start = time.perf_counter()
    out = peer.generate(ids, names, NEW_TOKENS)
    elapsed = time.perf_counter() - start
    assert [len(row) for row in out] == [NEW_TOKENS] * case.requests
    return case.requests * NEW_TOKENS / elapsed


def read_bandwidth() -> float:
    """Bytes per second at which this machine reads a block far larger than its caches."""
    block = torch.ones(256 * 2**20, dtype=torch.float32)
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        samples.append(block.nbytes / (time.perf_counter() - start))
    return max(samples)


def measure(server: Server, peer: Peer, tokenizer: Tokenizer, rounds: int, weight_bytes: int) -> list[Result]:
    """All cases, interleaved; the first round warms up and is not counted."""
    names = tuple(sorted(p.parent.name for p in ADAPTERS.glob("*/adapter_model.safetensors")))[:4]
    results: list[Result] = []
    bandwidth = read_bandwidth()
    turn = itertools.count()
    spent_before = server.cpu_seconds()
    for case in cases(names):
        samples: dict[str, list[float]] = {"stencilpress": [], case.peer: []}
        for number in range(rounds + 1):
            now = next(turn)
            mine, other = asyncio.run(ours(server, case, now)), theirs(peer, tokenizer, case, now)
            print(
                f"{case.name:18} round {number}: stencilpress {mine:6.1f} tok/s, {case.peer} {other:6.1f}", flush=True
            )
            if number:
                samples["stencilpress"].append(mine)
                samples[case.peer].append(other)
        floor = case.requests * bandwidth / weight_bytes
        shared: dict[str, Any] = {"bench": "cpu", "case": case.name, "metric": "out_tok_s", "unit": "tok/s"}
        settings = {"dtype": "bfloat16", "new_tokens": NEW_TOKENS, "path": "HTTP"}
        device = f"cpu{os.cpu_count()}"
        for system, values in samples.items():
            results.append(
                median_result(values, **shared, floor=round(floor, 1), system=system, device=device, settings=settings)
            )
    spent = {kind: value - spent_before[kind] for kind, value in server.cpu_seconds().items()}
    share = 100 * spent["gateway"] / (spent["gateway"] + spent["engine"])
    results.append(
        median_result(
            [share],
            bench="cpu",
            case="gateway-share",
            metric="cpu_percent",
            unit="%",
            system="stencilpress",
            device=f"cpu{os.cpu_count()}",
            settings={"all_cases": True},
        )
    )
    return results


def main(arguments: list[str]) -> int:
    """Run, print the table, append to bench/results."""
    parser = argparse.ArgumentParser(prog="python -m bench cpu", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path.home() / ".local/share/stencilpress")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with serving(options.data, dtype="bfloat16") as server:
        model_dir = options.data / "v1" / "models" / BASE
        folders = {p.parent.name: p.parent for p in ADAPTERS.glob("*/adapter_model.safetensors")}
        peer = Peer(model_dir, folders, torch.bfloat16)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        weight_bytes = sum(p.numel() * p.element_size() for p in peer.base.parameters())
        results = measure(server, peer, tokenizer, options.rounds, weight_bytes)
    record(results, ("torch", "transformers", "peft", "aiohttp"))
    print_table(results)
    return 0


def print_table(results: list[Result]) -> None:
    """Each case with its floor and its ratio to the peer of the same run."""
    rows = {(r.case, r.system): r for r in results}
    for result in results:
        if result.system != "stencilpress":
            continue
        peers = [r for (name, system), r in rows.items() if name == result.case and system != "stencilpress"]
        versus = "".join(f"  {result.value / r.value:4.2f}x {r.system} ({r.value:.1f})" for r in peers)
        floor = f"  limit {result.floor:.0f}" if result.floor else ""
        print(f"{result.case:18} {result.value:7.1f} {result.unit:6}{versus}{floor}")
