"""Ten thousand bodies that mean nothing or nearly something: no fault, and a stream beside them goes on unbroken."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stencilpress.gateway.access import ADMIN_PREFIX, Role
from stencilpress.gateway.api.admin.router import OPERATIONS
from tests.fakes.engine import Options
from tests.integration.admin_client import DOCUMENT, AdminClient, admin_client
from tests.integration.gateway_harness import EOS, VOCAB_SIZE, Gateway, running_gateway

BODIES = 10_000
WORKERS = 8
STREAM_TOKENS = 1_000_000
PLACES = {"tenant": "demo", "key": "kkkkkkkkkkkk", "adapter": "pirate", "version": "1", "alias": "prod"}
INFERENCE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/completions": {"model": "pirate", "prompt": "hi", "max_tokens": 1},
}
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    10**9,
    10**30,
    1e308,
    "",
    "x" * 500,
    "\ud800",
    "a\0b",
    "' OR 1=1 --",
    "../../etc/passwd",
    [],
    {},
    [[]] * 20,
    [None],
    {"a": {"b": []}},
    ["q_proj", 7],
    "2026-01-01T00:00:00",
    "9999-12-31T23:59:59.999999+14:00",
]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    options = Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=2 * STREAM_TOKENS, step_delay_s=0.002)
    async with running_gateway(tmp_path, options) as running:
        yield running


def targets() -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and a starting body of everything that reads JSON."""
    found = [("POST", path, body) for path, body in INFERENCE.items()]
    for one in OPERATIONS:
        if one.body is None:
            continue
        schema = DOCUMENT["components"]["schemas"][one.body.__name__]
        body = dict.fromkeys(schema["properties"])
        path = one.path
        for name, value in PLACES.items():
            path = path.replace(f"{{{name}}}", value)
        found.append((one.method, ADMIN_PREFIX + path, body))
    return found


def fuzzed(body: dict[str, Any], chance: random.Random) -> bytes:
    fields = {name: value for name, value in body.items() if chance.random() < 0.7}
    for _ in range(chance.randrange(1, 4)):
        fields[chance.choice([*body, "unheard_of"])] = chance.choice(STRANGE)
    data = json.dumps(chance.choice([fields, fields, fields, [fields], chance.choice(STRANGE)])).encode()
    match chance.randrange(10):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            return chance.randbytes(chance.randrange(200))
        case 2:
            return data * 2
    return data


@pytest.mark.timeout(400)
async def test_bodies_that_mean_nothing_do_no_harm(gateway: Gateway) -> None:
    operator = await admin_client(gateway, "other", Role.OPERATOR)
    chosen = targets()
    assert len(chosen) > 6
    client = await gateway.openai()
    stream = await client.completions.create(model="base", prompt="ab", max_tokens=STREAM_TOKENS, stream=True)
    statuses: dict[int, int] = {}

    async def shoot(worker: int) -> None:
        chance = random.Random(worker)
        for _ in range(BODIES // WORKERS):
            method, path, body = chance.choice(chosen)
            status = await send(gateway, operator, method, path, fuzzed(body, chance))
            statuses[status] = statuses.get(status, 0) + 1

    shooting = asyncio.gather(*(shoot(worker) for worker in range(WORKERS)))
    received = 0
    async for chunk in stream:
        received += len(chunk.choices[0].text)
        if shooting.done():
            break
    assert shooting.done(), "the stream outlasts the bodies"
    await shooting
    assert received > 0
    await stream.close()
    assert sum(statuses.values()) == BODIES // WORKERS * WORKERS
    assert set(statuses) <= {200, 201, 400, 403, 404, 409}, statuses
    assert (await gateway.post("/v1/chat/completions", INFERENCE["/v1/chat/completions"]))[0] == 200


async def send(gateway: Gateway, operator: AdminClient, method: str, path: str, body: bytes) -> int:
    token = operator.key if path.startswith(ADMIN_PREFIX) else gateway.key
    headers = {"Authorization": f"Bearer {token}"}
    async with gateway.http.request(method, gateway.url + path, data=body, headers=headers) as answer:
        await answer.read()
        return answer.status
