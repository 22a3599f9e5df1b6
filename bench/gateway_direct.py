"""Streams of the gateway's bench that go to its engine directly, for what the same load takes without a gateway.

``python -m bench.gateway_direct SOCKET STREAMS TOKENS PROMPT_TOKENS`` keeps so many streams beside those that are
measured, in a process of its own. Prints the tokens that came.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import Sampling, Submit, pack_tokens


async def drain(socket: Path, streams: int, tokens: int, prompt_tokens: int) -> int:
    """Read so many streams to their ends."""
    prompt = pack_tokens(list(range(1, prompt_tokens + 1)))
    async with EngineClient(socket) as client:
        await client.wait_ready()

        async def one() -> int:
            stream = await client.submit(Submit(0, prompt, "", tokens, Sampling()))
            return sum([len(batch) async for batch, _ in stream])

        return sum(await asyncio.gather(*(one() for _ in range(streams))))


def main() -> int:
    socket, streams, tokens, prompt_tokens = sys.argv[1:]
    print(uvloop.run(drain(Path(socket), int(streams), int(tokens), int(prompt_tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
