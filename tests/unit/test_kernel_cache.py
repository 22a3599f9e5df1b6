"""Compiled kernels are not used after any kernel's source has changed."""

from __future__ import annotations

from hashlib import blake2b
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from stencilpress import kernel_cache
from stencilpress.kernel_cache import cache_folders, remove_outdated


def test_a_change_of_any_source_names_another_folder_and_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, kernels = tmp_path / "sources", tmp_path / "kernels"
    (sources / "norm").mkdir(parents=True)
    (sources / "bits.py").write_text("a = 1\n")
    (sources / "norm" / "rms.py").write_text("from bits import a\n")
    spec = ModuleSpec("kernels", None, is_package=True)
    spec.submodule_search_locations = [str(sources)]
    monkeypatch.setattr(kernel_cache, "find_spec", lambda _: spec)
    before = cache_folders(kernels)
    assert cache_folders(kernels) == before
    for folder in (*before.values(), kernels / "numba"):
        folder.mkdir(parents=True)
    remove_outdated(kernels)
    assert {folder.name for folder in kernels.iterdir()} == {folder.name for folder in before.values()}

    (sources / "bits.py").write_text("a = 2\n")

    after = cache_folders(kernels)
    assert after["TRITON_CACHE_DIR"] == before["TRITON_CACHE_DIR"]
    assert after["NUMBA_CACHE_DIR"] != before["NUMBA_CACHE_DIR"]
    remove_outdated(kernels)
    assert [folder.name for folder in kernels.iterdir()] == ["triton"]


def test_the_kernels_of_this_tree_are_found(tmp_path: Path) -> None:
    folder = cache_folders(tmp_path)["NUMBA_CACHE_DIR"]
    assert folder.name.startswith("numba-")
    assert folder.name != "numba-" + blake2b(digest_size=8).hexdigest(), "of no sources at all"
