"""The common library route on the same machine: transformers' ``generate`` and PEFT's mixed batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Peer:
    """One base model with all adapters loaded. ``generate`` takes prompts of token ids and adapter names."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path], dtype: torch.dtype) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self.base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        names = list(adapters)
        self.adapted: Any = None
        self._pad = self.base.config.pad_token_id or 0
        if names:
            # PEFT wraps the base in place, so the plain base is a second copy. It widens adapters to float32: on
            # a CPU it is faster with them (74 tokens a second and 64).
            wrapped = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
            self.adapted = PeftModel.from_pretrained(wrapped, adapters[names[0]], adapter_name=names[0])
            for name in names[1:]:
                self.adapted.load_adapter(adapters[name], adapter_name=name)
            self.adapted.eval()

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], adapters: list[str] | None, new_tokens: int) -> list[list[int]]:
        """Greedy, exactly ``new_tokens`` each; left-padded as transformers wants it."""
        longest = max(map(len, prompts))
        padding = [[self._pad] * (longest - len(prompt)) for prompt in prompts]
        ids = torch.tensor([pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * len(pad) + [1] * len(p) for pad, p in zip(padding, prompts, strict=True)])
        lengths = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
        if adapters is None:
            out = self.base.generate(input_ids=ids, attention_mask=mask, **lengths)
        else:
            out = self.adapted.generate(input_ids=ids, attention_mask=mask, adapter_names=adapters, **lengths)
        return [row[longest:] for row in out.tolist()]
