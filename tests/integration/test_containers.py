"""Engine and gateway as processes of their own that share a socket, and the compose file that starts them so."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from openai import OpenAI

from stencilpress.cli import main
from stencilpress.engine.settings import EngineSettings
from stencilpress.gateway.settings import GatewaySettings
from tests.integration.conftest import Cli
from tests.integration.test_metrics_stack import names_read, series_of
from tests.integration.test_supervisor import eventually
from tests.tiny import BASE_ID
from tests.valkey import running_valkey

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
PROFILES = ("gpu", "cpu")
"""Of engines; `metrics` goes beside them."""


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def ours(composed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Services that run our image."""
    return {name: one for name, one in composed["services"].items() if "STENCILPRESS_IMAGE" in one["image"]}


COMPOSE_AT_LEAST = (2, 24)
"""The first to know env files that need not be there."""


def compose_client() -> list[str] | None:
    """A client that can read our compose file; none needs a daemon for that."""
    for client in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(client[0]):
            asked = subprocess.run([*client, "version", "--short"], capture_output=True, text=True, check=False)
            version = re.match(r"v?(\d+)\.(\d+)", asked.stdout)
            if version and (int(version[1]), int(version[2])) >= COMPOSE_AT_LEAST:
                return client
    return None


@pytest.mark.skipif(compose_client() is None, reason="no client of Compose 2.24 or newer on this machine")
@pytest.mark.parametrize("profile", PROFILES)
def test_a_compose_client_accepts_the_file(profile: str) -> None:
    client = compose_client()
    assert client is not None
    command = [
        *client,
        "-f",
        str(COMPOSE),
        "--env-file",
        os.devnull,
        "--profile",
        profile,
        "--profile",
        "metrics",
        "config",
    ]
    environment = {**os.environ, "POSTGRES_PASSWORD": "secret"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert {f"engine{'-cpu' * (profile == 'cpu')}", "prometheus", "grafana"} <= set(services)
    assert services["gateway"]["environment"]["STENCILPRESS_DATABASE_URL"].startswith("postgresql://")
    environment.pop("POSTGRES_PASSWORD")
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode != 0
    assert "set a password" in refused.stderr


def test_every_service_runs_a_command_that_exists(composed: dict[str, Any]) -> None:
    assert [name for name, service in ours(composed).items() if "build" in service] == ["gateway"]
    for name, service in ours(composed).items():
        assert service["command"][0] in main.commands, name


def test_every_variable_is_a_setting(composed: dict[str, Any]) -> None:
    options = {parameter.envvar for command in commands(main) for parameter in command.params}
    settings = {*EngineSettings.__struct_fields__, *GatewaySettings.__struct_fields__}
    known = options | {f"STENCILPRESS_{field.upper()}" for field in settings}
    for name, service in ours(composed).items():
        assert set(service["environment"]) <= known, name


def commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else (command,)


def test_what_services_lean_on_is_there(composed: dict[str, Any]) -> None:
    services = composed["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, name
            assert how["condition"] != "service_healthy" or "healthcheck" in services[needed], name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in composed["volumes"] or (source.startswith("./") and (ROOT / source).exists()), name


def test_gateway_and_engines_share_the_sockets_folder(composed: dict[str, Any]) -> None:
    services = [service for service in ours(composed).values() if service["command"][0] in ("gateway", "engine")]
    assert len(services) == 3
    assert len({service["environment"]["STENCILPRESS_ENGINE_SOCKET"] for service in services}) == 1
    folder = os.path.dirname(services[0]["environment"]["STENCILPRESS_ENGINE_SOCKET"])  # noqa: PTH120 - not of this machine
    assert all(f"run:{folder}" in service["volumes"] for service in services)
    drain_s = float(composed["services"]["gateway"]["environment"]["STENCILPRESS_DRAIN_S"])
    assert float(composed["services"]["gateway"]["stop_grace_period"].removesuffix("s")) >= drain_s + 2.5


def test_the_image_has_what_the_services_use(composed: dict[str, Any]) -> None:
    text = (ROOT / "Dockerfile").read_text()
    for folder in ("/data", "/run/stencilpress"):
        assert re.search(rf"^    && install -d .*{folder}\b", text, re.MULTILINE), folder
    extras = re.search(r"'\.\[(.*)\]'", text)
    assert extras
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_only_what_the_image_is_built_from_reaches_a_builder() -> None:
    """A folder of a developer or an operator holds passwords and gigabytes; the list names what may travel."""
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    travels = {ROOT / line[1:] for line in rest if line.startswith("!")}
    links = {path.resolve() for path in (ROOT / "stencilpress").iterdir() if path.is_symlink()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = {
        ROOT / name for name in (project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt")
    }
    assert travels == {ROOT / "stencilpress", *links, *files}
    assert ".env" in (ROOT / ".gitignore").read_text().split()


def test_a_gpu_that_is_not_there_is_told_once(cli: Cli, base_folder: Path, tmp_path: Path, capfd: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    cli("pull", base_folder, "--base-id", BASE_ID)
    refused = cli("engine", "--socket", tmp_path / "engine.sock", "--model", BASE_ID, "--device", "cuda", code=1)
    assert "refused its settings" in refused.stderr
    told = capfd.readouterr().err
    assert "STENCILPRESS_DEVICE is cuda, and no GPU can be used: " in told
    assert "Traceback" not in told


@contextmanager
def running(*arguments: str, data: Path) -> Iterator[subprocess.Popen[str]]:
    """One of the commands; whatever the test did, it has ended."""
    command = [sys.executable, "-m", "stencilpress.cli", *arguments, "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def stores(postgresql_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compose file's PostgreSQL and Valkey, for all commands."""
    name = f"composed_{secrets.token_hex(6)}"
    postgresql_server.psql(f"CREATE DATABASE {name}")
    monkeypatch.setenv("STENCILPRESS_DATABASE_URL", postgresql_server.get_uri(database=name))
    with running_valkey() as valkey:
        monkeypatch.setenv("STENCILPRESS_QUOTA_STORE", valkey.connection_url)
        yield
    postgresql_server.psql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.timeout(120)
def test_an_engine_and_a_gateway_meet_at_a_socket_and_either_may_go(
    cli: Cli, data: Path, stores: None, base_folder: Path, tmp_path: Path
) -> None:
    """The compose file's services as plain processes."""
    cli("pull", base_folder, "--base-id", BASE_ID)
    cli("migrate")
    cli("tenant", "add", "acme")
    key = cli("key", "create", "acme").stdout.strip()
    path = tmp_path / "sockets" / "engine.sock"
    path.parent.mkdir()
    engine = ("engine", "--socket", str(path), "--model", BASE_ID, "--device", "cpu", "--threads", "1")
    with ExitStack() as stack:
        first = stack.enter_context(running(*engine, data=data))
        gateway = ("gateway", "--engine-socket", str(path), "--model", BASE_ID, "--port", "0")
        front = stack.enter_context(running(*gateway, data=data))
        assert front.stdout is not None
        url = front.stdout.readline().split()[-1]
        with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30) as api:

            def answer() -> str:
                return api.completions.create(model="base", prompt="ab", max_tokens=5, temperature=0).choices[0].text

            text = answer()
            alone = cli("serve", "--port", "0", "--model", BASE_ID, code=1)
            assert f"a gateway or an engine of its own uses the data folder {data}" in alone.stderr
            with urllib.request.urlopen(f"{url}/metrics") as metrics:
                assert names_read() <= set(series_of(metrics.read().decode()))
            first.send_signal(signal.SIGTERM)
            assert first.wait(10) == 0
            assert not path.exists()
            eventually(lambda: not ready(url))
            stack.enter_context(running(*engine, data=data))
            eventually(lambda: ready(url), 60)
            assert answer() == text
        second = stack.enter_context(running(*engine, data=data))
        assert second.wait(30) == 1
        assert second.stderr is not None
        assert f"already serves the socket {path}" in second.stderr.read()
        front.send_signal(signal.SIGTERM)
        assert front.wait(10) == 0


def test_a_model_that_was_not_pulled_is_named(cli: Cli, tmp_path: Path) -> None:
    refused = cli("engine", "--socket", tmp_path / "engine.sock", "--model", "nobody", code=1)
    assert "the model nobody is not in" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--engines", "2", "--devices", "0"), "must name one device for each of 2 engines"),
        (("--devices", "0,,1"), "must name one device"),
        (("--engines", "65"), "is not in the range 1<=x<=64"),
    ],
)
def test_engines_without_a_device_each_are_refused(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    refused = cli("serve", *arguments, code=2)
    assert told in refused.stderr


def test_a_taken_port_stops_serve_before_anything_is_brought_in(cli: Cli, data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = cli("serve", "--port", str(port), "--model", "nobody/nothing", code=1)
    assert refused.stderr == f"Error: cannot listen on HOST 127.0.0.1 PORT {port}: Address already in use\n"
    assert not (data / "v1" / "catalog.db").exists()
    assert not (data / "v1" / "models").exists()
