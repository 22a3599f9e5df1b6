"""Print what the base and each example adapter answer to prompts that no training set holds.

python examples/adapters/compare.py --base DIR [--only NAME ...] [--prompt TEXT ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).resolve().parent
UNSEEN_PROMPTS = (
    "What is the capital of Spain?",
    "My shoes arrived in the wrong colour.",
    "How do bees make honey?",
    "How do I make a good cup of coffee?",
    "Write a Python function that adds two numbers.",
    "Give me a tip for my first marathon.",
)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int) -> str:
    """The greedy answer to one user message."""
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of the converted demo base")
    parser.add_argument("--only", nargs="+", help="compare only these adapters")
    parser.add_argument("--prompt", nargs="+", default=UNSEEN_PROMPTS)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    arguments = parser.parse_args()
    names = arguments.only or sorted(path.parent.name for path in HERE.glob("*/adapter_config.json"))
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, HERE / names[0], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(HERE / name, adapter_name=name)
    for prompt in arguments.prompt:
        print(f"\n## {prompt}")
        with model.disable_adapter():
            print(f"base: {answer(model, tokenizer, prompt, arguments.max_new_tokens)}")
        for name in names:
            model.set_adapter(name)
            print(f"{name}: {answer(model, tokenizer, prompt, arguments.max_new_tokens)}")


if __name__ == "__main__":
    main()
