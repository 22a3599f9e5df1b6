"""The gateway on one core with everything on: key, quota in all dimensions, usage rows, metrics.

A fake engine that speaks the real ring protocol and the load share the other core. Added times are those through the
gateway less those of the same requests through the engine client alone, which sits where the gateway does: on its core,
across from the engine. Streams that only have to be there give way to the engine and to those that are timed, or these
would wait for the core of the load and not for the gateway. Needs two cores that nobody else uses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from bench.gateway_load import Seen, Target, closed_loop, connect, drain
from bench.gateway_memory import growth_mib_h, watch_memory
from bench.gateway_served import BURSTS, GATEWAY_CORE, LOAD_CORE, PROMPT, TOKENS, Bench, pinned, running, wait_ready
from bench.results import Result, median_result, percentile, record
from bench.server import free_port
from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import Sampling, Submit, pack_tokens

BASE = "smollm2-135m-instruct"
GIVES_WAY = ("nice", "-n", "19")
INTERVAL_MS = 20.0
PAUSE_S = 0.04
"""Between a stream and the next on its connection, on average."""


def check(seen: Sequence[Seen], tokens: int, text: str = "") -> int:
    """The number of answers that are not whole; those that kept their text are compared with it."""
    return sum(one.status != 200 or one.tokens != tokens or (one.text not in ("", text)) for one in seen)


async def direct(bench: Bench, streams: int, rounds: int) -> list[float]:
    """First-token times in seconds of the same load through the engine client alone, on this thread's core."""
    prompt, times = pack_tokens(bench.prompt), []
    await asyncio.sleep(1)  # those beside are there by then
    async with EngineClient(bench.engine_socket) as client:
        await client.wait_ready()

        async def one(number: int) -> None:
            await asyncio.sleep(TOKENS * INTERVAL_MS / 1000 * number / streams)
            for _ in range(rounds):
                await asyncio.sleep(random.uniform(0, 2 * PAUSE_S))
                start = time.perf_counter()
                stream = await client.submit(Submit(0, prompt, "", TOKENS, Sampling()))
                await anext(stream)
                times.append(time.perf_counter() - start)
                async for _batch in stream:
                    pass

        await asyncio.gather(*(one(number) for number in range(streams)))
    return times


@contextlib.contextmanager
def beside_direct(bench: Bench, streams: int, tokens: int) -> Iterator[subprocess.Popen[bytes]]:
    """The same as :func:`beside` without a gateway."""
    command = [sys.executable, "-m", "bench.gateway_direct", str(bench.engine_socket), str(streams), str(tokens)]
    with subprocess.Popen([*GIVES_WAY, *command, str(len(bench.prompt))], stdout=subprocess.PIPE) as process:
        yield process


@contextlib.contextmanager
def beside(target: Target, streams: int, tokens: int) -> Iterator[subprocess.Popen[bytes]]:
    """Streams in a process of their own that hardly costs anything; what it prints says what came of them."""
    command = [sys.executable, "-m", "bench.gateway_load", target.host, str(target.port), target.key, target.model]
    with subprocess.Popen([*GIVES_WAY, *command, PROMPT, str(streams), str(tokens)], stdout=subprocess.PIPE) as process:
        yield process


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run this thread there while the block lasts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def told(process: subprocess.Popen[bytes]) -> int:
    """The tokens of those streams, at their end."""
    assert process.stdout is not None
    came = json.loads(process.stdout.read())
    return int(came[1] if isinstance(came, list) else came)


