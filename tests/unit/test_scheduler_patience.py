"""With one slot a steady stream on adapter A lets B start within twice A's longest request, however tight the pool is.

Hypothesis picks the stream, the engine and the pool, down to the tightest that admits each request. Time is counted in
planned steps: waiting for a copy takes none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.simulator import Client, Engine, make_engine

EXAMPLES = 400
PAGE_TOKENS = 4
B_ANSWER = 4
STREAM, PATIENT = 2, 1

pytestmark = pytest.mark.timeout(300)  # ten seconds or so on a quiet machine


@dataclass(frozen=True)
class Stream:
    """``depth`` requests of A are always there, of answers up to ``longest``, all that long if ``equal``; ``spare``
    pages are left when the larger of both requests runs alone."""

    seed: int
    seats: int
    budget: int
    a_pages: int
    b_pages: int
    spare: int
    prompt: int
    longest: int
    equal: bool
    b_prompt: int
    depth: int
    same_tenant: bool
    patience: int
    ahead: bool

    @property
    def pages(self) -> int:
        a = self.a_pages + -(-(self.prompt + self.longest) // PAGE_TOKENS)
        b = self.b_pages + -(-(self.b_prompt + B_ANSWER) // PAGE_TOKENS)
        return max(a, b) + self.spare

    @property
    def longest_steps(self) -> int:
        """Of a request of A: its answer after the prompts of all seats, beside a token of each other seat in a step."""
        return self.longest + -(-self.seats * self.prompt // (self.budget - self.seats + 1))

    def engine(self) -> Engine:
        engine = make_engine(
            needs={"A": self.a_pages, "B": self.b_pages},
            pages=self.pages,
            page_tokens=PAGE_TOKENS,
            max_loras=1,
            max_num_seqs=self.seats,
            max_num_batched_tokens=self.budget,
            max_model_len=256,
            patience_steps=self.patience,
            quick=True,
        )
        engine.ahead = self.ahead
        return engine

    def wait(self) -> tuple[int, Engine, Client]:
        """Steps planned from B's arrival to its first token."""
        rng, engine, patient = random.Random(self.seed), self.engine(), None
        last = waited = 0
        comes_at = rng.randint(1, 3 * self.longest)
        while patient is None or patient.began_at_step is None:
            while sum(key[0] == STREAM for key in engine.live) < self.depth:
                last += 1
                length = self.longest if self.equal else rng.randint(1, self.longest)
                engine.submit((STREAM, last), [last % 90] * self.prompt, length, "A", tenant=7)
            if engine.steps == comes_at:
                patient = engine.submit(
                    (PATIENT, 1), [1] * self.b_prompt, B_ANSWER, "B", tenant=7 if self.same_tenant else 0
                )
            plan = engine.step()
            if plan is not None and patient is not None:
                waited += 1
            if waited > self.bound:
                break
        assert patient is not None
        return waited, engine, patient

    @property
    def bound(self) -> int:
        return 2 * self.longest_steps + -(-self.b_prompt // self.budget) + 1


streams = st.builds(
    Stream,
    seed=st.integers(0, 2**32),
    seats=st.integers(1, 8),
    budget=st.sampled_from((12, 16, 64)),
    a_pages=st.integers(1, 10),
    b_pages=st.integers(1, 10),
    spare=st.one_of(st.integers(0, 3), st.integers(0, 60)),
    prompt=st.integers(1, 24),
    longest=st.integers(1, 60),
    equal=st.booleans(),
    b_prompt=st.integers(1, 24),
    depth=st.integers(1, 24),
    same_tenant=st.booleans(),
    patience=st.sampled_from((5, 32, 10_000)),
    ahead=st.booleans(),
)
TIGHT = Stream(
    seed=1,
    seats=4,
    budget=16,
    a_pages=6,
    b_pages=5,
    spare=5,
    prompt=4,
    longest=20,
    equal=True,
    b_prompt=4,
    depth=6,
    same_tenant=True,
    patience=10_000,
    ahead=False,
)
"""Two of A's requests run side by side, one has to be preempted, and three wait that came before B."""


@settings(max_examples=EXAMPLES, deadline=None)
@given(streams)
@example(TIGHT)
def test_a_stream_lets_another_adapter_start_within_two_of_its_longest(stream: Stream) -> None:
    waited, engine, patient = stream.wait()
    assert waited <= stream.bound
    engine.run_until_idle()
    assert all(client.text == client.expected for client in engine.clients.values())
    assert patient.finished is not None
