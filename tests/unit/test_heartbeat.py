"""The sign of life: who hangs, and who only takes long."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from stencilpress.engine.heartbeat import LEAST_LIMIT_S, SLOWEST_TURNS, Heartbeat, Pulse

LIMIT_S = 10.0


class Clock:
    """A clock that a test sets, in seconds."""

    now_s = 100.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Iterator[Pulse]:
    pulse = Pulse(clock)
    yield pulse
    pulse.close()


def heartbeat(pulse: Pulse, clock: Clock, limit_s: float = LIMIT_S) -> Heartbeat:
    return Heartbeat(os.dup(pulse.fd), limit_s, clock)


def test_an_engine_that_loads_its_model_has_all_the_time(pulse: Pulse, clock: Clock) -> None:
    heartbeat(pulse, clock)
    clock.now_s += 3600
    assert not pulse.overdue()


def test_a_loop_that_does_not_turn_in_time_hangs_and_one_that_does_not(pulse: Pulse, clock: Clock) -> None:
    heart = heartbeat(pulse, clock)
    for _ in range(5):
        heart.beat()
        clock.now_s += 1
        assert not pulse.overdue()
    clock.now_s += LIMIT_S
    assert pulse.overdue()


def test_what_is_announced_may_take_longer_once(pulse: Pulse, clock: Clock) -> None:
    heart = heartbeat(pulse, clock)
    heart.beat()
    heart.expect(600)
    clock.now_s += 599
    assert not pulse.overdue()
    heart.beat()
    clock.now_s += LIMIT_S + 1
    assert pulse.overdue()


def test_slow_turns_within_the_limit_raise_it(pulse: Pulse, clock: Clock) -> None:
    heart = heartbeat(pulse, clock)
    heart.beat()
    clock.now_s += LIMIT_S - 1
    heart.beat()
    clock.now_s += SLOWEST_TURNS * (LIMIT_S - 1) - 1
    assert not pulse.overdue()


def test_a_stop_beyond_the_limit_raises_nothing(pulse: Pulse, clock: Clock) -> None:
    heart = heartbeat(pulse, clock)
    heart.beat()
    clock.now_s += 1000
    heart.beat()
    clock.now_s += LIMIT_S + 1
    assert pulse.overdue()


def test_a_new_engine_begins_anew(pulse: Pulse, clock: Clock) -> None:
    heartbeat(pulse, clock).beat()
    clock.now_s += 1000
    pulse.reset()
    assert not pulse.overdue()


def test_no_limit_is_below_what_an_idle_loop_needs(pulse: Pulse, clock: Clock) -> None:
    heartbeat(pulse, clock, 0.1).beat()
    clock.now_s += LEAST_LIMIT_S - 0.1
    assert not pulse.overdue()


def test_without_a_descriptor_nobody_looks() -> None:
    Heartbeat(-1, LIMIT_S).beat()
