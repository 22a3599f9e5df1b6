"""Who may wait at all: what can never run is refused at once, and so is what a full queue has no fair place for."""

from __future__ import annotations

import math

from stencilpress.engine.accounts import Account
from stencilpress.engine.limits import Limits
from stencilpress.engine.messages import Submit, unpack_tokens
from stencilpress.engine.pool import Pool
from stencilpress.engine.request import Request
from stencilpress.engine.residency import Residency

Refusal = tuple[str, str]
"""A code of :class:`Finished` and the engine's reason, for the log."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e3
"""Between so far apart ones neither a counter nor a sum of weights loses what matters to rounding."""
PRIORITY_STEPS = 256
"""Of one tenant's requests one of the next higher priority goes before those that came up to so many steps earlier."""


def open_request(
    key: tuple[int, int], submit: Submit, account: Account, *, arrival: int, step: int, now_s: float
) -> Request:
    """A request in its first state. Its prompt is empty if it came garbled."""
    try:
        prompt = unpack_tokens(submit.prompt)
    except ValueError:
        prompt = []
    return Request(
        key=key,
        arrival=arrival,
        came_step=step,
        urgency=(step - submit.priority * PRIORITY_STEPS, arrival),
        priority=submit.priority,
        account=account,
        came_s=now_s,
        adapter=submit.adapter or None,
        history=prompt,
        prompt_len=len(prompt),
        max_tokens=submit.max_tokens,
        sampling=submit.sampling,
        stop_ids=frozenset(submit.stop_ids),
        salt=submit.salt,
    )


class Admission:
    """Refusals. All of them are pure: nothing is changed by asking."""

    def __init__(self, limits: Limits, pool: Pool, residency: Residency) -> None:
        self._limits = limits
        self._pool = pool
        self._residency = residency
        self.overloaded: Refusal = ("overloaded", f"{limits.max_waiting} requests are waiting")

    def malformed(self, request: Request) -> Refusal | None:
        """Why no engine with these limits could ever run it."""
        limits, prompt = self._limits, request.history
        if not prompt or request.max_tokens < 1 or min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            return "internal", "malformed request: no prompt, nothing to generate, or ids outside the vocabulary"
        if len(prompt) + request.max_tokens > limits.max_model_len:
            return "context_exceeded", f"prompt and answer exceed the context of {limits.max_model_len} tokens"
        return None

    def impossible(self, request: Request) -> Refusal | None:
        """Why it can never run, by what is known of its adapter now."""
        needs = self._limits.pages_for(request.prompt_len + request.max_tokens)
        if request.adapter is not None:
            failure = self._residency.failure(request.adapter)
            if failure:
                return "adapter_unavailable", failure
            misfit = self._residency.misfit(request.adapter)
            if misfit:
                return "adapter_unavailable", misfit
            needs += self._residency.pages(request.adapter)
        if needs > self._pool.total:
            return "capacity", f"it needs {needs} pages of a pool of {self._pool.total}"
        return None


def sound_weight(weight: float) -> float:
    """A weight that can be divided by, and added to others. The catalog allows nothing else; a gateway's fault must not
    stop the engine."""
    return min(max(weight, LEAST_WEIGHT), MOST_WEIGHT) if math.isfinite(weight) and weight > 0 else 1.0
