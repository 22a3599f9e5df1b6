"""The life of an adapter on a real server of the tiny base: real weights, a real engine, a gateway that is killed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import signal
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Cli
from tests.integration.test_demo import serving
from tests.tiny import save_adapter

API = "/admin/api/v1/tenants/demo"
PROMPTS: dict[str, Any] = {"prompts": [{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}]}


class Press:
    """A client of the server with an operator's key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._key = key

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": kind}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def ask_again(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The same while a gateway is being started again; its answer must be a good one."""
        deadline = time.monotonic() + 30
        while True:
            try:
                status, answer = self.ask(method, path, body, kind)
            except (ConnectionError, urllib.error.URLError):
                assert time.monotonic() < deadline
                continue
            assert status < 300, answer
            return answer

    def until(self, condition: Callable[[Any], bool]) -> Any:
        """The engine's numbers when they are as they should become."""
        deadline = time.monotonic() + 30
        while True:
            (engine,) = self.ask("GET", "/admin/api/v1/engines")[1]["data"]
            if condition(engine):
                return engine
            assert time.monotonic() < deadline, engine
            time.sleep(0.1)


def packed(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        archive.add(folder, folder.name)
    return data.getvalue()


def gateway_process(data: Path) -> psutil.Process:
    """Of the server in a data folder; others may run beside it."""
    (found,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if "stencilpress.gateway" in process.cmdline()
        and process.environ()["STENCILPRESS_ADAPTERS_DIR"].startswith(str(data))
    ]
    return found


@pytest.mark.timeout(240)
def test_from_upload_to_purge(cli: Cli, data: Path, base_folder: Path, adapters: Path, tmp_path: Path) -> None:
    loud: dict[str, Any] = {"r": 8, "lora_alpha": 2000, "target_modules": ["o_proj", "up_proj", "down_proj"]}
    save_adapter(tmp_path / "loud", base_folder, seed=5, **loud)  # so that it changes what the tiny base repeats
    helper, second = packed(adapters / "helper"), packed(tmp_path / "loud")
    with serving(base_folder) as lines:
        url = re.search(r"http://[\d.:]+", lines[-1])
        assert url is not None
        press = Press(url[0], cli("key", "create", "demo", "--role", "operator").stdout.strip())
        status, added = press.ask("POST", f"{API}/adapters/helper/versions", helper, "application/gzip")
        assert (status, added["version"]["version"], added["promoted"]) == (201, "helper@1", True)
        assert press.ask("PUT", f"{API}/adapters/helper/smoke-prompts", PROMPTS)[0] == 200

        _, upload = press.ask("POST", f"{API}/uploads", {"adapter": "helper"})
        path, half = f"{API}/uploads/{upload['id']}", len(second) // 2
        part = f"{path}/files/archive?offset=0&sha256={hashlib.sha256(second[:half]).hexdigest()}"
        assert press.ask("PUT", part, second[:half], "application/octet-stream")[0] == 200
        killed = gateway_process(data)
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
        assert press.ask_again("GET", path)["received_bytes"] == {"archive": half}
        rest = f"{path}/files/archive?offset={half}&sha256={hashlib.sha256(second[half:]).hexdigest()}"
        assert press.ask("PUT", rest, second[half:], "application/octet-stream")[0] == 200
        whole = {"sha256": {"archive": hashlib.sha256(second).hexdigest()}}
        status, added = press.ask("POST", f"{path}/complete", whole)
        assert (status, added["version"]["version"]) == (200, "helper@2")

        status, moved = press.ask("PUT", f"{API}/adapters/helper/aliases/prod", {"version": 2, "expected_version": 1})
        assert status == 200, moved
        assert moved["version"] == 2, "the real engine answered the smoke prompts"
        _, runs = press.ask("GET", f"{API}/adapters/helper/versions/2/smoke")
        (result,) = runs["data"][0]["results"]
        assert (result["passed"], result["finite"], result["same_as_base"]) == (True, True, False)
        assert cli("version", "smoke", "helper@2", "--tenant", "demo").stdout == "helper@2 passed\n"
        body = {
            "model": "helper",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 6,
            "temperature": 0,
        }
        _, answer = press.ask("POST", "/v1/chat/completions", body)
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("helper@2", result["text"])

        status, difference = press.ask("GET", f"{API}/adapters/helper/versions/1/diff?other=2")
        assert (status, {one["field"] for one in difference["config"]}) == (200, {"lora_alpha", "r", "target_modules"})
        assert cli("alias", "rollback", "helper@prod", "--tenant", "demo").stdout == "helper@prod is helper@1\n"
        assert press.ask("DELETE", f"{API}/adapters/helper/versions/2")[0] == 200
        assert press.ask("POST", "/v1/chat/completions", {**body, "model": "helper@2"})[0] == 404
        assert press.ask("POST", "/v1/chat/completions", body)[1]["model"] == "helper@1"
        press.until(lambda engine: engine["adapters_host"] == 1)
        cli("adapter", "delete", "helper", "--tenant", "demo")
        left = press.until(lambda engine: engine["adapters_host"] == 0)
        assert (left["adapters_hbm"], left["pages_adapter"], left["adapter_host_bytes"]) == (0, 0, 0)
    assert len(list((data / "v1" / "adapters").iterdir())) == 2, "it can still be restored"
