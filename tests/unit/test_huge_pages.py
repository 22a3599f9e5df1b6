"""Huge pages of gateways, seen by the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stencilpress import huge_pages
from stencilpress.huge_pages import VARIABLES, with_huge_pages

ALLOCATES = """
kept = [object() for _ in range(1_000_000)]
address, flags = id(kept[500_000]), ""
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if "-" in first:
        low, high = (int(n, 16) for n in first.split("-"))
    elif first == "VmFlags:" and low <= address < high:
        flags = line
print("hg" in flags.split())
"""


@pytest.mark.skipif(not huge_pages._on_offer(), reason="this system has no huge pages to ask for")
def test_objects_lie_where_huge_pages_are_asked_for() -> None:
    bare = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    for environment, asked in ((bare, "False"), (with_huge_pages(bare), "True")):
        found = subprocess.run([sys.executable, "-c", ALLOCATES], env=environment, capture_output=True, check=True)
        assert found.stdout.decode().strip() == asked


@pytest.mark.parametrize("name", VARIABLES)
def test_what_an_operator_sets_stays(name: str) -> None:
    assert with_huge_pages({name: "own", "HOME": "/"}) == {name: "own", "HOME": "/"}


@pytest.mark.parametrize(
    ("library", "switch"), [("glibc 2.31", "[madvise]"), ("musl", "[madvise]"), ("glibc 2.36", "[never]")]
)
def test_nothing_changes_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str, switch: str
) -> None:
    (tmp_path / "enabled").write_text(f"always {switch}\n")
    monkeypatch.setattr(huge_pages, "SWITCH", tmp_path / "enabled")
    monkeypatch.setattr("os.confstr", lambda _name: library)
    assert with_huge_pages({"HOME": "/"}) == {"HOME": "/"}
