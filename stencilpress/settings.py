"""Where things are: the data folder and what lies in it. Reading the environment is left to the commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LAYOUT = 1
"""The version of the layout below; another one lives in a sub-folder of its own."""
_LAYOUTS = re.compile(r"v([1-9][0-9]*)")


class DataFolderError(Exception):
    """A data folder that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class DataFolder:
    """``<root>/v1``: catalog, models, adapter blobs, run-time files (docs/architecture.md has the layout)."""

    root: Path

    @property
    def path(self) -> Path:
        return self.root / f"v{LAYOUT}"

    @property
    def models(self) -> Path:
        return self.path / "models"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def kernels(self) -> Path:
        """Compiled kernels, made again when missing."""
        return self.path / "kernels"

    @property
    def demo_key(self) -> Path:
        return self.path / "demo_key"

    @property
    def database_url(self) -> str:
        """The catalog of this folder, used unless the operator names another database."""
        return f"sqlite:///{self.path / 'catalog.db'}"

    def prepare(self) -> None:
        """Create the folder, closed to other users. Raises :class:`DataFolderError`, also for a newer version's."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            versions = [int(match[1]) for entry in self.root.iterdir() if (match := _LAYOUTS.fullmatch(entry.name))]
        except OSError as error:
            raise DataFolderError(f"the data folder {self.root} cannot be used: {error.strerror}") from error
        if max(versions) > LAYOUT:
            text = f"holds v{max(versions)}, written by a newer version; this one knows v{LAYOUT}"
            raise DataFolderError(f"the data folder {self.root} {text}")


def default_data_dir(environ: Mapping[str, str], home: Path) -> Path:
    """``$XDG_DATA_HOME/stencilpress``; a relative XDG_DATA_HOME is to be ignored (XDG base directory specification)."""
    configured = Path(environ.get("XDG_DATA_HOME", ""))
    return (configured if configured.is_absolute() else home / ".local" / "share") / "stencilpress"
