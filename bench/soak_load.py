"""The clients of the soak: they ask, stay or leave, and remember what they saw."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

End = Literal["done", "left", "broken", "failed", "refused", "unknown"]
"""``left``: by the client's wish. ``broken``: the connection ended first. ``failed``: an error event in mid-stream.
``refused``: an error in place of an answer. ``unknown``: no answer's head was seen."""

PROMPT = "abc"
"""The fake engine echoes it, a token a character."""
MOST_TOKENS = 60
LEAVES = 0.4
"""The share of clients that leave before the end."""
STREAMED = 0.7
SILENCE_S = 180.0


@dataclass(slots=True)
class Seen:
    """One request as its client saw it. ``told`` is what ``usage`` said, -1 for nothing."""

    asked: int
    request_id: str = ""
    tokens: int = 0
    told: int = -1
    end: End = "unknown"


async def ask(http: aiohttp.ClientSession, url: str, key: str, chance: random.Random) -> Seen:
    """One request of any kind, whatever comes of it."""
    seen = Seen(chance.randint(1, MOST_TOKENS))
    streamed, leaves = chance.random() < STREAMED, chance.random() < LEAVES
    body = {"model": "base", "prompt": PROMPT, "max_tokens": seen.asked, "stream": streamed, "ignore_eos": True}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    stop_at = chance.randint(0, seen.asked) if leaves else -1
    patience_s = chance.uniform(0, 0.2) if leaves and not streamed else SILENCE_S
    try:
        async with asyncio.timeout(patience_s):
            request = http.post(f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
            async with request as response:
                seen.request_id = response.headers.get("x-request-id", "")
                await (_read_events(response, seen, stop_at) if streamed else _read_object(response, seen))
    except TimeoutError:
        if patience_s == SILENCE_S:
            raise TimeoutError(f"nothing came of {seen} for {SILENCE_S:g} s") from None
        seen.end = "left" if seen.request_id else "unknown"
    except (aiohttp.ClientError, ConnectionError):
        seen.end = "broken" if seen.request_id else "unknown"
    return seen


async def _read_object(response: aiohttp.ClientResponse, seen: Seen) -> None:
    text = await response.text()
    if response.status != 200:
        seen.end = "refused"
        return
    answer = json.loads(text)
    seen.tokens, seen.told = len(answer["choices"][0]["text"]), answer["usage"]["completion_tokens"]
    seen.end = "done"


async def _read_events(response: aiohttp.ClientResponse, seen: Seen, stop_at: int) -> None:
    """Count tokens until the end, or until ``stop_at`` of them have come; -1 stays to the end."""
    if response.status != 200:
        await response.read()
        seen.end = "refused"
        return
    seen.end = "broken"  # what it is if no end comes
    async for line in response.content:
        if stop_at == 0 or 0 < stop_at <= seen.tokens:
            seen.end = "left"
            response.close()
            return
        for event in _events(line):
            if "error" in event:
                seen.end = "failed"
            elif event["choices"]:
                seen.tokens += len(event["choices"][0]["text"])
            else:
                seen.told = event["usage"]["completion_tokens"]
        if line == b"data: [DONE]\n":
            seen.end = "done"


def _events(line: bytes) -> Iterator[dict[str, Any]]:
    if line.startswith(b"data: {"):
        yield json.loads(line[6:])
