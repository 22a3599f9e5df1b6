"""Answers that visitors share."""

from __future__ import annotations

import asyncio

import pytest

from stencilpress.web.answers import SharedAnswers


async def test_all_who_come_while_it_is_fresh_get_one_answer() -> None:
    now, asked = [0.0], []
    answers = SharedAnswers(lambda: now[0])

    async def ask() -> int:
        asked.append(now[0])
        await asyncio.sleep(0)
        return len(asked)

    assert await asyncio.gather(*(answers.get("a", 5, ask) for _ in range(3))) == [1, 1, 1]
    assert await answers.get("b", 5, ask) == 2
    now[0] = 5.0
    assert await answers.get("a", 5, ask) == 3


async def test_a_failure_is_not_kept_and_one_who_leaves_takes_it_from_nobody() -> None:
    answers, go = SharedAnswers(lambda: 0.0), asyncio.Event()

    async def fail() -> int:
        raise ValueError("no")

    async def slow() -> int:
        await go.wait()
        return 7

    with pytest.raises(ValueError, match="no"):
        await answers.get("a", 5, fail)
    first, second = (asyncio.create_task(answers.get("a", 5, slow)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    go.set()
    assert await second == 7
