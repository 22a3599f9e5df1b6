"""The GPU that a bench runs on, by name; benches that need one end in a line where there is none."""

from __future__ import annotations

import argparse
import re

import torch

GOALS_FOR = "h200"
"""Goals were set, and vLLM measured, on this GPU."""


def require_gpu(bench: str) -> None:
    """End the process with one line where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"python -m bench {bench} needs an NVIDIA GPU: torch {torch.__version__} sees none here")


def has_goals(gpu: str) -> bool:
    """Whether goals and vLLM's figures are for a GPU of this name."""
    return GOALS_FOR in device_label(gpu).split("-")


def device_label(gpu: str) -> str:
    """A GPU's name as result files have it: ``h200`` of ``NVIDIA H200``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """``--record`` and ``--device-name``; the latter is None where the GPU's own name is wanted."""
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    parser.add_argument("--device-name", help="names the result file; default: the GPU's, as in h200")
