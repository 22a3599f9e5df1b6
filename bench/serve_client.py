"""The clients of the serve bench: the API by hand, and streams that begin at once from processes of their own.

``python -m bench.serve_client`` is such a process: a :class:`Job` on standard input, its streams on standard output.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.soak_load import End
from stencilpress.gateway.access import ADMIN_PREFIX

START_S = 2.0
"""After which all processes are there and begin."""
LIMIT_S = 100.0
EVENT = b"data: "


class Request(msgspec.Struct, frozen=True):
    """A greedy chat of one message, with an answer of exactly so many tokens."""

    model: str
    key: str
    text: str
    tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class Stream(msgspec.Struct):
    """One request as its client saw it. Times are of the machine's monotonic clock, in seconds.

    ``times_s`` are those of events with text; ``tokens`` is what ``usage`` told, ``served`` the version that answered.
    """

    model: str
    sent_s: float
    ended_s: float = 0.0
    times_s: list[float] = msgspec.field(default_factory=list)
    tokens: int = 0
    served: str = ""
    finish: str = ""
    end: End = "broken"
    error: str = ""


class Job(msgspec.Struct, frozen=True):
    """Requests to send at ``start_s`` of the monotonic clock."""

    url: str
    requests: list[Request]
    start_s: float


async def load(url: str, requests: Sequence[Request], processes: int = 1) -> list[Stream]:
    """Send all requests at once from several processes; what each came to."""
    start_s = time.monotonic() + START_S
    jobs = [Job(url, list(requests[number::processes]), start_s) for number in range(processes)]
    return [stream for streams in await asyncio.gather(*map(_in_process, jobs)) for stream in streams]


async def _in_process(job: Job) -> list[Stream]:
    command = [sys.executable, "-m", "bench.serve_client"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = await process.communicate(msgspec.json.encode(job))
    if process.returncode:
        raise RuntimeError(f"a client ended with exit code {process.returncode}")
    return msgspec.json.decode(out, type=list[Stream])


async def run_job(job: Job) -> list[Stream]:
    """Send a job's requests from this process."""
    timeout = aiohttp.ClientTimeout(total=START_S + LIMIT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        await asyncio.sleep(job.start_s - time.monotonic())
        return await asyncio.gather(*(_stream(http, job.url, request) for request in job.requests))


async def _stream(http: aiohttp.ClientSession, url: str, request: Request) -> Stream:
    seen = Stream(request.model, time.monotonic())
    headers = {"Authorization": f"Bearer {request.key}"}
    try:
        async with http.post(f"{url}/v1/chat/completions", json=request.body(), headers=headers) as answer:
            if answer.status == 200:
                await _read(answer, seen)
            else:
                seen.end, seen.error = "refused", f"{answer.status} {(await answer.text())[:200]}"
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.ended_s = time.monotonic()
    return seen


async def _read(answer: aiohttp.ClientResponse, seen: Stream) -> None:
    async for line in answer.content:
        if line.startswith(EVENT):
            _take(line[len(EVENT) :], seen, time.monotonic())
        if seen.end != "broken":
            return
    seen.error = "the connection ended before the stream"


def _take(event: bytes, seen: Stream, now_s: float) -> None:
    """One event. Those with a token alone are not parsed: clients share the cores with the server."""
    if event.startswith(b"[DONE]"):
        seen.end = "done"
    elif event.startswith(b'{"error"'):
        seen.end, seen.error = "failed", event.decode()[:300]
    elif b'"usage":{' in event:
        seen.tokens = json.loads(event)["usage"]["completion_tokens"]
    elif b'"finish_reason":"' in event:
        seen.finish = json.loads(event)["choices"][0]["finish_reason"]
    else:
        seen.served = seen.served or json.loads(event)["model"]
        seen.times_s.append(now_s)


class RefusedError(RuntimeError):
    """An answer that is not a success."""

    def __init__(self, asked: str, status: int, text: str) -> None:
        super().__init__(f"{asked} answered {status}: {text[:500]}")
        self.status = status


class Api:
    """The server's HTTP API, the admin API with an operator's key. Raises :class:`RefusedError`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, operator: str) -> None:
        self.http, self.url, self._operator = http, url, operator

    async def admin(self, method: str, path: str, **options: Any) -> Any:
        """Ask the admin API; ``path`` begins after its prefix."""
        return await self._ask(method, ADMIN_PREFIX + path, self._operator, **options)

    async def complete(self, model: str, key: str, prompt: Sequence[int], tokens: int) -> Any:
        """A greedy completion of token ids, with the five best tokens of each place."""
        body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "logprobs": 5}
        return await self._ask("POST", "/v1/completions", key, json={**body, "ignore_eos": True})

    async def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        async with self.http.get(f"{self.url}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    async def _ask(self, method: str, path: str, key: str, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.request(method, self.url + path, headers=headers, **options) as answer:
            text = await answer.text()
        if answer.status >= 300:
            raise RefusedError(f"{method} {path}", answer.status, text)
        return json.loads(text) if text else None


def main() -> int:
    """Be one process of the load."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run_job(job))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
