"""What a step and the queue may hold: the numbers that policy derives from the settings and the model."""

from __future__ import annotations

from dataclasses import dataclass

from stencilpress.engine.settings import EngineSettings, SettingsError
from stencilpress.engine.spec import ModelSpec, PageGeometry

PATIENCE_STEPS = 256
"""Steps for which newer requests may pass one that lacks a slot or room for its adapter."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler needs to know. EOS is not among it: the gateway puts it into a request's stop ids."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_waiting: int
    max_model_len: int
    page_tokens: int
    vocab_size: int
    patience_steps: int = PATIENCE_STEPS

    @property
    def seats(self) -> int:
        """Requests that run at once; each may need one token of every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def pages_for(self, tokens: int) -> int:
        """KV pages of so many tokens."""
        return -(-tokens // self.page_tokens)


def derive_limits(settings: EngineSettings, spec: ModelSpec, geometry: PageGeometry) -> Limits:
    """The context is the model's own unless ``max_model_len`` asks for less.

    Raises :class:`SettingsError` where that leaves no room for a prompt and an answer.
    """
    if settings.max_model_len == 1:
        raise SettingsError("STENCILPRESS_MAX_MODEL_LEN is 1: a prompt and its answer are two tokens at least")
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_loras=settings.max_loras,
        max_waiting=settings.max_waiting,
        max_model_len=min(settings.max_model_len or spec.max_position, spec.max_position),
        page_tokens=geometry.page_tokens,
        vocab_size=spec.vocab_size,
    )
