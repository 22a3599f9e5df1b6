"""The yardstick of the gateway's bench: an aiohttp and uvloop server that writes the same frames and does nothing else.

``python -m bench.gateway_bare PORT --interval-ms 20``. Also the upstream of peers, which speak HTTP to their engines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

import uvloop
from aiohttp import web

WORD = " hello"


def _chunk(delta: dict[str, str], finish: str | None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    head = {
        "id": "chatcmpl-" + "0" * 32,
        "created": int(time.time()),
        "model": "bare",
        "object": "chat.completion.chunk",
    }
    return b"data: " + json.dumps({**head, "choices": [choice], "usage": None, **more}).encode() + b"\n\n"


async def create(request: web.Request) -> web.StreamResponse:
    """``max_tokens`` frames, one every interval; or all at once as one object."""
    asked = await request.json()
    tokens = asked["max_tokens"]
    usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": tokens + 10}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": WORD * tokens}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        head = {"id": "chatcmpl-0", "created": int(time.time()), "model": "bare", "object": "chat.completion"}
        return web.json_response({**head, "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    frame, interval_s = _chunk({"content": WORD}, None), request.app[INTERVAL]
    loop = asyncio.get_running_loop()
    due = loop.time()
    await response.write(_chunk({"role": "assistant", "content": ""}, None))
    for _ in range(tokens):
        await response.write(frame)
        due += interval_s
        await asyncio.sleep(max(due - loop.time(), 0))
    end = {**json.loads(_chunk({}, None)[6:]), "choices": [], "usage": usage}
    await response.write(_chunk({}, "length") + b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


async def readyz(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


INTERVAL = web.AppKey("interval_s", float)


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    given = parser.parse_args()
    app = web.Application()
    app[INTERVAL] = given.interval_ms / 1000
    app.router.add_post("/v1/chat/completions", create)
    app.router.add_post("/chat/completions", create)
    app.router.add_get("/readyz", readyz)
    web.run_app(app, host="127.0.0.1", port=given.port, print=None, access_log=None, loop=uvloop.new_event_loop())


if __name__ == "__main__":
    main()
