"""Backups: taken beside writers, whole or refused, and the same server comes out of them."""

from __future__ import annotations

import re
import sqlite3
import stat
import subprocess
import sys
import tarfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from stencilpress.backup import BackupError, back_up, check, restore
from stencilpress.settings import DataFolder
from tests.integration.conftest import Cli
from tests.tiny import BASE_ID


@pytest.fixture
def stocked(cli: Cli, base_folder: Path, adapters: Path) -> Cli:
    """A data folder with the tiny base, a tenant and two adapters."""
    cli("pull", base_folder, "--base-id", BASE_ID)
    cli("tenant", "add", "acme")
    for name in ("helper", "poet"):
        cli("adapter", "add", adapters / name, "--tenant", "acme", "--name", name)
    return cli


def contents(data: Path) -> dict[str, bytes]:
    folder = data / "v1" / "adapters"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def digest(text: str) -> str:
    found = re.search(r"sha256 of all: ([0-9a-f]{64})", text)
    assert found, text
    return found[1]


def test_what_comes_out_is_what_went_in(stocked: Cli, data: Path, tmp_path: Path) -> None:
    file, fresh = tmp_path / "monday.tar", tmp_path / "fresh"
    said = stocked("backup", file).stdout
    assert "catalog, 2 adapter versions" in said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert digest(stocked("restore", file, "--check").stdout) == digest(said)
    assert digest(stocked("restore", file, "--data", fresh).stdout) == digest(said)
    assert contents(fresh) == contents(data)
    assert stat.S_IMODE((fresh / "v1").stat().st_mode) == 0o700
    listed = [
        stocked("adapter", "list", "--tenant", "acme", "--json", "--data", folder).stdout for folder in (data, fresh)
    ]
    assert listed[0] == listed[1]
    assert [entry.name for entry in fresh.iterdir()] == ["v1"]


def test_the_catalog_is_of_one_moment_while_others_write(data: Path, tmp_path: Path) -> None:
    """Two rows are written together all the time; no copy has one without the other."""
    folder = DataFolder(data)
    folder.prepare()
    stop = threading.Event()
    with closing(sqlite3.connect(folder.path / "catalog.db")) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript("CREATE TABLE a (n INTEGER); CREATE TABLE b (n INTEGER)")

    def write() -> None:
        with closing(sqlite3.connect(folder.path / "catalog.db", timeout=20)) as db:
            n = 0
            while not stop.is_set():
                n += 1
                with db:
                    db.execute("INSERT INTO a VALUES (?)", (n,))
                    db.execute("INSERT INTO b VALUES (?)", (n,))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(5):
            back_up(folder, folder.path / "catalog.db", tmp_path / f"{number}.tar")
    finally:
        stop.set()
        writer.join()
    for number in range(5):
        fresh = DataFolder(tmp_path / f"fresh{number}")
        fresh.prepare()
        restore(tmp_path / f"{number}.tar", fresh)
        with closing(sqlite3.connect(fresh.path / "catalog.db")) as db:
            assert db.execute("SELECT max(n) FROM a").fetchone() == db.execute("SELECT max(n) FROM b").fetchone()
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture
def file(stocked: Cli, tmp_path: Path) -> Path:
    stocked("backup", tmp_path / "good.tar")
    return tmp_path / "good.tar"


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_one_changed_byte_is_found(file: Path, where: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * where)] ^= 1
    file.write_bytes(content)
    with pytest.raises(BackupError, match=r"is damaged|is no"):
        check(file)


@pytest.mark.parametrize("kept", [0, 100, 600, 5000])
def test_a_file_that_ends_early_is_refused_and_leaves_nothing(file: Path, tmp_path: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    fresh = DataFolder(tmp_path / "fresh")
    fresh.prepare()
    with pytest.raises(BackupError, match="is no whole backup"):
        restore(file, fresh)
    assert not any(fresh.path.iterdir())
    assert [entry.name for entry in fresh.root.iterdir()] == ["v1"]


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "adapters/../../x", "run/engine.sock", "catalog.db"])
def test_members_that_no_backup_has_are_refused(file: Path, tmp_path: Path, name: str) -> None:
    hostile = tmp_path / "hostile.tar"
    with tarfile.open(file) as good, tarfile.open(hostile, "w") as bad:
        members = good.getmembers()
        for member in members[:-1]:
            bad.addfile(member, good.extractfile(member))
        extra = tarfile.TarInfo(name)
        bad.addfile(extra)
        bad.addfile(members[-1], good.extractfile(members[-1]))
    with pytest.raises(BackupError, match="is no backup of Stencilpress"):
        check(hostile)


def test_a_link_is_refused(file: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "link.tar"
    with tarfile.open(hostile, "w") as bad:
        link = tarfile.TarInfo("demo_key")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        bad.addfile(link)
    with pytest.raises(BackupError, match="is no backup of Stencilpress"):
        check(hostile)


def test_nothing_is_overwritten(stocked: Cli, file: Path, data: Path) -> None:
    assert "exists" in stocked("backup", file, code=1).stderr
    assert "is not empty" in stocked("restore", file, code=1).stderr
    assert "there is no file" in stocked("restore", "nowhere.tar", "--check", code=1).stderr


def test_a_catalog_in_postgresql_is_left_to_its_own_tool(stocked: Cli, tmp_path: Path) -> None:
    url = ("--database-url", "postgresql://nobody@localhost/none")
    assert "pg_dump" in stocked("backup", tmp_path / "x.tar", *url, code=2).stderr
    said = stocked("backup", tmp_path / "x.tar", "--without-catalog", *url).stdout
    assert "no catalog, 2 adapter versions" in said


def test_a_kill_leaves_no_backup_that_looks_whole(stocked: Cli, data: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from stencilpress import backup\n"
        "from stencilpress.settings import DataFolder\n"
        "backup.check = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "backup.back_up(DataFolder(Path(sys.argv[1])), None, Path(sys.argv[2]))\n"
    )
    target = tmp_path / "killed.tar"
    done = subprocess.run([sys.executable, "-c", script, str(data), str(target)], check=False)
    assert done.returncode == -9
    assert not target.exists()
