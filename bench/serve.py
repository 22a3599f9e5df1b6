"""``python -m bench serve``: `stencilpress serve` as a user runs it, against transformers + PEFT and under load.

A random Llama of 1.2 billion parameters, and adapters of ranks 8 to 64 that PEFT made and the admin API took. First
tokens and greedy answers are compared with transformers + PEFT; then come streams over all adapters at once, cold and
warm, a promotion and a deletion under streams, and SIGTERM. ``--devices 0,0 --gateways 2`` runs two engines on one GPU
and two gateways, ``--small`` a rehearsal for a CPU. Ends with status 1 if a check does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch

from bench.gpu_device import device_label, require_gpu
from bench.results import Result, median_result, record
from bench.serve_checks import Checks, Errors, first_tokens_hold, judge_greedy, load_figures, version_holds, whole
from bench.serve_client import Api, RefusedError, Stream, load
from bench.serve_models import BASE_ID, RANKS, Models, Reference
from bench.serve_trial import FULL, REHEARSAL, Trial, until
from bench.server import serving
from stencilpress.gateway.api.wire import spelling
from stencilpress.gateway.tokenizer import ModelTokenizer

PROMPT_WORDS = (7, 20, 45, 90)
REFERENCE_BYTES = 14 << 30
SHARED_POOL_GIB = 24.0
STOP_LIMIT_S = 5.5
STREAMS = 8
"""Of the adapter that is changed under them, and as many of the one that is deleted."""


async def exercise(trial: Trial) -> list[Result]:
    """All that is checked, in this order: the last stops the server."""
    await trial.open_tenants()
    started = time.monotonic()
    await asyncio.gather(*(trial.upload(name, folder) for name, folder in trial.models.adapters.items()))
    gigabytes, took_s = trial.models.adapter_bytes / 1e9, time.monotonic() - started
    print(f"{len(trial.names)} adapters, {gigabytes:.2f} GB, uploaded in {took_s:.1f} s", flush=True)
    reference = await asyncio.to_thread(Reference, trial.models.model)
    prompts = _prompts(trial)
    figures = await _compare(trial, reference, prompts)
    for case in ("load-cold", "load-warm"):
        figures += await _load(trial, case)
    await _change(trial, prompts[0])
    await _compare_second(trial, reference, prompts[0])
    await _stop(trial)
    return figures


def _prompts(trial: Trial) -> list[list[int]]:
    tokenizer = ModelTokenizer(trial.models.base)
    return [tokenizer.encode(trial.text(length)) for length in PROMPT_WORDS]


def _token_ids(models: Models) -> dict[str, int]:
    """Ids by the spelling that answers have."""
    tokenizer = ModelTokenizer(models.base)
    return {spelling(tokenizer.table.token_bytes(id_)): id_ for id_ in range(tokenizer.vocab_size)}


async def _compare(trial: Trial, reference: Reference, prompts: Sequence[list[int]]) -> list[Result]:
    """First tokens and greedy answers of the base and some adapters, all asked for at once."""
    ids, sizes = _token_ids(trial.models), trial.sizes
    tested: dict[str, Path | None] = {BASE_ID: None, **dict(list(trial.models.adapters.items())[: sizes.tested])}

    async def ask(model: str, prompt: list[int]) -> Any:
        answer = await trial.api.complete(model, trial.key(model), prompt, sizes.answer)
        return answer["choices"][0]["logprobs"]

    asked = [asyncio.gather(*(ask(model, prompt) for prompt in prompts)) for model in tested]
    answers = dict(zip(tested, await asyncio.gather(*asked), strict=True))

    def judge(model: str) -> tuple[Errors, Counter[str]]:
        tokens = [[ids[token] for token in answer["tokens"]] for answer in answers[model]]
        sequences = [[*prompt, *answer] for prompt, answer in zip(prompts, tokens, strict=True)]
        errors, greedy = [], Counter[str]()
        for n, both in enumerate(reference.logits(tested[model], sequences)):
            exact, half = (logits[len(prompts[n]) - 1 : -1] for logits in both)
            top = {ids[token]: logprob for token, logprob in answers[model][n]["top_logprobs"][0].items()}
            errors.append(Errors.of(top, exact[0], half[0]))
            greedy += judge_greedy(tokens[n], exact, half)
        return Errors.together(errors), greedy

    judged = [await asyncio.to_thread(judge, model) for model in tested]
    different = len({tuple(of_model[0]["tokens"]) for of_model in answers.values()})
    trial.checks.note(
        "adapters differ", different == len(tested), f"{different} different answers of {len(tested)} models"
    )
    _note_greedy(trial.checks, sum((greedy for _, greedy in judged), Counter()))
    return _note_first_tokens(trial, [errors for errors, _ in judged])


def _note_greedy(checks: Checks, counts: Counter[str]) -> None:
    checks.note(
        "greedy",
        bool(counts["clear"]) and not counts["wrong"] and not counts["far"],
        f"{counts['clear']} tokens with a clear margin, {counts['wrong']} wrong; "
        f"{counts['unclear']} without, {counts['far']} of them too far off",
    )


def _note_first_tokens(trial: Trial, models: list[Errors]) -> list[Result]:
    every = Errors.together(models)
    ours, theirs = every.rms
    trial.checks.note(
        "first tokens",
        first_tokens_hold(models),
        f"{len(models)} models, {len(every.ours)} logprobs: RMS error {ours:.4f} nats "
        f"(transformers + PEFT {theirs:.4f}), largest {every.largest[0]:.4f}",
    )
    settings = {"models": len(models), "logprobs": len(every.ours)}
    return [
        _row(trial, "first-tokens", "rms_error", ours, "nats", settings),
        _row(trial, "first-tokens", "rms_error", theirs, "nats", settings, system="transformers+peft"),
    ]


async def _load(trial: Trial, case: str) -> list[Result]:
    """All streams at once, over the adapters in turn."""
    sizes, misses = trial.sizes, "stencilpress_engine_adapter_misses_total"
    before = await trial.api.metric(misses)
    asked = [trial.request(trial.names[n % sizes.adapters], sizes.tokens) for n in range(sizes.requests)]
    streams = await load(trial.api.url, asked, sizes.clients)
    settings = {
        "requests": sizes.requests,
        "tokens": sizes.tokens,
        "waited_for_adapters": int(await trial.api.metric(misses) - before),
        "adapters_resident": int(await trial.api.metric("stencilpress_engine_adapters_hbm")),
    }
    holds = whole(streams, sizes.tokens)
    values = load_figures(streams) if holds else {}
    told = ", ".join(f"{metric} {value:.1f}" for metric, value in values.items())
    trial.checks.note(case, holds, f"{told or 'streams are not whole'}; {settings}{_errors(streams)}")
    units = {"out_tok_s": "tok/s"}
    return [_row(trial, case, metric, value, units.get(metric, "ms"), settings) for metric, value in values.items()]


def _errors(streams: Sequence[Stream]) -> str:
    found = [one.error for one in streams if one.error]
    return f"; {len(found)} errors: {found[:2]}" if found else ""


async def _change(trial: Trial, prompt: list[int]) -> None:
    """Promote a version of one adapter and delete another one while streams of both run."""
    changed, doomed = trial.names[:2]
    asked = [trial.request(name, trial.sizes.long) for name in (changed, doomed) for _ in range(STREAMS)]
    loading = asyncio.create_task(load(trial.api.url, asked))
    await trial.until_running(len(asked))
    await trial.upload(changed, trial.models.second)
    promoted_s = time.monotonic()
    await trial.api.admin("DELETE", trial.path(doomed))
    deleted_s = time.monotonic()

    async def served() -> bool:
        answer = await trial.api.complete(changed, trial.key(changed), prompt, 1)
        return bool(answer["model"].endswith("@2"))

    async def gone() -> bool:
        try:
            await trial.api.complete(doomed, trial.key(doomed), prompt, 1)
        except RefusedError as error:
            return error.status == 404
        return False

    served_s = await until(served, 20, "the new version is served")
    gone_s = await until(gone, 20, "the deleted adapter is gone")
    streams = await loading
    over = {name: sum(one.model == name and one.ended_s > at_s for one in streams)
            for name, at_s in ((changed, promoted_s), (doomed, deleted_s))}  # fmt: skip
    old = all(one.served.endswith("@1") for one in streams)
    trial.checks.note(
        "promotion and deletion under streams",
        whole(streams, trial.sizes.long) and old and all(over.values()),
        f"{over[changed]} streams ran on over the promotion ({served_s:.2f} s until a request got version 2), "
        f"{over[doomed]} over the deletion ({gone_s:.2f} s until 404), all on version 1: {old}{_errors(streams)}",
    )


async def _compare_second(trial: Trial, reference: Reference, prompt: list[int]) -> None:
    """The promoted version answers as itself."""
    changed, ids = trial.names[0], _token_ids(trial.models)
    answer = await trial.api.complete(changed, trial.key(changed), prompt, 1)
    top = {ids[token]: p for token, p in answer["choices"][0]["logprobs"]["top_logprobs"][0].items()}
    [(exact, half)] = await asyncio.to_thread(reference.logits, trial.models.second, [prompt])
    errors = Errors.of(top, exact[-1], half[-1])
    ours, theirs = errors.largest
    text = f"largest error of its top {len(top)} {ours:.4f} (transformers + PEFT {theirs:.4f})"
    trial.checks.note("the new version is itself", version_holds(errors), text)


async def _stop(trial: Trial) -> None:
    """SIGTERM, with streams that have seconds to go."""
    names = trial.names[2:18]
    loading = asyncio.create_task(load(trial.api.url, [trial.request(name, trial.sizes.last) for name in names]))
    await trial.until_running(len(names))
    supervisor = trial.server.supervisor
    family, started = supervisor.children(recursive=True), time.monotonic()
    supervisor.send_signal(signal.SIGTERM)
    exit_code = await asyncio.to_thread(supervisor.wait, 30)
    took_s = time.monotonic() - started
    ends = Counter(one.end for one in await loading)
    left = [child.pid for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    trial.checks.note(
        "SIGTERM",
        exit_code == 0 and not left and took_s < STOP_LIMIT_S and not ends["broken"],
        f"exit code {exit_code} after {took_s:.2f} s of {STOP_LIMIT_S:g}; of {len(names)} streams {ends['done']} "
        f"finished, {ends['failed'] + ends['refused']} got an error, {ends['broken']} broke off; "
        f"{len(left)} processes left",
    )


def _row(
    trial: Trial,
    case: str,
    metric: str,
    value: float,
    unit: str,
    settings: dict[str, Any],
    system: str = "stencilpress",
) -> Result:
    return median_result(
        [value], bench="serve", case=case, metric=metric, unit=unit, system=system, device=trial.device,
        settings={**trial.settings, **settings},
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run it, print each check, append to bench/results with ``--record`` if all hold."""
    options = _options(arguments)
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="stencilpress-bench-") as folder:
        results = _measure(options, Path(folder), checks)
    for result in results:
        print(f"{result.case:14} {result.system:18} {result.metric:12} {result.value:10.4f} {result.unit}")
    if checks.failed:
        print(f"failed: {', '.join(checks.failed)}", file=sys.stderr)
        return 1
    if options.record:
        record(results, ("torch", *(["triton"] if options.device == "cuda" else []), "transformers", "peft"))
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, or cpu for --small without a GPU")
    parser.add_argument("--devices", default="0", help="one for each engine: 0, 0,1 or 0,0 (two engines on one GPU)")
    parser.add_argument("--pool-gib", type=float, help=f"of each engine; default: {SHARED_POOL_GIB:g} on a shared GPU")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="a small base and little load, for a CPU; not recorded")
    parser.add_argument("--record", action="store_true", help="append to bench/results, if all checks hold")
    parser.add_argument("--device-name", help="names the result file of a GPU; default: its own, as in h200")
    parser.add_argument("--note", default="", help="what else ran on the machine, kept with recorded results")
    options = parser.parse_args(arguments)
    if options.small and options.record:
        parser.error("--small is a rehearsal: its figures are not recorded")
    options.device = options.device or ("cpu" if options.small and not torch.cuda.is_available() else "cuda")
    options.engines = options.devices.split(",")
    if options.pool_gib is None and options.device == "cuda" and len(set(options.engines)) < len(options.engines):
        options.pool_gib = SHARED_POOL_GIB
    return options


