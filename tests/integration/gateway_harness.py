"""The real gateway on a real socket, with a real catalog, in front of the fake engine.

The tokenizer is byte-level and knows few merges, so most characters are several tokens. The chat template is the
plain concatenation of the messages' contents; the fake engine echoes the prompt: an answer repeats what was asked.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp import web
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stencilpress.engine.client import REQUEST_RING_BYTES, EngineClient
from stencilpress.gateway.accounting import accounting
from stencilpress.gateway.app import Mount, create_runner
from stencilpress.gateway.catalog.adapters import add_version, promote
from stencilpress.gateway.catalog.records import NewVersion
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import create_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.drain import Drain
from stencilpress.gateway.engine_reader import EngineReader
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.keeper import keeper_of
from stencilpress.gateway.keys import KeyRing, issue_key
from stencilpress.gateway.lifecycle.desk import AdapterDesk
from stencilpress.gateway.lifecycle.gate import IntakeGate
from stencilpress.gateway.live import live_feed
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.route import Router
from stencilpress.gateway.services import Services
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.tokenizer import ModelTokenizer
from tests.catalogs import lay_catalog
from tests.fakes.engine import FakeEngine, Options, running_engine
from tests.unit.adapters import tiny_spec, write_base

BASE_ID = "acme/Press-1B"
BASE_NAMES = (BASE_ID, "press-1b")
EOS = 0
VOCAB_SIZE = 300
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A model folder as far as a gateway and its intake read it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|eos|>"]
    )
    tokenizer.train_from_iterator(["zz zzz zzzz qq qqq qqqq"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|eos|>"} if template is None else {"eos_token": "<|eos|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return write_base(folder, tiny_spec(base_id=BASE_ID, vocab_size=VOCAB_SIZE), aliases=BASE_NAMES[1:])


@dataclass(frozen=True)
class Gateway:
    """A running gateway. Tenant ``demo`` has ``key`` and the adapter ``pirate`` with versions 1 (prod) and 2."""

    url: str
    key: str
    other_key: str
    """Of a tenant that owns nothing."""
    services: Services
    engine: FakeEngine
    http: aiohttp.ClientSession
    stack: AsyncExitStack
    routes: tuple[web.AbstractRoute, ...]

    async def openai(self, key: str | None = None) -> AsyncOpenAI:
        """The unmodified SDK, closed with the gateway."""
        api = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, timeout=45)
        return await self.stack.enter_async_context(api)

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """POST JSON (or bytes) and read the answer as JSON."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        async with self.http.post(f"{self.url}{path}", data=data, headers=headers, **options) as response:
            return response.status, await response.json(content_type=None)


def new_version(digest: str) -> NewVersion:
    return NewVersion(digest * 64, BASE_ID, False, (8,), ("q_proj",), 1000, ("adapter_model.safetensors",))


@asynccontextmanager
async def running_gateway(
    folder: Path,
    options: Options | None = None,
    *,
    template: str | None = TEMPLATE,
    request_ring_bytes: int = REQUEST_RING_BYTES,
    mounts: Sequence[Mount] = (),
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """Everything of one gateway in this process; the engine in a thread. The catalog is a new file."""
    options = options or Options(vocab_size=VOCAB_SIZE, eos_ids=(EOS,), max_model_len=512)
    model_dir = build_model(folder / "model", template)
    url, engine_socket = lay_catalog(folder / "catalog.db"), folder / "engine.sock"
    gateway_settings = GatewaySettings(
        model_dir=str(model_dir), database_url=url, engine_socket=str(engine_socket), http_fd=-1, **settings
    )
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(running_engine(engine_socket, options))
        threads = stack.enter_context(ThreadPoolExecutor(2))
        db = await stack.enter_async_context(Database(url))
        metrics = Metrics(gateway_settings.gateway, gateway_settings.metrics_tenants)
        accounts = await stack.enter_async_context(accounting(gateway_settings, metrics))
        client = await stack.enter_async_context(EngineClient(engine_socket, request_ring_bytes=request_ring_bytes))
        keys = await _fill_catalog(db)
        await client.wait_ready()
        changes = Changes(db)
        await stack.enter_async_context(changes.following())
        engines, base = Engines([client]), BaseNames.of(BASE_NAMES)
        keeper = keeper_of(gateway_settings, db, engines, changes, base)
        await stack.enter_async_context(keeper.following())
        view = EngineReader(engines, db)
        services = Services(
            settings=gateway_settings,
            db=db,
            changes=changes,
            keys=KeyRing(db, changes),
            router=Router(db, base, changes),
            engine=engines,
            view=view,
            live=live_feed(gateway_settings, metrics, view),
            keeper=keeper,
            tokenizer=ModelTokenizer(model_dir),
            base_names=BASE_NAMES,
            metrics=metrics,
            drain=Drain(),
            accounting=accounts,
            threads=threads,
            started_at=int(time.time()),
            websockets=WeakSet(),
            desk=AdapterDesk.open(
                db,
                folder / "v1",
                model_dir,
                base,
                dtype=gateway_settings.dtype,
                max_rank=gateway_settings.max_lora_rank,
                gate=IntakeGate(gateway_settings.intake_workers),
            ),
        )
        runner = create_runner(services, 1.0, mounts)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        routes = tuple(runner.app.router.routes())
        yield Gateway(f"http://{host}:{port}", *keys, services, engine, http, stack, routes)


async def _fill_catalog(db: Database) -> tuple[str, str]:
    base = BaseNames.of(BASE_NAMES)
    tenant = await create_tenant(db, "demo")
    await create_tenant(db, "other")
    await add_version(db, tenant.id, "pirate", new_version("a"), base)
    await add_version(db, tenant.id, "pirate", new_version("b"), base)
    await promote(db, tenant.id, "pirate", 1)
    return (await issue_key(db, "demo")).token, (await issue_key(db, "other")).token
