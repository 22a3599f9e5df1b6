"""The systems that benches compare with: transformers + PEFT itself, and what vLLM is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("triton")

from bench import gpu_peers
from bench.gpu_base import Base
from bench.gpu_cases import Bench, Case, Ceilings, peer_results
from bench.gpu_peers import Peft, Vllm
from bench.gpu_random import ALL7, LLAMA3_8B, AdapterKind
from bench.results import Result
from bench.throughput import REQUESTS
from stencilpress.engine.spec import load_spec
from tests.unit.tiny_models import save_model

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
    bench = Bench("throughput", Base("llama3-8b", TINY), Ceilings(1.0, 1.0), 1, "none")
    cases = [Case("base", 4, 0), Case("mix", REQUESTS, 3, (8, 32)), Case("all7", REQUESTS, 2, masks=ALL7)]

    def measured(bench: Bench, peer: Any, case: Case) -> Result:
        digests = case.digests() if case.adapters else [""] * REQUESTS
        peer.elapsed_s([[1, 2]] * REQUESTS, digests, 3)
        return SimpleNamespace(case=case.name)  # type: ignore[return-value]

    assert [one.case for one in peer_results(Vllm, bench, cases, measured)] == ["base", "mix", "all7"]
    base, mix, all7 = vllm.options
    assert "enable_lora" not in base
    assert (mix["max_loras"], mix["max_cpu_loras"], mix["max_lora_rank"]) == (3, 3, 32)
    assert mix["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert len(all7["lora_target_modules"]) == 7
    assert vllm.asked[0][2] is None
    assert len({lora.number for lora in vllm.asked[1][2]}) == 3
    assert vllm.asked[1][1].ignore_eos
