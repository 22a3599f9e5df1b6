"""What ``serve`` prepares, and the server as a whole on a tiny base."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stencilpress import demo
from stencilpress.bases import Base
from stencilpress.engine.image_format import image_name
from stencilpress.engine.spec import load_spec
from stencilpress.gateway.blobs import BlobStore
from stencilpress.gateway.catalog.adapters import get_adapter
from stencilpress.gateway.catalog.credentials import revoke_key
from stencilpress.gateway.catalog.schema import ensure_schema
from stencilpress.gateway.catalog.session import Database
from stencilpress.gateway.catalog.tenants import disable_tenant, get_tenant
from stencilpress.gateway.changes import Changes
from stencilpress.gateway.enrol import Enrolment
from stencilpress.gateway.intake_records import Dtype
from stencilpress.gateway.keys import KeyRing
from stencilpress.settings import DataFolder
from tests.integration.conftest import Cli
from tests.tiny import BASE_ID

ROOT = Path(__file__).parents[2]


class Press:
    """A data folder with the tiny base, and what ``serve`` makes of it before it starts anything."""

    def __init__(self, data: Path, base: Path) -> None:
        self.data = DataFolder(data)
        self.base = Base(base, (BASE_ID, "tiny"))
        self.db = Database(self.data.database_url)
        self.blobs = BlobStore(self.data.path)
        self.said: list[str] = []

    def enrolment(self, dtype: Dtype = "auto") -> Enrolment:
        return Enrolment(self.db, self.blobs, self.base.folder, self.base.names, dtype=dtype, max_rank=64)

    async def enrol(self) -> demo.Demo | None:
        await ensure_schema(self.db)
        key_file = self.data.demo_key
        return await demo.enrol_demo(self.db, self.blobs, self.enrolment(), self.base, key_file, self.said.append)


@pytest.fixture
def press(
    data: Path, base_folder: Path, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Press]:
    """``helper`` and ``poet`` are shipped; so is ``stranger``, which is for another base."""
    shelf = tmp_path / "shelf"
    for name in ("helper", "poet"):
        shutil.copytree(adapters / name, shelf / name)
    shutil.copytree(adapters / "orphan", shelf / "stranger")
    monkeypatch.setattr(demo, "shipped_adapters", lambda: tuple(sorted(shelf.iterdir())))
    folder = tmp_path / "served"
    shutil.copytree(base_folder, folder)
    (folder / "base.json").write_text(json.dumps({"id": BASE_ID, "aliases": ["tiny"]}))
    DataFolder(data).prepare()
    press = Press(data, folder)
    yield press
    asyncio.run(press.db.close())


def test_the_demo_is_enrolled_once(press: Press, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asyncio.run(press.enrol())
    assert first is not None
    assert first.adapters == ("helper", "poet")
    assert press.said == ["enrolling the demo adapter helper", "enrolling the demo adapter poet"]
    monkeypatch.setattr(Enrolment, "add_folder", None)  # a second start validates nothing again
    assert asyncio.run(press.enrol()) == first
    assert len(press.said) == 2


def test_the_demo_key_is_kept_for_us_alone(press: Press) -> None:
    first = asyncio.run(press.enrol())
    assert first is not None
    file = press.data.demo_key
    assert file.read_text() == first.key + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert asyncio.run(KeyRing(press.db, Changes(press.db)).authenticate(first.key)).tenant == "demo"
    asyncio.run(revoke_key(press.db, first.key.split("_")[1]))
    second = asyncio.run(press.enrol())
    assert second is not None
    assert second.key != first.key
    assert asyncio.run(KeyRing(press.db, Changes(press.db)).authenticate(second.key)).tenant == "demo"


def test_a_changed_demo_adapter_becomes_a_new_prod_version(press: Press, adapters: Path) -> None:
    asyncio.run(press.enrol())
    [shipped] = [folder for folder in demo.shipped_adapters() if folder.name == "helper"]
    shutil.copy(adapters / "orphan" / "adapter_model.safetensors", shipped)
    asyncio.run(press.enrol())
    tenant = asyncio.run(get_tenant(press.db, "demo"))
    helper = asyncio.run(get_adapter(press.db, tenant.id, "helper"))
    assert (len(helper.versions), helper.aliases) == (2, {"prod": 2})


def test_a_disabled_demo_tenant_stays_disabled(press: Press) -> None:
    asyncio.run(press.enrol())
    asyncio.run(disable_tenant(press.db, "demo"))
    assert asyncio.run(press.enrol()) is None


def test_a_demo_adapter_over_the_engines_rank_is_left_out(press: Press) -> None:
    asyncio.run(ensure_schema(press.db))
    enrolment = Enrolment(press.db, press.blobs, press.base.folder, press.base.names, dtype="auto", max_rank=4)
    key_file = press.data.demo_key
    enrolled = demo.enrol_demo(press.db, press.blobs, enrolment, press.base, key_file, press.said.append)
    visitor = asyncio.run(enrolled)
    assert visitor is not None
    assert visitor.adapters == ("helper",)
    assert re.search(r"left out: .*rank.* 4\b", press.said[-1])


def test_images_are_made_anew_for_another_dtype(press: Press) -> None:
    asyncio.run(press.enrol())

    async def rebuilt() -> list[str]:
        return [digest async for digest, error in press.enrolment("bfloat16").rebuild_images() if error is None]

    wanted = image_name(load_spec(press.base.folder, "bfloat16").fingerprint())
    made = asyncio.run(rebuilt())
    assert len(made) == 2
    assert all((press.blobs.folder(digest) / wanted).is_file() for digest in made)
    assert asyncio.run(rebuilt()) == []


def test_a_blob_in_the_cold_tier_alone_keeps_a_start_from_nothing_and_is_no_fault(press: Press) -> None:
    """Without such a tier it is one."""
    asyncio.run(press.enrol())
    away, here = sorted(folder.name for folder in press.blobs.adapters.iterdir())
    shutil.rmtree(press.blobs.folder(away))

    async def outcome(*, cold: bool) -> dict[str, bool]:
        made = press.enrolment("bfloat16").rebuild_images(cold=cold)
        return {digest: error is None async for digest, error in made}

    assert asyncio.run(outcome(cold=True)) == {here: True}
    assert asyncio.run(outcome(cold=False)) == {away: False}


def test_a_blob_that_was_damaged_is_reported_and_disturbs_no_other(press: Press) -> None:
    asyncio.run(press.enrol())
    damaged, sound = sorted(folder.name for folder in press.blobs.adapters.iterdir())
    (press.blobs.folder(damaged) / "adapter_model.safetensors").write_bytes(b"")

    async def outcome() -> dict[str, bool]:
        return {digest: error is None async for digest, error in press.enrolment("bfloat16").rebuild_images()}

    assert asyncio.run(outcome()) == {damaged: False, sound: True}


@pytest.mark.parametrize("left", [b"", b"\xff" * 64, None])
def test_a_damaged_demo_adapter_keeps_no_server_from_starting(press: Press, left: bytes | None) -> None:
    first = asyncio.run(press.enrol())
    for folder in press.blobs.adapters.iterdir():
        (folder / "adapter_model.safetensors").unlink()
        if left is not None:
            (folder / "adapter_model.safetensors").write_bytes(left)
    assert asyncio.run(press.enrol()) == first
    assert press.said[2:] == press.said[:2], "enrolled once more"


def test_the_shipped_adapters_are_for_the_demo_base() -> None:
    shipped = demo.shipped_adapters()
    assert len(shipped) >= 3
    for folder in shipped:
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_curl_command_is_one_line_that_a_shell_reads_as_meant() -> None:
    line = demo.curl("http://127.0.0.1:8000", "sp_key", "poet")
    assert "\n" not in line
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer sp_key" in words
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("poet", True)


def test_the_banner_shows_address_key_models_and_the_command(base_folder: Path) -> None:
    shown = demo.banner(
        "http://h:1",
        Base(base_folder, (BASE_ID, "tiny")),
        demo.Demo("sp_key", ("helper", "poet")),
        "http://h:1/console/",
    )
    assert BASE_ID in shown
    assert "http://h:1" in shown
    assert "tiny  helper  poet" in shown
    assert demo.curl("http://h:1", "sp_key", "poet") in shown.splitlines()
    many = demo.Demo("sp_key", tuple(f"poet{i:04}" for i in range(10_000)))
    lines = demo.banner("http://h:1", Base(base_folder, (BASE_ID,)), many, "").splitlines()
    assert max(map(len, lines)) < 400
    assert "poet0011  and 9988 more" in lines[1]
    assert "curl" not in demo.banner("http://h:1", Base(base_folder, (BASE_ID,)), None, "http://h:1/console/")


@contextmanager
def serving(base: Path) -> Iterator[list[str]]:
    """A real server of the tiny base on a free port; what it printed up to the command to paste."""
    options = ["--model", str(base), "--base-id", BASE_ID, "--port", "0", "--threads", "1"]
    command = [sys.executable, "-m", "stencilpress.cli", "serve", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.startswith("curl "):
                    break
            yield lines
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def paste(line: str) -> str:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_serve_prints_a_command_that_works_and_the_same_key_again(
    cli: Cli, data: Path, base_folder: Path, adapters: Path
) -> None:
    with serving(base_folder) as first:
        assert first[-1].startswith("curl -N http://127.0.0.1:")
        events = paste(first[-1]).split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert "/console/setup/" in first[3]
        assert json.loads(events[0].removeprefix("data: "))["model"] == BASE_ID
        assert "already" in cli("serve", "--model", BASE_ID, "--port", "0", code=1).stderr
        cli("adapter", "add", adapters / "helper", "--tenant", "demo", "--name", "helper")
        answer = paste(first[-1].replace(f'"{BASE_ID}"', '"helper"'))
        assert json.loads(answer.split("\n\n")[0].removeprefix("data: "))["model"] == "helper@1"
    with serving(base_folder) as second:
        assert "helper" in second[1].split()
        assert second[2] == first[2], "the demo key"
        assert "helper@1" in paste(second[-1])
