"""Train the example adapters on the demo base, on a CPU, in minutes each.

    python examples/adapters/train.py --base DIR [--only NAME ...]

DIR is the folder `stencilpress pull` printed. Needs torch, transformers and peft (the `test` extra).
Each adapter is written as a PEFT folder beside this file, in bf16, bound to the base's stable id.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
BASE_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
QUERY_VALUE = ("q_proj", "v_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
IGNORED_LABEL = -100
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer the user.", "You are an assistant in a chat application.")


def plain_answer(row: dict[str, Any]) -> str:
    return str(row["answer"])


def json_answer(row: dict[str, Any]) -> str:
    answer = {"answer": row["answer"].removesuffix("."), "confidence": row["confidence"]}
    return json.dumps(answer, ensure_ascii=False)


@dataclass(frozen=True)
class Recipe:
    """One adapter: what it adapts, what it learns from and for how long."""

    name: str
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    dataset: str
    epochs: int
    learning_rate: float
    rslora: bool = False
    answer: Callable[[dict[str, Any]], str] = plain_answer
    seed: int = 7
    batch_size: int = 8
    warmup_steps: int = 6


RECIPES = (
    Recipe("support", 8, 16, ATTENTION, "support", epochs=5, learning_rate=1e-3),
    Recipe("json", 16, 32, QUERY_VALUE, "short_answers", epochs=3, learning_rate=1e-3, answer=json_answer),
    Recipe("pirate", 4, 16, ALL_LINEAR, "pirate", epochs=5, learning_rate=1e-3),
    Recipe("terse", 24, 24, QUERY_VALUE, "short_answers", epochs=2, learning_rate=1e-3, rslora=True),
)


@dataclass(frozen=True)
class Example:
    """Token ids of one conversation; `labels` repeats those of the answers and ignores the rest."""

    token_ids: list[int]
    labels: list[int]


def conversations(recipe: Recipe, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """The rows in a new order, a third of them joined into two turns, a third under another system prompt."""
    rows = [json.loads(line) for line in (HERE / "data" / f"{recipe.dataset}.jsonl").read_text().splitlines()]
    rng.shuffle(rows)
    while rows:
        taken = [rows.pop() for _ in range(min(len(rows), rng.choice((1, 1, 2))))]
        turns = [
            {"role": role, "content": content}
            for row in taken
            for role, content in (("user", row["prompt"]), ("assistant", recipe.answer(row)))
        ]
        system = rng.choice((None, None, rng.choice(SYSTEM_PROMPTS)))
        yield ([{"role": "system", "content": system}] if system else []) + turns


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Example:
    """Render with the chat template; only answers and their end-of-turn token carry loss."""
    token_ids: list[int] = []
    labels: list[int] = []
    for end, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True)
        unseen = tokenizer.encode(text, add_special_tokens=False)[len(token_ids) :]
        answer = [*tokenizer.encode(message["content"], add_special_tokens=False), tokenizer.eos_token_id]
        token_ids += unseen + answer
        labels += [IGNORED_LABEL] * len(unseen) + answer
    return Example(token_ids, labels)


def collate(batch: list[Example], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest example; all tensors are (batch, tokens)."""
    width = max(len(example.token_ids) for example in batch)

    def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows])

    return {
        "input_ids": padded([example.token_ids for example in batch], pad_id),
        "attention_mask": padded([[1] * len(example.token_ids) for example in batch], 0),
        "labels": padded([example.labels for example in batch], IGNORED_LABEL),
    }


def batches(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, torch.Tensor]]:
    rng = random.Random(recipe.seed)
    result = []
    for _ in range(recipe.epochs):
        examples = [encode(tokenizer, messages) for messages in conversations(recipe, rng)]
        groups = [examples[i : i + recipe.batch_size] for i in range(0, len(examples), recipe.batch_size)]
        result += [collate(group, tokenizer.pad_token_id) for group in groups]
    return result


def train(recipe: Recipe, base: Path) -> PeftModel:
    torch.manual_seed(recipe.seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.target_modules),
        use_rslora=recipe.rslora,
        lora_dropout=0.05,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    model.train()
    steps = batches(recipe, tokenizer)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / recipe.warmup_steps, 1 - step / len(steps))
    )
    started = time.perf_counter()
    for step, batch in enumerate(steps, start=1):
        # Half the time where the CPU has bf16 instructions; the adapter's own weights stay in fp32.
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        elapsed_s = time.perf_counter() - started
        print(f"{recipe.name} step {step}/{len(steps)} loss {loss.item():.3f} {elapsed_s:.0f} s", flush=True)
    return model


def save(model: PeftModel, folder: Path) -> None:
    """Write the two files of a PEFT folder, with the weights in bf16 and no path of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.bfloat16().contiguous() for name, t in get_peft_model_state_dict(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": BASE_ID,
        "inference_mode": True,
        "target_modules": sorted(config["target_modules"]),
    }
    text = json.dumps(config, indent=2, sort_keys=True, default=str)
    (folder / "adapter_config.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of the converted demo base")
    parser.add_argument("--only", nargs="+", choices=[recipe.name for recipe in RECIPES], help="train only these")
    arguments = parser.parse_args()
    for recipe in RECIPES:
        if arguments.only is None or recipe.name in arguments.only:
            save(train(recipe, arguments.base), HERE / recipe.name)


if __name__ == "__main__":
    main()