async def watch(target: Target, streams: int, tokens: int, rounds: int) -> list[Seen]:
    """Streams that are looked at frame by frame, beside those of :func:`beside`."""
    await asyncio.sleep(1)  # the others are there by then
    connections = await connect(target, streams, keep_text_of=streams // 10 if tokens == TOKENS else 0)
    request = target.request(PROMPT, tokens, stream=True)
    seen, _ = await closed_loop(connections, request, rounds, TOKENS * INTERVAL_MS / 1000, PAUSE_S)
    for connection in connections:
        connection.close()
    return seen


def row(
    case: str,
    metric: str,
    unit: str,
    samples: Sequence[float],
    *,
    settings: dict[str, Any] | None = None,
    system: str = "stencilpress",
) -> Result:
    device = f"cpu{os.cpu_count()}"
    settings = {"tokens": TOKENS, **(settings or {})}
    return median_result(
        samples, bench="gateway", case=case, metric=metric, unit=unit, system=system, device=device, settings=settings
    )


def streams_case(bench: Bench, repeats: int) -> list[Result]:
    """200 streams at 50 tokens a second, of which 50 come and go: added time to the first token."""
    watched, rounds = 50, 8  # 400 first tokens a repeat: the 99th percentile is the fourth worst
    others, tokens = 200 - watched, 700
    p50, p99, gaps = [], [], []
    for number in range(repeats + 1):
        with beside_direct(bench, others, tokens) as process, on_core(GATEWAY_CORE):
            base = uvloop.run(direct(bench, watched, rounds))
            assert told(process) == others * tokens
        with beside(bench.target(), others, tokens) as process:
            seen = uvloop.run(watch(bench.target(), watched, TOKENS, rounds))
            assert told(process) == others * tokens
        assert check(seen, TOKENS, bench.text) == 0
        if not number:
            continue
        first = [one.first_s for one in seen]
        p50.append(1000 * (percentile(first, 0.5) - percentile(base, 0.5)))
        p99.append(1000 * (percentile(first, 0.99) - percentile(base, 0.99)))
        gaps.append(1000 * percentile([gap for one in seen for gap in one.gaps_s], 0.99) - INTERVAL_MS)
    settings = {"watched": watched}
    return [
        row("200-streams", "added_ttft_p50_ms", "ms", p50, settings={**settings, "goal": 1}),
        row("200-streams", "added_ttft_p99_ms", "ms", p99, settings={**settings, "goal": 5}),
        row("200-streams", "late_gap_p99_ms", "ms", gaps, settings=settings),
    ]


def memory_case(bench: Bench, minutes: float) -> list[Result]:
    """100 streams that come and go for minutes, a fifth of them left in the middle: what the gateway holds."""
    request = bench.target().request(PROMPT, TOKENS, stream=True)
    watched = watch_memory(bench.target(), request, bench.gateway.pid, 60 * minutes)
    times, sizes, asked = uvloop.run(watched)
    third = max(len(sizes) // 3, 1)
    parts = {"start": sizes[:third], "middle": sizes[third:-third], "end": sizes[-third:]}
    settings = {"minutes": minutes, "requests": asked}
    growth = [growth_mib_h(times, sizes)]
    return [
        *(row("memory", f"pss_{name}_mib", "MiB", part, settings=settings) for name, part in parts.items()),
        row("memory", "growth_mib_h", "MiB/h", growth, settings={**settings, "goal": 0}),
    ]


def thousand_case(bench: Bench, repeats: int) -> list[Result]:
    """1,000 streams at 50 tokens a second: nothing lost, and in 50 of them, which are watched, nothing late."""
    watched, tokens = 50, 400
    lost, late, cpu = [], [], []
    for _ in range(repeats):
        before, start = bench.gateway.cpu_times(), time.perf_counter()
        with beside(bench.target(), 1000 - watched, tokens) as others:
            seen = uvloop.run(watch(bench.target(), watched, tokens, 1))
            came = told(others)
        spent = bench.gateway.cpu_times()
        cpu.append(100 * (spent.user + spent.system - before.user - before.system) / (time.perf_counter() - start))
        lost.append(float(1000 * tokens - came - sum(one.tokens for one in seen)))
        late.append(1000 * percentile([gap for one in seen for gap in one.gaps_s], 0.99) - INTERVAL_MS)
    settings = {"tokens": tokens, "watched": watched}
    return [
        row("1000-streams", "lost_frames", "tokens", lost, settings={**settings, "goal": 0}),
        row("1000-streams", "late_gap_p99_ms", "ms", late, settings={**settings, "goal": 50}),
        row("1000-streams", "gateway_cpu_percent", "%", cpu, settings=settings),
    ]


def saturation_case(model_dir: Path, repeats: int, bare_port: int) -> list[Result]:
    """More tokens than the gateway can send one by one, and the bare loop's frames in the same rounds."""
    streams, tokens, interval_ms = 200, 1500, 1.5
    events, frames, bare, cost = [], [], [], []
    with running(model_dir, interval_ms) as bench:
        request = bench.target().request(PROMPT, tokens, stream=True)
        for number in range(repeats + 1):
            before = bench.gateway.cpu_times()
            seen, came, elapsed = drain(bench.target(), request, streams)
            spent = bench.gateway.cpu_times()
            assert came == streams * tokens
            other, _, bare_elapsed = drain(replace(bench.target(), port=bare_port), request, streams)
            if number:
                events.append(came / elapsed)
                frames.append(seen / elapsed)
                cost.append(1e6 * (spent.user + spent.system - before.user - before.system) / seen)
                bare.append(other / bare_elapsed)
    shared = {"streams": streams, "tokens": tokens, "offered_s": round(1000 * streams / interval_ms)}
    ratios = [ours / theirs for ours, theirs in zip(frames, bare, strict=True)]
    return [
        row("saturation", "events_s", "tokens/s", events, settings={**shared, "goal": 60_000}),
        row("saturation", "frames_s", "frames/s", frames, settings=shared),
        row("saturation", "cpu_per_frame_us", "us", cost, settings=shared),
        row("saturation", "frames_s", "frames/s", bare, system="bare-aiohttp-uvloop", settings=shared),
        row("saturation", "ratio_to_bare", "", ratios, settings={**shared, "goal": 0.6}),
    ]


def litellm_case(command: Path, repeats: int) -> list[Result]:
    """LiteLLM's proxy, one worker and no database, before an upstream that paces the same frames."""
    upstream_port, port, streams = free_port(), free_port(), 16
    base = {"model": "openai/bare", "api_key": "none", "api_base": f"http://127.0.0.1:{upstream_port}/v1"}
    keys = {"master_key": "sk-" + "0" * 32}
    settings = {"model_list": [{"model_name": "base", "litellm_params": base}], "general_settings": keys}
    upstream = [sys.executable, "-m", "bench.gateway_bare", str(upstream_port), "--interval-ms", str(INTERVAL_MS)]
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        config.write(json.dumps(settings))  # JSON is YAML
        config.flush()
        stack.enter_context(pinned(upstream, LOAD_CORE))
        wait_ready(upstream_port)
        proxy = [
            str(command),
            "--config",
            config.name,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--num_workers",
            "1",
        ]
        quiet = subprocess.DEVNULL
        stack.enter_context(pinned(proxy, GATEWAY_CORE, stdout=quiet, stderr=quiet))
        wait_ready(port, path="/health/liveliness")
        targets = [Target("127.0.0.1", at, keys["master_key"], "base") for at in (upstream_port, port)]
        times: list[list[list[float]]] = [[], []]
        rates, plain = [], []
        for number in range(repeats + 1):
            for of, target in zip(times, targets, strict=True):
                seen, elapsed = uvloop.run(_paced(target, streams, 2))
                of.append([one.first_s for one in seen])
            whole, plain_elapsed = uvloop.run(_plain(targets[1], 16, 5))
            if number:
                rates.append(sum(one.frames for one in seen) / elapsed)
                plain.append(len(whole) / plain_elapsed)

    def added(share: float) -> list[float]:
        rounds = list(zip(*times, strict=True))[1:]
        return [1000 * (percentile(through, share) - percentile(base, share)) for base, through in rounds]

    system, shared = "litellm", {"streams": streams}
    return [
        row("16-streams", "added_ttft_p50_ms", "ms", added(0.5), system=system, settings=shared),
        row("16-streams", "added_ttft_p99_ms", "ms", added(0.99), system=system, settings=shared),
        row("16-streams", "frames_s", "frames/s", rates, system=system, settings=shared),
        row("plain", "req_s", "req/s", plain, system=system, settings={"tokens": 16, "connections": 16}),
    ]


async def _paced(target: Target, streams: int, rounds: int) -> tuple[list[Seen], float]:
    connections = await connect(target, streams)
    request = target.request(PROMPT, TOKENS, stream=True)
    seen = await closed_loop(connections, request, rounds, TOKENS * INTERVAL_MS / 1000, PAUSE_S)
    for connection in connections:
        connection.close()
    return seen


async def _plain(target: Target, connections: int, rounds: int) -> tuple[list[Seen], float]:
    opened = await connect(target, connections)
    seen = await closed_loop(opened, target.request(PROMPT, 16, stream=False), rounds)
    for connection in opened:
        connection.close()
    return seen


def plain_case(bench: Bench, repeats: int) -> list[Result]:
    """64 connections that ask for whole answers, from an engine that takes no time."""
    rates = []
    for number in range(repeats + 1):
        seen, elapsed = uvloop.run(_plain(bench.target(), 64, 40))
        assert check(seen, 16) == 0
        if number:
            rates.append(len(seen) / elapsed)
    return [row("plain", "req_s", "req/s", rates, settings={"goal": 1500, "tokens": 16})]


def burst_case(bench: Bench) -> list[Result]:
    """1,000 requests at once on each limit: how many more than it allows were admitted."""
    results = []
    most = len(bench.prompt) + TOKENS  # the chat template adds some: fewer fit
    for dimension, quota in BURSTS.items():
        seen = uvloop.run(_burst(bench.target(dimension)))
        admitted = sum(one.status == 200 for one in seen)
        assert {one.status for one in seen} <= {200, 429}
        limit = getattr(quota, dimension)
        allowed = limit if limit == 100 else limit // most
        assert admitted
        results.append(
            row(
                f"burst-{dimension}", "overshoot", "requests", [float(max(admitted - allowed, 0))], settings={"goal": 0}
            )
        )
    return results


async def _burst(target: Target) -> list[Seen]:
    connections = await connect(target, 1000)
    request = target.request(PROMPT, TOKENS, stream=True)
    seen, _ = await closed_loop(connections, request, 1)
    for connection in connections:
        connection.close()
    return seen


def main(arguments: list[str]) -> int:
    """Run all cases, print them, and append them to bench/results with ``--record``."""
    parser = argparse.ArgumentParser(prog="python -m bench gateway", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path.home() / ".local/share/stencilpress")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="append to bench/results; for a machine that is quiet")
    parser.add_argument("--note", default="", help="what else ran on the machine, kept with recorded results")
    parser.add_argument("--litellm", type=Path, help="its command, to measure it in the same run")
    parser.add_argument("--cases", default="streams,thousand,burst,saturation,plain", help="some of these, or memory")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the case memory")
    options = parser.parse_args(arguments)
    cases = options.cases.split(",")
    if unknown := set(cases) - {*parser.get_default("cases").split(","), "memory"}:
        parser.error(f"no case {', '.join(sorted(unknown))}")
    model_dir = options.data / "v1" / "models" / BASE
    os.sched_setaffinity(0, {LOAD_CORE})
    load = os.getloadavg()[0]
    print(f"load before: {load:.2f}")
    results: list[Result] = []
    with running(model_dir, INTERVAL_MS) as bench:
        if "streams" in cases:
            results += streams_case(bench, options.repeats)
        if "thousand" in cases:
            results += thousand_case(bench, options.repeats)
        if "burst" in cases:
            results += burst_case(bench)
        if "memory" in cases:
            results += memory_case(bench, options.minutes)
    if "saturation" in cases:
        port = free_port()
        with pinned([sys.executable, "-m", "bench.gateway_bare", str(port)], GATEWAY_CORE):
            wait_ready(port)
            results += saturation_case(model_dir, options.repeats, port)
    if "plain" in cases:
        with running(model_dir, 0.0) as bench:
            results += plain_case(bench, options.repeats)
    if options.litellm is not None:
        results += litellm_case(options.litellm, options.repeats)
    for one in results:
        goal = one.settings.get("goal")
        aim = "" if goal is None else f"  goal {goal}"
        print(f"{one.case:26} {one.system:20} {one.metric:20} {one.value:10.2f} {one.unit:9}{one.spread}{aim}")
    if options.record:
        circumstances = {"load_before": round(load, 2), "note": options.note, "processor": _processor()}
        stamped = [replace(one, settings={**one.settings, **circumstances}) for one in results]
        record(stamped, ("aiohttp", "uvloop", "msgspec"))
    return 0


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
