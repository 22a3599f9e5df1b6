"""The systems that benches compare with: transformers + PEFT itself, and what vLLM is asked for."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

pytest.importorskip("peft")
pytest.importorskip("triton")

from bench import gpu_peers
from bench.gpu_base import Base
from bench.gpu_cases import Bench, Case, Ceilings, peer_results
from bench.gpu_peers import Peft, Vllm
from bench.gpu_random import ALL7, LLAMA3_8B, AdapterKind
from bench.results import Result
from bench.throughput import REQUESTS
from stencilpress.engine.image import adapter_digest
from stencilpress.engine.loader import Loader
from stencilpress.engine.messages import Sampling
from stencilpress.engine.plan import Chunk, Draw, Segment, StepPlan
from stencilpress.engine.spec import ModelSpec, load_spec
from tests.unit.tiny_models import VOCAB, Engine, load_engine, placed_adapters, save_model

TINY = replace(
    LLAMA3_8B, vocab_size=256, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position=512,
)  # fmt: skip
KINDS = [AdapterKind("a", 8), AdapterKind("b", 16, ALL7)]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peers, "DEVICE", "cpu")


@pytest.mark.filterwarnings("ignore")  # transformers and PEFT warn of each other's deprecations
@pytest.mark.parametrize("shape", ["random", "folder"])
def test_peft_serves_the_base_and_a_mixed_batch_and_gives_its_memory_back(tmp_path: Path, shape: str) -> None:
    base = Base("tiny", TINY)
    if shape == "folder":
        save_model(tmp_path / "model", "qwen3")
        base = Base("tiny", load_spec(tmp_path / "model"), tmp_path / "model")
    for kinds in ([], KINDS):
        digests = [kind.digest for kind in kinds] or ["", ""]
        with Peft.serving(base, kinds, 2) as peer:
            assert peer.elapsed_s([[1, 2, 3], [4, 5, 6]], digests, 4) > 0
        assert not hasattr(peer, "_model")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama-tied-llama3-rope", "qwen3"])
def test_peft_draws_the_engines_tokens_for_the_same_adapters(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixed batch with a row of the base alone. The engine takes the folders that the bench wrote for the peer."""
    save_model(tmp_path / "model", family)
    base = Base("tiny", load_spec(tmp_path / "model"), tmp_path / "model")
    kept = _keep_adapters(monkeypatch, tmp_path / "adapters")
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(9)] for _ in range(5)]
    kinds = [*KINDS, AdapterKind("c", 5)]
    asked = [kinds[i].digest if i is not None else "" for i in (1, 0, None, 2, 1)]
    with Peft.serving(base, kinds, len(prompts)) as peer:
        answers = _generated(peer)
        peer.elapsed_s(prompts, asked, 12)

    engine = load_engine(tmp_path / "model", pages=200)
    free = list(range(200))
    loader = placed_adapters(engine, tmp_path / "adapters", list(kept.values()), free)
    adapters = [kept[digest] if digest else None for digest in asked]
    wanted = _greedy(engine, loader, adapters, prompts, 12, free)
    alone = _greedy(engine, loader, [None] * len(prompts), prompts, 12, free)
    loader.close()
    assert answers == [wanted]
    assert [w == b for w, b in zip(wanted, alone, strict=True)] == [digest == "" for digest in asked]


def _keep_adapters(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, str]:
    """Copies of the adapters that the bench writes from now on, made large enough to tell in so small a model; the
    engine's digests by the bench's."""
    kept: dict[str, str] = {}
    write = gpu_peers.write_adapter
    folder.mkdir()

    def write_and_keep(spec: ModelSpec, kind: AdapterKind, path: Path) -> Path:
        torch.manual_seed(len(kept))
        write(spec, kind, path)
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = {name: 6 * tensor for name, tensor in load_file(path / "adapter_model.safetensors").items()}
        save_file(tensors, path / "adapter_model.safetensors")
        kept[kind.digest] = adapter_digest(spec, config, tensors)
        shutil.copytree(path, folder / kept[kind.digest])
        return path

    monkeypatch.setattr(gpu_peers, "write_adapter", write_and_keep)
    return kept


