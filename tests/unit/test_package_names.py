"""Boundaries that only a fresh interpreter shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_and_peft_work_beside_the_kernels_folder() -> None:
    """transformers probes for a distribution of that name; ours must look absent to it, also from the root."""
    code = """
import sys; sys.path.insert(0, ".")
import kernels, stencilpress.kernels
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
from peft import LoraConfig, get_peft_model
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
assert hasattr(model, "peft_config")
print(is_kernels_available())
"""
    assert _run(code) == "False"


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("stencilpress.gateway.__main__", ("torch", "triton", "cupy")),
        ("stencilpress.gateway.intake_worker", ("torch", "aiohttp", "sqlalchemy")),
        ("stencilpress.cli", ("torch", "aiohttp", "sqlalchemy", "transformers")),
        ("stencilpress.engine.worker", ("aiohttp", "sqlalchemy", "tokenizers", "jinja2")),
        ("stencilpress.engine.scheduler", ("torch", "aiohttp", "sqlalchemy")),
    ],
)
def test_importing_one_side_never_loads_the_other(module: str, never: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {never!r} if name in sys.modules])"
    assert _run(code) == "[]"
