"""Which base model a command means: one that lies in the data folder, or one to bring in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from stencilpress.engine.spec import base_ids
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.blobs import open_regular
from stencilpress.gateway.names import BaseNames


class BaseError(Exception):
    """No base model, or more than one, fits what was asked; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Base:
    """A base model in its folder. ``ids`` are its id followed by its aliases."""

    folder: Path
    ids: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path) -> Base:
        """Raises :class:`~stencilpress.engine.spec.SpecError` if ``folder`` holds no base."""
        return cls(folder, base_ids(folder))

    @property
    def names(self) -> BaseNames:
        return BaseNames.of(self.ids)

    @property
    def short_name(self) -> str:
        """The handiest of its names, for people."""
        return min(self.ids, key=len)


def pulled_bases(models: Path) -> tuple[Base, ...]:
    """The models of a data folder."""
    if not models.is_dir():
        return ()
    folders = sorted(folder for folder in models.iterdir() if not folder.name.startswith("."))
    return tuple(Base.of(folder) for folder in folders if (folder / "base.json").is_file())


def find_base(models: Path, model: str) -> Base | None:
    """The pulled model that ``model`` names by folder, id or alias; or ``model`` itself, if it is such a folder."""
    for base in pulled_bases(models):
        if model in (base.folder.name, *base.ids):
            return base
    if (Path(model) / "base.json").is_file():
        return Base.of(Path(model))
    return None


def base_of_adapter(models: Path, adapter: Path) -> Base:
    """The pulled model that an adapter names as its base, or the only one there is.

    Raises :class:`BaseError` when the choice is not clear.
    """
    bases = pulled_bases(models)
    declared = declared_base(adapter)
    for base in bases:
        if declared in base.ids:
            return base
    if len(bases) == 1:
        return bases[0]
    if not bases:
        raise BaseError("there is no base model in the data folder; bring one in with `stencilpress pull`")
    raise BaseError(f"--model: name the base of this adapter, one of {', '.join(base.short_name for base in bases)}")


def declared_base(adapter: Path) -> str | None:
    """What ``adapter_config.json`` says. Only a hint: intake reads the file strictly."""
    try:
        with open_regular(adapter / CONFIG_NAME) as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    declared = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return declared if isinstance(declared, str) else None
