"""Random traffic and random faults for a virtual engine, and what must be left when they are over: nothing."""

from __future__ import annotations

import random

from stencilpress.engine.limits import Limits
from tests.unit.simulator import Engine
from tests.unit.virtual_device import VOCAB


def check_nothing_is_left(engine: Engine) -> None:
    """All requests have had their one end, and every page is free once what idles is evicted."""
    assert all(client.finished is not None for client in engine.clients.values())
    assert engine.pool.kv == 0
    assert engine.pool.free + engine.pool.cached + engine.pool.adapter == engine.pool.total
    settle(engine)  # what was used of late may still be on its way back
    while engine.residency.evict_one():
        pass
    assert engine.pool.free == engine.pool.total


def settle(engine: Engine) -> None:
    """Step until nothing runs and nothing is on its way."""
    while engine.step() is not None or engine.loader.orders or engine.loaded:
        pass


class Storm:
    """Random traffic and random faults from one seed."""

    def __init__(self, seed: int, *, ahead: bool = False) -> None:
        self.random = random.Random(seed)
        draw = self.random.randint
        choice = self.random.choice
        self.digests = [f"adapter-{i}" for i in range(draw(1, choice((10, 24))))]
        limits = Limits(
            max_num_seqs=draw(1, choice((8, 16))),
            max_num_batched_tokens=choice((1, 3, 8, 32)),
            max_loras=choice((1, 2, 3, 4, 24)),
            max_waiting=choice((1, 10, 30, 200)),
            max_model_len=choice((24, 64)),
            page_tokens=choice((1, 2, 4)),
            vocab_size=VOCAB,
            patience_steps=choice((1, 8, 40, 256)),
        )
        self.engine = Engine(
            limits,
            pages=draw(8, 100),
            needs={digest: draw(1, 9) for digest in self.digests},
            max_cpu_loras=choice((1, 2, 6, 30)),
            ahead=ahead,
            max_adapter_pages=choice((1, 9, 20, 1 << 30)),
        )
        self.engine.device.fails = self.random if self.random.random() < 0.5 else None
        self.engine.loader.tells = self.random.random() < 0.5
        self.engine.eager = self.random.random() < 0.5
        self.rate = choice((0.05, 0.3, 1.0))
        self.tenants = draw(1, 5)
        self.weights = [choice((0.001, 0.5, 1.0, 2.0, 1000.0)) for _ in range(self.tenants)]
        self.prompts = [[self.random.randrange(VOCAB) for _ in range(longest)] for longest in (24, 24, 64)]
        self.last_id = 0
        self.last: tuple[list[int], str | None, int] = [], None, 0

    def run(self, steps: int) -> Engine:
        """So many stormy steps, then calm until every request has ended. The pool's books are checked after each."""
        for _ in range(steps):
            self._events()
            live = sorted(self.engine.live)
            self.engine.step(
                load_speed=self.random.choice((0, 0, 1, 3)),
                in_flight=self.random.sample(live, min(len(live), 2)) if self.random.random() < 0.05 else (),
                fails=self.random.random() < 0.01,
            )
        for connection in (1, 2, 3):
            self._unpark(connection)
            self.engine.residency.keep(connection, (), ())
        self.engine.loader.broken.clear()
        self.engine.loader.jammed.clear()
        self.engine.device.fails = None
        self.engine.run_until_idle()
        return self.engine

    def _events(self) -> None:
        while self.random.random() < self.rate / (1 + self.rate):
            self._submit()
        chance = self.random.random()
        if chance < 0.03 and self.engine.live:
            self.engine.scheduler.abort(self.random.choice(sorted(self.engine.live)))
        elif chance < 0.05:
            self._park(self.random.randint(1, 3))
        elif chance < 0.10 and self.engine.parked:
            self._unpark(self.random.choice(sorted(self.engine.parked)))
        elif chance < 0.105:
            self._hang_up(self.random.randint(1, 3))
        elif chance < 0.12:
            faults = self.random.choice((self.engine.loader.broken, self.engine.loader.jammed))
            faults ^= {self.random.choice(self.digests)}
        elif chance < 0.13:
            self.engine.scheduler.check_adapter(self.random.choice(self.digests))
        elif chance < 0.14:
            self.engine.scheduler.forget(self.last[1] or self.random.choice(self.digests))
        elif chance < 0.15:
            most = self.random.choice((2, len(self.digests)))
            wished = [
                self.random.sample(self.digests, self.random.randint(0, min(most, len(self.digests)))) for _ in range(2)
            ]
            assert self.engine.residency.keep(self.random.randint(1, 3), *wished) == ""

    def _submit(self) -> None:
        self.last_id += 1
        longest = self.engine.limits.max_model_len
        length = self.random.randint(1, longest)
        prompt = [self.random.randrange(VOCAB) for _ in range(length)]
        if self.random.random() < 0.5:  # it begins as others do
            common = self.random.choice(self.prompts)[: self.random.randint(1, length)]
            prompt[: len(common)] = common
        tenant = self.random.randrange(self.tenants)
        adapter = self.random.choice((None, *self.digests))
        if self.last[0] and self.random.random() < 0.2:  # it asks what the last one asked: their answers are the same
            prompt, adapter, tenant = self.last
        self.last = prompt, adapter, tenant
        stop_ids = tuple(self.random.sample(range(VOCAB), self.random.choice((0, 2))))
        self.engine.submit(
            (self.random.randint(1, 3), self.last_id),
            prompt,
            self.random.randint(1, max(1, min(24, longest - len(prompt) + 1))),
            adapter,
            stop_ids,
            tenant=tenant,
            salt=b"salt %d" % tenant if tenant < 3 and self.random.random() < 0.9 else b"",
            weight=self.weights[tenant],
            priority=self.random.choice((0, 0, -1, 3, -100, 100)),
            max_wait_ms=self.random.choice((0, 0, 0, 0, 1, 100, 2000)),
        )

    def _park(self, connection: int) -> None:
        self.engine.parked.add(connection)
        self.engine.scheduler.park(connection)

    def _unpark(self, connection: int) -> None:
        self.engine.parked.discard(connection)
        self.engine.scheduler.unpark(connection)

    def _hang_up(self, connection: int) -> None:
        """A gateway dies: its clients hear nothing more. The number stands for another gateway afterwards."""
        self.engine.scheduler.abort_connection(connection)
        self.engine.residency.keep(connection, (), ())
        self.engine.parked.discard(connection)
        for key in [key for key in self.engine.live if key[0] == connection]:
            self.engine.live.discard(key)
            del self.engine.clients[key]
