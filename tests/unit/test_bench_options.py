"""GPU benches before they measure: what ends in a line, and where goals and vLLM's figures belong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench import churn, churn_room, gateway, kernels, latency, start, throughput
from bench.__main__ import BENCHES
from bench.__main__ import main as run_bench
from bench.gpu_base import Base, chosen_base
from bench.gpu_cases import Bench, Ceilings, gpu_parser
from bench.gpu_device import device_label
from bench.gpu_engine import Run
from bench.gpu_random import LLAMA3_8B
from bench.gpu_timing import Ceilings as KernelCeilings
from bench.gpu_timing import Timing
from bench.results import Result
from stencilpress.engine.spec import load_spec

ON_GPU = ("churn", "kernels", "latency", "memory", "punica", "serve", "slora", "start", "throughput")
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
SHAPE = Base("llama3-8b", LLAMA3_8B)
FOLDER = Base("llama3-8b", replace(LLAMA3_8B, num_layers=4), Path("/models/llama3-8b"))
"""A folder may have the shape's name, and is another model nevertheless."""
ELSEWHERE = [(FOLDER, H200), (Base("tiny", LLAMA3_8B), H200), (SHAPE, A100)]


@pytest.mark.parametrize("name", ON_GPU)
def test_without_a_gpu_a_bench_ends_in_a_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        run_bench([name])
    assert str(ended.value).startswith(f"python -m bench {name} needs an NVIDIA GPU")
    assert "\n" not in str(ended.value)


def test_help_names_every_bench_and_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(BENCHES)
    assert run_bench([]) == run_bench(["no-such"]) == 2


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    module = importlib.import_module(f"bench.{name}")
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    usage, about, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: python -m bench {name} ")
    assert " ".join(about.split()).startswith(" ".join(str(module.__doc__).split())[:60])


def test_a_package_that_is_missing_is_named() -> None:
    hide = "import sys; sys.modules['triton'] = None; from bench.__main__ import main; sys.exit(main(['throughput']))"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 1
    assert done.stderr == "python -m bench throughput needs triton, which `pip install -e '.[test]'` brings\n"


@pytest.mark.parametrize("module", [throughput, latency, churn])
def test_unknown_cases_are_refused_with_those_there_are(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        module.main(["--cases", "no-such"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no case no-such; there are " in last
    assert all((case if isinstance(case, str) else case.name) in last for case in module.CASES)


def test_the_gateways_bench_refuses_unknown_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gateway.main(["--cases", "plain,no-such"])
    assert capsys.readouterr().err.endswith("error: no case no-such\n")


def test_a_model_folder_that_is_none_or_not_supported_is_told_in_a_line(tmp_path: Path) -> None:
    def ends(folder: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            chosen_base(gpu_parser("latency").parse_args(["--model", str(folder)]))
        return str(ended.value)

    nowhere = tmp_path / "nowhere"
    assert ends(nowhere) == f"--model {nowhere}: not a model folder, there is no config.json in it"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    told = ends(tmp_path)
    assert told.startswith(f"--model {tmp_path}: ")
    assert "mamba" in told
    assert "\n" not in told


def test_a_model_folder_without_its_weights_is_told_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.unit.tiny_models import CPU, save_model

    save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as ended:
        Base("tiny", load_spec(tmp_path), tmp_path).weights(CPU)
    assert str(ended.value).startswith("--model tiny: ")
    assert "\n" not in str(ended.value)


def _bench(base: Base, gpu: str) -> Bench:
    return Bench("throughput", base, Ceilings(4000.0, 700.0), 1, gpu, "none")


def _engine() -> Any:
    """Serves at once."""

    def serve(prompts: list[list[int]], *_: Any, **__: Any) -> Run:
        return Run(total_s=1.0, steps=1, times_s={i: [0.0, 1.0] for i in range(len(prompts))})

    return SimpleNamespace(
        spec=LLAMA3_8B, serve=serve, residency=SimpleNamespace(loads=0), serving=SimpleNamespace(max_loras=1)
    )


def _all_figures(base: Base, gpu: str) -> list[Result]:
    bench = _bench(base, gpu)
    return [
        throughput.measure(bench, _engine(), throughput.CASES[1]),
        latency.measure(bench, _engine(), latency.CASES[4]),
        churn.churn(bench, _engine(), "warm", lambda: None),
        churn._first_use(bench, "first-use", [1.0], 0.5),
    ]


def test_goals_and_vllm_stand_beside_the_shape_that_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    for figure in _all_figures(SHAPE, H200):
        assert {"goal", "vllm-0.26.0"} <= figure.settings.keys()
    assert capsys.readouterr().out.count("vllm-0.26.0") == 4


@pytest.mark.parametrize(("base", "gpu"), ELSEWHERE)
def test_another_model_or_gpu_has_neither_goals_nor_vllm(
    base: Base, gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = _all_figures(base, gpu)
    printed = capsys.readouterr().out
    assert "limit" in printed
    assert not any(word in printed for word in ("goal", "vllm", "None"))
    for figure in figures:
        assert not {"goal", "vllm-0.26.0"} & figure.settings.keys()
        assert figure.settings["gpu"] == gpu
        assert (" llama3-8b" in figure.case) is (base is FOLDER)


@pytest.mark.parametrize("base", [SHAPE, FOLDER])
def test_cases_of_little_room_are_named_once_for_their_base(base: Base) -> None:
    engine = _engine()
    engine.use = engine.host = lambda *_: None
    engine.residency.pages = lambda _: 2
    engine.memory = SimpleNamespace(geometry=SimpleNamespace(page_bytes=1))
    images: Any = SimpleNamespace(kinds=dict.fromkeys(map(str, range(20))))
    figures = churn_room.first_tokens(_bench(base, H200), engine, images)
    assert [figure.case for figure in figures] == [
        base.case(name) for rate in (8, 12) for name in (f"8-on-8-at-{rate}", *[f"16-on-8-at-{rate}"] * 2)
    ]


@pytest.mark.parametrize(("gpu", "label"), [(H200, "h200"), (A100, "a100-sxm4-80gb")])
def test_results_of_a_gpu_have_a_file_of_its_own_unless_named(
    gpu: str, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    assert device_label(gpu) == label
    timing = Timing("decode", [5.0], 1 << 20, 1e-3, goal_us=6.5)
    for named in (None, "mine"):
        ready = start._result(SHAPE, [16.0], named)
        (kernel,) = kernels.results([timing], "kernels", KernelCeilings(4000.0, 700.0), named)
        assert (ready.device, kernel.device) == (named or label, named or label)
        assert ("goal" in ready.settings, "goal" in kernel.settings) == (gpu == H200, gpu == H200)
    assert "goal" not in start._result(FOLDER, [16.0], None).settings
    assert ("6.5" in kernels.line(timing, KernelCeilings(4000.0, 700.0))) is (gpu == H200)


def test_serve_is_rehearsed_on_a_cpu_and_named_after_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from bench import serve

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = serve._options(["--small"])
    assert (options.device, serve._device_name(options)) == ("cpu", f"cpu{os.cpu_count()}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    assert serve._device_name(serve._options([])) == "h200"
    assert serve._device_name(serve._options(["--device-name", "mine"])) == "mine"