def _generated(peer: Peft) -> list[list[list[int]]]:
    """What the peer's model will have drawn, a list for each call."""
    answers: list[list[list[int]]] = []
    generate = peer._model.generate

    def and_keep(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        out: torch.Tensor = generate(input_ids=input_ids, **options)
        answers.append(out[:, input_ids.shape[1] :].tolist())
        return out

    peer._model.generate = and_keep
    return answers


def _greedy(
    engine: Engine, loader: Loader, adapters: list[str | None], prompts: list[list[int]], count: int, free: list[int]
) -> list[list[int]]:
    """So many tokens of each request, all requests in one step each time."""
    runner, texts = engine.runner(loader.adapter), [list(prompt) for prompt in prompts]
    pages = [tuple(free.pop() for _ in range(engine.memory.geometry.pages_for_tokens(40))) for _ in texts]
    for step in range(count):
        segments = []
        for i, (adapter, text) in enumerate(zip(adapters, texts, strict=True)):
            start = len(text) - 1 if step else 0
            draw = Draw(Sampling(temperature=0.0), text, len(prompts[i]), step)
            segments.append(Segment(adapter, (Chunk((0, i), i, start, tuple(text[start:]), pages[i], draw),)))
        for drawn in runner.run(StepPlan(step + 1, tuple(segments))):
            texts[drawn.key[1]].append(drawn.token)
    return [text[len(prompts[0]) :] for text in texts]


@dataclass
class _Vllm:
    """What the module ``vllm`` was asked for."""

    options: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    alive: int = 0


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Vllm]:
    seen = _Vllm()

    class LLM:
        def __init__(self, **options: Any) -> None:
            seen.options.append(options)
            seen.alive += 1
            assert seen.alive == 1, "two engines do not fit one GPU"
            assert (Path(options["model"]) / "config.json").exists()

        def __del__(self) -> None:
            seen.alive -= 1

        def generate(self, prompts: list[Any], parameters: Any, lora_request: Any, use_tqdm: bool) -> list[Any]:
            assert not use_tqdm
            for lora in lora_request or ():
                assert (Path(lora.path) / "adapter_model.safetensors").exists()
            seen.asked.append((prompts, parameters, lora_request))
            ids = [0] * parameters.max_tokens
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for _ in prompts]

    def request(name: str, number: int, path: str) -> Any:
        assert number > 0, "0 is the base's"
        return SimpleNamespace(name=name, number=number, path=path)

    modules = {"vllm": ModuleType("vllm"), "vllm.lora": ModuleType("lora"), "vllm.lora.request": ModuleType("request")}
    vars(modules["vllm"]).update(LLM=LLM, SamplingParams=SimpleNamespace)
    vars(modules["vllm.lora.request"])["LoRARequest"] = request
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gpu_peers, "version", lambda name: f"of {name}")
    yield seen
    assert seen.alive == 0


def test_vllm_is_started_anew_for_each_case_with_that_cases_adapters(vllm: _Vllm) -> None:
    bench = Bench("throughput", Base("llama3-8b", TINY), Ceilings(1.0, 1.0), 1, "NVIDIA H200", "none")
    cases = [Case("base", 4, 0), Case("mix", REQUESTS, 3, (8, 32)), Case("all7", REQUESTS, 2, masks=ALL7)]

    def measured(bench: Bench, peer: Any, case: Case) -> Result:
        digests = case.digests() if case.adapters else [""] * REQUESTS
        peer.elapsed_s([[1, 2]] * REQUESTS, digests, 3)
        return SimpleNamespace(case=case.name)  # type: ignore[return-value]

    assert [one.case for one in peer_results(Vllm, bench, cases, measured)] == ["base", "mix", "all7"]
    with pytest.raises(KeyError, match="no such"), Vllm.serving(bench.base, cases[1].kinds(), 1) as peer:
        peer.elapsed_s([[1]], ["no such"], 1)
    base, mix, all7, _ = vllm.options
    assert "enable_lora" not in base
    assert (mix["max_loras"], mix["max_cpu_loras"], mix["max_lora_rank"]) == (3, 3, 32)
    assert mix["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert len(all7["lora_target_modules"]) == 7
    assert vllm.asked[0][2] is None
    assert len({lora.number for lora in vllm.asked[1][2]}) == 3
    assert vllm.asked[1][1].ignore_eos
