"""Where compiled kernels are kept between starts.

Triton knows by itself when the source of a kernel, or of what it calls, has changed. Numba looks at the one file of the
kernel, and would go on using what was compiled with another file's old functions in it: its folder is named by a digest
of all kernels' sources.
"""

from __future__ import annotations

import shutil
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

_NUMBA = "numba"


def cache_folders(kernels: Path) -> dict[str, Path]:
    """By environment variable the folder below ``kernels`` that a compiler is to use."""
    return {"TRITON_CACHE_DIR": kernels / "triton", "NUMBA_CACHE_DIR": kernels / f"{_NUMBA}-{_digest()}"}


def remove_outdated(kernels: Path) -> None:
    """Delete what was compiled from other sources than these. Nobody else may be using the data folder."""
    current = cache_folders(kernels)["NUMBA_CACHE_DIR"]
    for folder in [kernels / _NUMBA, *kernels.glob(f"{_NUMBA}-*")]:
        if folder != current:
            shutil.rmtree(folder, ignore_errors=True)


def _digest() -> str:
    digest = blake2b(digest_size=8)
    spec = find_spec("stencilpress.kernels")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for source in sorted(Path(root).rglob("*.py")):
            digest.update(f"{source.relative_to(root)}\0".encode() + source.read_bytes())
    return digest.hexdigest()
