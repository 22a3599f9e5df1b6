"""The supervisor's promises, on real processes: a fake engine and fake gateways under the real supervisor."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import cast

import psutil
import pytest

from stencilpress.children import PULSE_INTERVAL_S, PULSES_MISSED
from stencilpress.engine.heartbeat import LEAST_LIMIT_S
from stencilpress.engine.threads import usable_cores
from tests.shared_memory import shared_memory_names

ROOT = Path(__file__).parents[2]
LIMIT_S = 5.0
"""What the product promises for Ctrl-C and for the death of the supervisor."""


class Server:
    """A running server and what a test asks of it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def children(self, kind: str = "") -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in found if f"tests.fakes.{kind}" in command(p)]

    def open(self, path: str) -> HTTPResponse:
        return cast(HTTPResponse, urllib.request.urlopen(self.url + path, timeout=10))

    def ready(self) -> bool:
        try:
            return self.open("/readyz").status == 200
        except OSError:
            return False


def command(process: psutil.Process) -> str:
    """How a process was started; "" for one that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def start(data: Path, *arguments: str) -> subprocess.Popen[str]:
    serve = [sys.executable, "-m", "tests.fakes.serve", str(data), *arguments]
    return subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def serving(data: Path, *arguments: str) -> Iterator[Server]:
    """A server that has said it is ready. Whatever the test did, nothing of it is left."""
    with start(data, *arguments) as process:
        try:
            assert process.stdout is not None
            word, url = process.stdout.readline().split()
            assert word == "ready"
            yield Server(process, url)
        finally:
            process.kill()


def eventually(condition: Callable[[], bool], limit_s: float = 45.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_ready_is_told_once_and_requests_work_through_every_gateway(tmp_path: Path) -> None:
    with serving(tmp_path, "--gateways", "2") as server:
        assert server.open("/stream/4").read() == b"1\n2\n3\n1\nfinished length "
        assert len(server.children("engine")) == 1
        assert len(server.children("gateway")) == 2
        assert (tmp_path / "v1" / "run").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_within_five_seconds_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    before = shared_memory_names()
    with serving(tmp_path, "--engine=--step-delay-ms 20") as server:
        stream = server.open("/stream/100000")
        assert stream.readline() == b"1\n"
        children = server.children()
        server.process.send_signal(number)
        assert server.process.wait(LIMIT_S) == 0
        assert gone(children)()
    assert [entry.name for entry in (tmp_path / "v1" / "run").iterdir()] == ["lock"]
    assert shared_memory_names() == before


def test_a_gateway_that_does_not_drain_is_killed_in_time(tmp_path: Path) -> None:
    with serving(tmp_path, "--gateway=--stubborn") as server:
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
        assert gone(children)()


def test_the_terminals_ctrl_c_reaches_the_supervisor_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        groups = {os.getpgid(p.pid) for p in server.children()}
        assert os.getpgid(server.process.pid) not in groups
        assert len(groups) == 2


def test_killing_the_supervisor_ends_all_children_and_theirs_within_five_seconds(tmp_path: Path) -> None:
    with serving(tmp_path, "--gateway=--grandchild", "--engine=--step-delay-ms 20") as server:
        stream = server.open("/stream/100000")
        assert stream.readline() == b"1\n"
        eventually(lambda: len(psutil.Process(server.process.pid).children(recursive=True)) == 3)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        eventually(gone(children), LIMIT_S)


def test_a_killed_server_can_be_started_again_at_once_on_the_same_port(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        port = server.url.rsplit(":", 1)[1]
        server.process.kill()
        server.process.wait()
        with serving(tmp_path, "--port", port) as again:
            assert again.ready()


def test_a_port_that_a_killed_servers_children_still_hold_is_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "v1" / "run" / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("1234")  # what a killed server leaves
    with (
        socket.create_server(("127.0.0.1", 0)) as held,
        start(tmp_path, "--port", str(held.getsockname()[1])) as process,
    ):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        held.close()
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    assert lock.read_text() == ""


def test_killing_the_engine_ends_its_streams_with_engine_lost_and_the_next_one_serves(tmp_path: Path) -> None:
    with serving(tmp_path, "--engine=--step-delay-ms 20") as server:
        stream = server.open("/stream/100000")
        assert stream.readline() == b"1\n"
        [gateway], [engine] = server.children("gateway"), server.children("engine")
        engine.kill()
        assert stream.read().endswith(b"finished error engine_lost")
        eventually(server.ready)
        assert server.open("/stream/2").read() == b"1\n2\nfinished length "
        assert server.children("gateway") == [gateway]
        assert server.children("engine") != [engine]


def test_killing_a_gateway_leaves_the_engine_and_a_new_one_attaches_to_it(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        [gateway], [engine] = server.children("gateway"), server.children("engine")
        gateway.kill()
        assert server.open("/stream/2").read() == b"1\n2\nfinished length "  # waited in the socket's queue
        assert server.children("engine") == [engine]
        assert server.children("gateway") not in ([], [gateway])


def test_what_a_crashed_gateway_started_ends_with_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--gateway=--grandchild") as server:
        [gateway] = server.children("gateway")
        [grandchild] = gateway.children()
        gateway.kill()
        eventually(gone([grandchild]))


def test_bad_settings_stop_the_start_with_the_process_own_message(tmp_path: Path) -> None:
    refuse = f"{sys.executable} -c 'import sys; print(\"STENCILPRESS_MAX_LORAS: no\", file=sys.stderr); sys.exit(2)'"
    with start(tmp_path, "--engine-command", refuse) as process:
        _, complaint = process.communicate(timeout=20)
        assert process.returncode == 1
    assert complaint.splitlines() == [
        "STENCILPRESS_MAX_LORAS: no",
        "the engine refused its settings; its message is above",
    ]


def test_an_engine_that_crashes_at_its_start_is_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "flaky.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['STENCILPRESS_GENERATION'] == '1': sys.exit(7)\n"
        "sys.argv = ['engine']\n"
        "runpy.run_module('tests.fakes.engine', run_name='__main__')\n"
    )
    flaky = f"env PYTHONPATH={ROOT} {sys.executable} {script}"
    with serving(tmp_path / "data", "--engine-command", flaky) as server:
        assert server.ready()


def test_a_second_server_on_the_same_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with start(tmp_path) as second:
            _, complaint = second.communicate(timeout=20)
            assert second.returncode == 1
        assert complaint == f"process {server.process.pid} already serves the data folder {tmp_path}\n"
        assert server.ready()


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with start(tmp_path, "--port", str(port)) as process:
            _, complaint = process.communicate(timeout=20)
            assert process.returncode == 1
    assert complaint == f"cannot listen on HOST 127.0.0.1 PORT {port}: Address already in use\n"


def test_a_host_that_is_not_ours_is_named(tmp_path: Path) -> None:
    with start(tmp_path, "--host", "no-such-host.invalid") as process:
        _, complaint = process.communicate(timeout=20)
        assert process.returncode == 1
    assert complaint.startswith("cannot listen on HOST no-such-host.invalid PORT 0: ")


def test_a_deep_data_folder_works_though_a_socket_address_is_short(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    with serving(deep) as server:
        assert server.open("/stream/1").read() == b"1\nfinished length "


def test_any_address_is_probed_on_loopback(tmp_path: Path) -> None:
    with serving(tmp_path, "--host", "0.0.0.0") as server:  # noqa: S104
        assert server.url.startswith("http://127.0.0.1:")


def test_an_engine_that_hangs_is_killed_and_the_next_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STENCILPRESS_HANG_LIMIT_S", "1")
    with serving(tmp_path, "--engine=--step-delay-ms 20") as server:
        stream = server.open("/stream/100000")
        assert stream.readline() == b"1\n"
        [engine] = server.children("engine")
        engine.suspend()
        assert stream.read().endswith(b"finished error engine_lost")
        eventually(server.ready)
        assert server.children("engine") not in ([], [engine])


def test_an_engine_that_takes_its_time_to_start_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENCILPRESS_HANG_LIMIT_S", "0.1")
    slow = f"import time, runpy, sys; time.sleep({PULSE_INTERVAL_S * 5}); sys.argv = ['engine']; "
    slow += "runpy.run_module('tests.fakes.engine', run_name='__main__')"
    with serving(tmp_path, "--engine-command", shlex.join([sys.executable, "-c", slow])) as server:
        server.process.terminate()
        assert server.process.stderr is not None
        assert "hangs" not in server.process.stderr.read()


def test_two_engines_have_a_socket_each_and_one_may_be_lost(tmp_path: Path) -> None:
    with serving(tmp_path, "--engines", "2", "--engine=--step-delay-ms 1") as server:
        engines = server.children("engine")
        assert len(engines) == 2
        assert {path.name for path in (tmp_path / "v1" / "run").glob("*.sock")} == {"engine.sock", "engine-2.sock"}
        threads = {engine.environ()["STENCILPRESS_THREADS"] for engine in engines}
        assert threads == {str(max(1, usable_cores() // 2))}
        engines[1].kill()
        eventually(lambda: len(server.children("engine")) == 2)
        assert engines[0] in server.children("engine")


def test_a_server_that_was_paused_as_a_whole_keeps_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENCILPRESS_HANG_LIMIT_S", "1")
    with serving(tmp_path) as server:
        [engine] = server.children("engine")
        processes = [psutil.Process(server.process.pid), *server.children()]
        for process in processes:
            process.suspend()
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(LEAST_LIMIT_S + 1)
        for process in processes:  # the supervisor first
            process.resume()
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(PULSE_INTERVAL_S * (PULSES_MISSED + 1))
        assert server.children("engine") == [engine]
