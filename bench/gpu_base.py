"""The base model of a GPU bench: a real shape with random weights, or any model folder."""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu_device import has_goals
from bench.gpu_random import SHAPES, random_weights
from stencilpress.engine.model.llama import Weights
from stencilpress.engine.model.weights import WeightsError, load_weights
from stencilpress.engine.spec import ModelSpec, SpecError, load_spec


@dataclass(frozen=True, slots=True)
class Base:
    """``folder`` is None where weights are random."""

    name: str
    spec: ModelSpec
    folder: Path | None = None

    def weights(self, device: torch.device) -> Weights:
        """On the device, in the spec's dtype. Ends the process with one line where the folder's do not fit."""
        if self.folder is None:
            return random_weights(self.spec, device)
        try:
            return load_weights(self.folder, self.spec, device)
        except WeightsError as error:
            raise SystemExit(f"--model {self.name}: {error}") from error

    @property
    def is_default(self) -> bool:
        """Whether this is the shape that goals and other systems' known figures are for."""
        return self.folder is None and self.name == DEFAULT_SHAPE

    def known(self, gpu: str, *, goal: float | None = None, vllm: float | None = None) -> dict[str, float]:
        """Settings of the goal and vLLM's figure: both are for the default shape on one kind of GPU, and left out
        elsewhere."""
        if not self.is_default or not has_goals(gpu):
            return {}
        return {name: v for name, v in (("goal", goal), ("vllm-0.26.0", vllm)) if v is not None}

    def case(self, name: str) -> str:
        """A case's name in result files."""
        return name if self.is_default else f"{name} {self.name}"


DEFAULT_SHAPE = next(iter(SHAPES))


def add_base_options(options: argparse.ArgumentParser) -> None:
    """``--shape`` and ``--model``."""
    options.add_argument("--shape", choices=SHAPES, default=DEFAULT_SHAPE, help="random weights, made on the device")
    options.add_argument("--model", type=Path, help="a model folder instead: config.json and safetensors")


def chosen_base(options: argparse.Namespace) -> Base:
    """What the options name. Ends the process with one line for a folder that cannot be served."""
    if options.model is None:
        return Base(options.shape, SHAPES[options.shape])
    if not (options.model / "config.json").is_file():
        raise SystemExit(f"--model {options.model}: not a model folder, there is no config.json in it")
    folder = options.model if (options.model / "base.json").exists() else _with_id(options.model)
    try:
        return Base(options.model.resolve().name, load_spec(folder), folder)
    except SpecError as error:
        raise SystemExit(f"--model {options.model}: {error}") from error


def _with_id(folder: Path) -> Path:
    """A folder of links to a model that was not pulled, with the id that it lacks."""
    linked = Path(tempfile.mkdtemp(prefix="bench-model-"))
    atexit.register(shutil.rmtree, linked)
    for file in folder.resolve().iterdir():
        (linked / file.name).symlink_to(file)
    (linked / "base.json").write_text(json.dumps({"id": folder.resolve().name}))
    return linked
