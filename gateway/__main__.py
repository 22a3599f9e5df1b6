"""The gateway process: ``python -m stencilpress.gateway``, started by the supervisor."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from weakref import WeakSet

from aiohttp import WSCloseCode, web

from stencilpress.engine import lifeline
from stencilpress.engine.client import EngineClient
from stencilpress.engine.heartbeat import Heartbeat
from stencilpress.engine.logs import configure_logs
from stencilpress.engine.settings import SettingsError, engine_sockets, read_settings
from stencilpress.engine.spec import base_ids
from stencilpress.gateway.accounting import accounting
from stencilpress.gateway.alerts.watch import alerting
from stencilpress.gateway.app import create_runner
from stencilpress.gateway.catalog.schema import SchemaError, check_schema
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.drain import Drain
from stencilpress.gateway.ending import Ending
from stencilpress.gateway.engine_reader import EngineReader
from stencilpress.gateway.engines import Engines
from stencilpress.gateway.errors import UnavailableError
from stencilpress.gateway.keeper import keeper_of
from stencilpress.gateway.keys import KeyRing
from stencilpress.gateway.lifecycle.cold import ColdTier
from stencilpress.gateway.lifecycle.desk import AdapterDesk
from stencilpress.gateway.lifecycle.gate import IntakeGate
from stencilpress.gateway.lifecycle.upkeep import Terms, tend_for_ever
from stencilpress.gateway.live import live_feed
from stencilpress.gateway.metrics import Metrics
from stencilpress.gateway.names import BaseNames
from stencilpress.gateway.observation import log_context
from stencilpress.gateway.peers import serve_peers
from stencilpress.gateway.route import Router
from stencilpress.gateway.sampling import sampling
from stencilpress.gateway.server import keep_certificate, tls_context
from stencilpress.gateway.services import Services
from stencilpress.gateway.settings import GatewaySettings
from stencilpress.gateway.side import SWITCH_S
from stencilpress.gateway.sweeper import Sweeper
from stencilpress.gateway.tokenizer import ModelTokenizer
from stencilpress.gateway.tracing import Tracing, tracing
from stencilpress.web.app import mount_console

BAD_SETTINGS = 2
"""Exit status: starting again cannot help."""
FAILED = 1
"""Exit status: the catalog did not answer at the start, or the shutdown had to cut off streams or itself."""
BACKLOG = 4096
"""Connections that wait to be accepted, as the supervisor has it: aiohttp would listen again with 128, and the kernel
drops what comes on top, which then waits a second."""
TOKENIZER_THREADS = 2
GARBAGE_OBJECTS = 2_000
"""New objects before garbage is looked for: Python's 700 are made by a few requests on their way in, which it delays.
Nearly everything is freed by its count of references; what is not adds up to some megabytes until then."""
BEAT_S = 1.0
HANG_LIMIT_S = 30.0
"""A loop that has not turned for so long serves nobody: the supervisor starts the process anew."""
LAST_EVENTS_S = 0.3
"""For the error events of streams that outlived the drain, and then for the last frames of all WebSockets together."""

logger = logging.getLogger("stencilpress.gateway")


def main() -> int:
    try:
        settings = read_settings(GatewaySettings, os.environ)
        configure_logs(settings.log_format, log_context)
        if settings.lifeline_fd >= 0:
            lifeline.hold(settings.lifeline_fd)
        sys.setswitchinterval(SWITCH_S)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one prompt at a time: its pool of threads is only a detour
        return _run(settings)
    except (SettingsError, SchemaError, UnavailableError) as error:
        print(f"stencilpress gateway: {error}", file=sys.stderr)  # noqa: T201 - for the person who started it
        return FAILED if isinstance(error, UnavailableError) else BAD_SETTINGS


def _run(settings: GatewaySettings) -> int:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _serve(settings: GatewaySettings) -> int:
    stop = _stop_requested(settings.drain_s)
    context, traces = tls_context(settings), tracing(settings)
    async with AsyncExitStack() as stack:
        last = stack.enter_context(ExitStack())  # after all else: until then clients may still take what is theirs
        if traces is not None:
            stack.push_async_callback(traces.close)
        services = await stack.enter_async_context(_services(settings, traces))
        if stop.is_set():  # while it started: then it never serves
            return 0
        runner = create_runner(services, LAST_EVENTS_S, [mount_console])
        await runner.setup()
        last.callback(runner.abort)
        gc.collect()
        gc.freeze()  # the tokenizer's tables among others: looking through them again would stop all streams for 50 ms
        gc.set_threshold(GARBAGE_OBJECTS)
        if settings.peer_fd >= 0:
            peers = await serve_peers(socket.socket(fileno=settings.peer_fd), services.metrics)
            stack.callback(peers.close)
        if context is not None:
            renewal = asyncio.create_task(keep_certificate(context, settings))
            stack.callback(renewal.cancel)
        site = web.SockSite(runner, _listener(settings.http_fd), backlog=BACKLOG, ssl_context=context)
        await site.start()
        if settings.gateway == 1:
            for warning in settings.warnings:
                logger.warning("%s", warning)
        heart = asyncio.create_task(_beat(Heartbeat(settings.heartbeat_fd, settings.hang_limit_s or HANG_LIMIT_S)))
        stack.callback(heart.cancel)
        await stop.wait()
        if settings.gateways > 1:  # the other gateways accept from the same socket
            await site.stop()
        clean = await _shut_down(services)
        await runner.cleanup()
    return 0 if clean else FAILED


def _stop_requested(drain_s: float) -> asyncio.Event:
    """Set by the first signal, from which on the time runs; further ones change nothing."""
    stop, ending = asyncio.Event(), Ending(FAILED)

    def begin() -> None:
        ending.begin(drain_s)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, begin)
    return stop


async def _beat(heartbeat: Heartbeat) -> None:
    """Show that the loop turns, until cancelled."""
    while True:
        heartbeat.beat()
        await asyncio.sleep(BEAT_S)


@asynccontextmanager
async def _services(settings: GatewaySettings, traces: Tracing | None) -> AsyncIterator[Services]:
    names, tokenizer = _read_model(Path(settings.model_dir))
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer"))
        db = await stack.enter_async_context(Database(settings.database_url))
        sockets = engine_sockets(Path(settings.engine_socket), settings.engines)
        await check_schema(db)
        metrics = Metrics(settings.gateway, settings.metrics_tenants)
        accounts = await stack.enter_async_context(accounting(settings, metrics))
        engine = await stack.enter_async_context(Engines([EngineClient(path) for path in sockets]))
        await stack.enter_async_context(alerting(settings, engine))
        changes = Changes(db)
        await stack.enter_async_context(changes.following())
        base = BaseNames.of(names)
        view = EngineReader(engine, db)
        await stack.enter_async_context(sampling(settings, db, view))
        keeper = keeper_of(settings, db, engine, changes, base)
        await stack.enter_async_context(keeper.following())
        await stack.enter_async_context(Sweeper(db, engine, changes).following())
        yield Services(
            settings=settings,
            db=db,
            changes=changes,
            keys=KeyRing(db, changes),
            router=Router(db, base, changes),
            engine=engine,
            view=view,
            live=live_feed(settings, metrics, view),
            keeper=keeper,
            tokenizer=tokenizer,
            base_names=names,
            metrics=metrics,
            drain=Drain(),
            accounting=accounts,
            threads=threads,
            started_at=int(time.time()),
            websockets=WeakSet(),
            desk=await stack.enter_async_context(_desk(settings, db, base)),
            tracing=traces,
        )


@asynccontextmanager
async def _desk(settings: GatewaySettings, db: Database, base: BaseNames) -> AsyncIterator[AdapterDesk | None]:
    """Uploads and upkeep of adapters, where there is a folder for them."""
    if not settings.adapters_dir:
        yield None
        return
    cold = ColdTier(settings.cold_store_url) if settings.cold_store_url else None
    desk = AdapterDesk.open(
        db,
        Path(settings.adapters_dir).parent,
        Path(settings.model_dir),
        base,
        dtype=settings.dtype,
        max_rank=settings.max_lora_rank,
        gate=IntakeGate(settings.intake_workers),
        cold=cold,
    )
    terms = Terms(
        every_s=settings.upkeep_s,
        grace=timedelta(seconds=settings.purge_grace_s),
        tenant_grace=timedelta(days=settings.tenant_purge_days) if settings.tenant_purge_days else None,
        local_bytes=settings.local_adapter_bytes,
    )
    upkeep = asyncio.create_task(tend_for_ever(desk, terms))
    try:
        yield desk
    finally:
        upkeep.cancel()
        await asyncio.wait([upkeep])
        await desk.close()


def _read_model(model_dir: Path) -> tuple[tuple[str, ...], ModelTokenizer]:
    """The base's names and its tokenizer. Raises :class:`SettingsError` for a folder that cannot be used."""
    try:
        return base_ids(model_dir), ModelTokenizer(model_dir)
    except (OSError, ValueError) as error:
        raise SettingsError(f"STENCILPRESS_MODEL_DIR: {error}") from error


async def _shut_down(services: Services) -> bool:
    """Refuse new work, let streams finish, end those that do not with an error event. True if none was cut."""
    services.drain.begin()
    services.live.close()
    clean = await services.drain.idle(services.settings.drain_s)
    if not clean:
        await services.engine.close()  # ends every open stream
        await services.drain.idle(LAST_EVENTS_S)
    goodbyes = [socket_.close(code=WSCloseCode.GOING_AWAY) for socket_ in services.websockets]
    with suppress(TimeoutError):  # who does not read has a full buffer, in which no goodbye finds room
        async with asyncio.timeout(LAST_EVENTS_S):
            await asyncio.gather(*goodbyes, return_exceptions=True)
    return clean


def _listener(fd: int) -> socket.socket:
    """The inherited socket. Connections take over its options: a peer that vanished is noticed within a minute."""
    listener = socket.socket(fileno=fd)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 50_000)
    return listener


if __name__ == "__main__":
    sys.exit(main())
