"""Greedy tokens of the running server's engine against what transformers + PEFT answered when it was recorded.

A part of the prompts, in the time a test may take; ``make parity`` computes the reference live and takes all.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.parity import digests
from bench.server import Server
from tests.demo_base import NAME as BASE
from tests.parity.engine_answers import differences, engine_answers
from tests.parity.record import BASE as NO_ADAPTER
from tests.parity.record import MAX_NEW_TOKENS, REFERENCE_PATH, Greedy, prompt_token_ids, prompts

pytestmark = pytest.mark.timeout(300)

PROMPTS = 4


async def test_mixed_batches_answer_as_transformers_and_peft_do(server: Server, demo_data: Path) -> None:
    recorded = json.loads(REFERENCE_PATH.read_text(encoding="utf-8"))["answers"]
    expected = {name: [Greedy(**answer) for answer in answers[:PROMPTS]] for name, answers in recorded.items()}
    enrolled = digests(demo_data)
    wanted = {name: "" if name == NO_ADAPTER else enrolled[name] for name in expected}
    inputs = prompt_token_ids(demo_data / "v1" / "models" / BASE, prompts()[:PROMPTS])
    got = await engine_answers(demo_data / "v1" / "run" / "engine.sock", wanted, inputs, MAX_NEW_TOKENS)
    assert [str(d) for d in differences(expected, got) if not d.is_tie] == []
