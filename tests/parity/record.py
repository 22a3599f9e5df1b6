"""What the base and each shipped adapter answer greedily under transformers + PEFT: the reference of `make parity`.

    python -m tests.parity.record --model DIR

Every (adapter, prompt) pair runs alone, in float32, so that no batching, padding or neighbour can move a logit. Beside
each token stands the gap between the two best logits: where an engine with another order of summation picks another
token, the gap says whether that was a tie or a mistake.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
ADAPTERS_DIR = HERE.parents[1] / "examples" / "adapters"
PROMPTS_PATH = HERE / "prompts.json"
REFERENCE_PATH = HERE / "reference.json"
BASE = "base"
"""The name under which the answers without an adapter stand."""
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Greedy:
    """One greedy continuation, up to and including the end-of-sequence token if it was reached.

    `gaps[i]` is the best logit minus the second best at the position that produced `token_ids[i]`.
    """

    token_ids: list[int]
    gaps: list[float]


def shipped_adapters() -> dict[str, Path]:
    """The example adapters by name."""
    return {path.parent.name: path.parent for path in sorted(ADAPTERS_DIR.glob("*/adapter_config.json"))}


def prompts() -> list[str]:
    """The committed user messages."""
    loaded: list[str] = json.loads(PROMPTS_PATH.read_text(encoding="utf-8"))
    return loaded


def prompt_token_ids(model_dir: Path, texts: Sequence[str]) -> list[list[int]]:
    """Each text as the only user message of a chat, rendered with the model's template and tokenised."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def reference(
    model_dir: Path, adapters: Mapping[str, Path], texts: Sequence[str], max_new_tokens: int
) -> dict[str, list[Greedy]]:
    """Greedy answers to `texts` of the base (under `BASE`) and of each adapter, in the order of `texts`."""
    inputs = prompt_token_ids(model_dir, texts)
    folders: dict[str, Path | None] = {BASE: None, **adapters}
    answers = {}
    for name, folder in folders.items():
        model = _load(model_dir, folder)
        answers[name] = [_greedy(model, token_ids, max_new_tokens) for token_ids in inputs]
    return answers


def _load(model_dir: Path, adapter: Path | None) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()


def _greedy(model: Any, token_ids: Sequence[int], max_new_tokens: int) -> Greedy:
    input_ids = torch.tensor([token_ids])
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best_two = [step_logits[0].topk(2).values for step_logits in output.logits]
    gaps = [round(float(best - second), 4) for best, second in best_two]
    return Greedy(output.sequences[0, len(token_ids) :].tolist(), gaps)


def record(model_dir: Path) -> dict[str, Any]:
    """The content of ``reference.json``: the answers and all that they depend on."""
    adapters = shipped_adapters()
    answers = reference(model_dir, adapters, prompts(), MAX_NEW_TOKENS)
    return {
        "dtype": "float32",
        "max_new_tokens": MAX_NEW_TOKENS,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
        "base_sha256": sha256(model_dir / "model.safetensors"),
        "adapters_sha256": {name: sha256(path / "adapter_model.safetensors") for name, path in adapters.items()},
        "prompts_sha256": sha256(PROMPTS_PATH),
        "answers": {name: [asdict(greedy) for greedy in rows] for name, rows in answers.items()},
    }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the converted demo base")
    content = record(parser.parse_args().model)
    REFERENCE_PATH.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
