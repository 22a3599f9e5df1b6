"""The same prompts through a running engine, all in flight at once, and where its tokens leave the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stencilpress.engine.client import EngineClient
from stencilpress.engine.messages import Sampling, Submit, pack_tokens
from tests.parity.record import Greedy

TIE = 1e-3
"""Two best logits this close are a tie: which of them wins depends on the order of summation."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not the reference's, and how close the reference's two best were."""

    adapter: str
    prompt: int
    position: int
    expected: int
    got: int
    gap: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= TIE

    def __str__(self) -> str:
        kind = "tie" if self.is_tie else "MISMATCH"
        return (
            f"{kind}: {self.adapter}, prompt {self.prompt}, token {self.position}: "
            f"{self.got} for {self.expected}, the two best logits {self.gap:.4f} apart"
        )


async def engine_answers(
    socket_path: Path, digests: Mapping[str, str], prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> dict[str, list[list[int]]]:
    """Greedy token ids of each adapter ("" as digest: the base) on each prompt, submitted as one mixed crowd."""
    async with EngineClient(socket_path) as engine:
        welcome = await engine.wait_ready()

        async def one(digest: str, prompt: Sequence[int]) -> list[int]:
            request = Submit(
                0, pack_tokens(list(prompt)), digest, max_new_tokens, Sampling(temperature=0.0), welcome.eos_ids
            )
            tokens: list[int] = []
            async for batch, finished in await engine.submit(request):
                tokens += [token.token for token in batch]
                if finished is not None and finished.reason not in ("stop", "length"):
                    raise RuntimeError(f"{finished.reason}: {finished.code} {finished.message}")
            return tokens

        pairs = [(name, prompt) for prompt in prompts for name in digests]
        answers = await asyncio.gather(*(one(digests[name], prompt) for name, prompt in pairs))
    by_name: dict[str, list[list[int]]] = {name: [] for name in digests}
    for (name, _), answer in zip(pairs, answers, strict=True):
        by_name[name].append(answer)
    return by_name


def differences(
    expected: Mapping[str, Sequence[Greedy]], got: Mapping[str, Sequence[Sequence[int]]]
) -> list[Difference]:
    """The first differing token of each answer; after it the two texts go separate ways."""
    found = []
    for name, rows in expected.items():
        for number, (row, answer) in enumerate(zip(rows, got[name], strict=True)):
            for position, token in enumerate(row.token_ids):
                if position >= len(answer) or answer[position] != token:
                    mine = answer[position] if position < len(answer) else -1
                    found.append(Difference(name, number, position, token, mine, row.gaps[position]))
                    break
    return found