def _measure(options: argparse.Namespace, folder: Path, checks: Checks) -> list[Result]:
    sizes = REHEARSAL if options.small else FULL
    if options.device == "cuda":
        require_gpu("serve")
        # torch keeps what the references need, before an engine takes what is free
        torch.empty(REFERENCE_BYTES, dtype=torch.uint8, device="cuda")
    models = Models.made(folder, sizes.base, sizes.adapters, options.device)
    print(f"a base of {models.parameters:,} parameters and {sizes.adapters} adapters", flush=True)
    started = time.monotonic()
    with serving(folder / "data", **_server_settings(options, models)) as server:
        print(f"ready after {time.monotonic() - started:.1f} s", flush=True)

        async def run() -> list[Result]:
            timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
                api = Api(http, server.url, _operator_key(folder / "data"))
                device, settings = _device_name(options), _settings(options, models)
                return await exercise(Trial(server, api, models, sizes, checks, device, settings))

        try:
            return asyncio.run(run())
        except (TimeoutError, RefusedError, aiohttp.ClientError, psutil.TimeoutExpired) as error:
            end = server.log.read_text(errors="replace")[-4000:]
            checks.note("the run", holds=False, text=f"{error}; the server's log ends so:\n{end}")
            return []


def _server_settings(options: argparse.Namespace, models: Models) -> dict[str, str]:
    own = {"model": str(models.base), "base_id": BASE_ID, "device": options.device, "gateways": str(options.gateways)}
    if options.device == "cuda" or len(options.engines) > 1:
        own["devices"] = options.devices
    if options.pool_gib:
        own["pool_bytes"] = str(int(options.pool_gib * 2**30))
    return own


def _device_name(options: argparse.Namespace) -> str:
    if options.device == "cuda":
        return options.device_name or device_label(torch.cuda.get_device_name())
    return f"cpu{os.cpu_count()}"


def _operator_key(data: Path) -> str:
    command = [sys.executable, "-m", "stencilpress.cli", "key", "create", "demo", "--role", "operator"]
    done = subprocess.run([*command, "--data", str(data)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _settings(options: argparse.Namespace, models: Models) -> dict[str, Any]:
    on_gpu = options.device == "cuda"
    return {
        **({"gpu": torch.cuda.get_device_name()} if on_gpu else {}),
        "base": "random Llama",
        "parameters": models.parameters,
        "dtype": "bfloat16",
        "adapters": len(models.adapters),
        "ranks": f"{min(RANKS)} to {max(RANKS)}",
        "engines": len(options.engines),
        **({"gpus": len(set(options.engines))} if on_gpu else {}),
        **({"pool_gib": options.pool_gib} if options.pool_gib else {}),
        "gateways": options.gateways,
        **({"note": options.note} if options.note else {}),
    }
