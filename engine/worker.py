"""The loop of an engine: drain, plan, load, run, report."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import NoReturn, Protocol, runtime_checkable

from stencilpress.engine.heartbeat import CPU_LIMIT_S, FIRST_STEP_LIMIT_S, Heartbeat
from stencilpress.engine.link import Closed, Link, Received
from stencilpress.engine.messages import (
    Abort,
    AskAdapters,
    AskHeld,
    AskPages,
    AskStats,
    Ensure,
    Ensured,
    Forget,
    Forgotten,
    FromEngine,
    Keep,
    Kept,
    Submit,
)
from stencilpress.engine.plan import Fetched, LoadOrder, LoadResult, Sampled, StepPlan
from stencilpress.engine.reports import PageMap, adapters_held, adapters_seen
from stencilpress.engine.residency import Residency
from stencilpress.engine.scheduler import Scheduler

IDLE_POLL_S = 1.0
"""Longest sleep with nothing to run. Messages, finished loads and the next deadline end it; it only bounds how late
housekeeping is."""
MAX_HELD = 1024
"""Messages kept for a gateway whose reply ring is full. One that provokes more without reading is dropped."""
MAX_ENSURES = 256
MAP_PAGES = 2048
"""Pages of the pool's picture that are drawn in one turn of the loop: 0.1 to 0.3 ms, beside the device's work where
it computes by itself."""
MAX_FAILED_STEPS = 8
"""Steps failing in a row after which the device is given up: the supervisor starts a fresh process."""

logger = logging.getLogger(__name__)


class Loads(Protocol):
    """The part of engine/loader.py that the loop uses."""

    def held_back(self) -> AbstractContextManager[None]: ...
    def submit(self, order: LoadOrder) -> None: ...
    def results(self) -> Sequence[LoadResult]: ...


class Runs(Protocol):
    """The part of engine/runner.py that the loop uses."""

    def run(self, plan: StepPlan) -> Sequence[Sampled]: ...


@runtime_checkable
class Launches(Protocol):
    """A runner whose device computes by itself: while it has a step, the loop plans and launches the next."""

    def launch(self, plan: StepPlan) -> Callable[[], Sequence[Sampled]]: ...


class DeviceLostError(RuntimeError):
    """Too many steps failed in a row."""


class Worker:
    """Drives the parts of one engine. :meth:`stop` alone may be called from elsewhere (a signal handler, a thread)."""

    def __init__(
        self,
        scheduler: Scheduler,
        residency: Residency,
        loader: Loads,
        runner: Runs | Launches,
        link: Link,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._residency = residency
        self._loader = loader
        self._launch = runner.launch if isinstance(runner, Launches) else partial(partial, runner.run)
        self._steps_ahead = int(isinstance(runner, Launches))
        self._flights: deque[tuple[StepPlan, Callable[[], Sequence[Sampled]]]] = deque()
        self._link = link
        self._heartbeat = heartbeat or Heartbeat(-1, CPU_LIMIT_S)
        self._held: dict[int, deque[FromEngine]] = {}
        self._ensures: dict[str, list[tuple[int, int]]] = {}
        self._map: PageMap | None = None
        self._map_asks: list[tuple[int, int]] = []
        self._failed_steps = 0
        self._resting = False
        self._stopping = False

    def run(self) -> None:
        """Serve until :meth:`stop`, then end every request with its terminal message and close the link.

        Raises :class:`DeviceLostError`, and whatever a bug in the policy raises: then the process should end.
        """
        try:
            while not self._stopping:
                self.step()
            while self._flights:
                self._land()
            self._end_all()
        finally:
            self._link.close()

    def stop(self) -> None:
        """Finish the step at hand, then end."""
        self._stopping = True
        self._link.wake()  # the signal may come between the last look at the flag and the sleep

    def step(self) -> None:
        """One turn of the loop. Sleeps in the drain if there was nothing to run last time."""
        self._heartbeat.beat()
        self._drain()
        with self._loader.held_back():
            plan = self._scheduler.plan_ahead() if self._flights else self._scheduler.plan()
            self._load()
            if plan is not None:
                self._take_off(plan)
        self._draw_map()
        if self._flights and (plan is None or len(self._flights) > self._steps_ahead):
            self._land()
        elif plan is None:
            self._rest()
        self._report()

    # Drain

    def _drain(self) -> None:
        timeout_s = min(IDLE_POLL_S, self._scheduler.seconds_to_deadline()) if self._resting else 0.0
        for event in self._link.poll(timeout_s):
            if isinstance(event, Closed):
                self._forget(event)
            else:
                self._take(event)
        for result in self._loader.results():
            self._scheduler.loaded(result)
            if isinstance(result, Fetched) or result.error:  # the latter: asked after the read failed that it follows
                for connection, ask in self._ensures.pop(result.digest, ()):
                    self._send(connection, Ensured(ask, result.error))
        self._send_held()

    def _take(self, event: Received) -> None:
        connection, message = event.connection, event.message
        if isinstance(message, Submit):
            try:
                self._scheduler.add((connection, message.id), message)
            except ValueError as error:
                self._link.drop(connection, str(error))
        elif isinstance(message, Abort):
            self._scheduler.abort((connection, message.id))
        elif isinstance(message, Ensure):
            self._ensure(connection, message)
        elif isinstance(message, AskPages):
            self._map = self._map or self._scheduler.page_map()
            self._map_asks.append((connection, message.id))
        else:
            self._send(connection, self._answer(connection, message))

    def _answer(self, connection: int, message: AskStats | AskAdapters | AskHeld | Keep | Forget) -> FromEngine:
        if isinstance(message, AskStats):
            return self._scheduler.stats(message.id)
        if isinstance(message, AskAdapters):
            return adapters_seen(self._residency, self._scheduler.waiting_for, message)
        if isinstance(message, AskHeld):
            return adapters_held(self._scheduler.held(), message)
        if isinstance(message, Forget):
            return Forgotten(message.id, self._scheduler.forget(message.adapter))
        return Kept(message.id, self._residency.keep(connection, message.pinned, message.preloaded))

    def _ensure(self, connection: int, ask: Ensure) -> None:
        failure = self._residency.failure(ask.adapter)
        if failure or self._residency.sound(ask.adapter):
            self._send(connection, Ensured(ask.id, failure))
        elif sum(map(len, self._ensures.values())) >= MAX_ENSURES:
            self._send(connection, Ensured(ask.id, f"overloaded: {MAX_ENSURES} adapters wait to be checked"))
        else:
            self._ensures.setdefault(ask.adapter, []).append((connection, ask.id))
            self._scheduler.check_adapter(ask.adapter)

    def _forget(self, event: Closed) -> None:
        self._scheduler.abort_connection(event.connection)
        self._residency.keep(event.connection, (), ())
        self._held.pop(event.connection, None)
        self._map_asks = [ask for ask in self._map_asks if ask[0] != event.connection]
        for digest, asks in list(self._ensures.items()):
            self._ensures[digest] = [ask for ask in asks if ask[0] != event.connection]

    def _draw_map(self) -> None:
        """Go on with the picture of the pool that was asked for: a part, while the device has work, else all of it."""
        if self._map is None:
            return
        if self._map.advance(MAP_PAGES if self._flights else sys.maxsize):
            for connection, ask in self._map_asks:
                self._send(connection, self._map.answer(ask))
            self._map, self._map_asks = None, []

    # Load, run

    def _load(self) -> None:
        for order in self._residency.take_orders():
            self._loader.submit(order)

    def _take_off(self, plan: StepPlan) -> None:
        self._resting = False
        if plan.number == 1:
            self._heartbeat.expect(FIRST_STEP_LIMIT_S)
        try:
            result = self._launch(plan)
        except Exception as error:  # noqa: BLE001 it counts when the step would have landed
            result = partial(_fail, error)
        self._flights.append((plan, result))

    def _land(self) -> None:
        """Wait for the oldest step. If it fails, so does the next one, which builds on its tokens."""
        plan, result = self._flights.popleft()
        try:
            self._scheduler.commit(plan, result())
            self._failed_steps = 0
        except Exception as error:
            logger.exception("step %d failed", plan.number)
            self._scheduler.fail(plan, "the step that ran this request failed")
            while self._flights:
                later, result = self._flights.popleft()
                with suppress(Exception):
                    result()  # its pages are in use until then
                self._scheduler.fail(later, "the step before that of this request failed")
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise DeviceLostError(f"{MAX_FAILED_STEPS} steps failed in a row") from error

    def _rest(self) -> None:
        """Nothing to run: sleep in the next drain. The books are checked once each time the engine falls idle."""
        if self._scheduler.idle and not self._resting:
            self._scheduler.check()
        self._resting = True

    # Report

    def _report(self) -> None:
        for connection, step in self._scheduler.take_replies().items():
            self._send(connection, step)

    def _send(self, connection: int, message: FromEngine) -> None:
        """Send, or keep the message behind those kept already and plan nothing more for that gateway."""
        held = self._held.get(connection)
        if held is None:
            if self._link.send(connection, message):
                return
            held = self._held[connection] = deque()
            self._scheduler.park(connection)
        held.append(message)
        if len(held) > MAX_HELD:
            self._link.drop(connection, "it does not read its replies")

    def _send_held(self) -> None:
        for connection in [connection for connection in self._held if self._link.writable(connection)]:
            held = self._held[connection]
            while held and self._link.send(connection, held[0]):
                held.popleft()
            if not held:
                del self._held[connection]
                self._scheduler.unpark(connection)

    def _end_all(self) -> None:
        self._scheduler.abort_all()
        self._report()
        for asks in self._ensures.values():
            for connection, ask in asks:
                self._send(connection, Ensured(ask, "the engine is shutting down"))


def _fail(error: Exception) -> NoReturn:
    raise error
