"""What intake's caller and its worker process say to each other: one JSON message each way."""

from __future__ import annotations

from typing import Literal

import msgspec

from stencilpress.engine.image import Finding

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
BaseCheck = Literal["named", "asserted", "known"]
"""How it is known that an adapter is for the base: its config must name it; or its owner vouches for a config that
names none; or the catalog says so, whatever aliases the base had at the time."""


class IntakeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an upload may be. ``target_modules`` lists projections that may be adapted; empty allows all."""

    max_rank: int = 64
    max_bytes: int = 1 << 30
    max_tensors: int = 8192
    max_scale: float = 1000.0
    target_modules: tuple[str, ...] = ()


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one validation may use. Passing one of these rejects the upload."""

    time_s: float = 120.0
    cpu_s: int = 60
    memory_bytes: int = 2 << 30


class IntakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Validate the two files in ``folder`` and write the image beside them.

    ``archive`` is the name of a file in the folder that holds the two; it is replaced by them.
    """

    folder: str
    model_dir: str
    dtype: Dtype
    limits: IntakeLimits
    base_check: BaseCheck
    archive: str
    cpu_limit_s: int
    memory_limit_bytes: int


class MatchedProjection(msgspec.Struct, frozen=True):
    """One projection that an upload adapts: in how many layers, at which ranks and scales (distinct, ascending)."""

    name: str
    layers: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """An adapter that can be served. ``image`` is the name of the file that the worker wrote into the folder.

    ``base_asserted``: the config names no base, its owner vouched for it. ``ranks`` are distinct and ascending;
    ``scales`` are the smallest and the largest; ``size_bytes`` counts the uploaded files.
    """

    digest: str
    base_id: str
    base_asserted: bool
    ranks: tuple[int, ...]
    scales: tuple[float, float]
    target_modules: tuple[str, ...]
    num_layers: int
    size_bytes: int
    modules: tuple[MatchedProjection, ...]
    image: str
    image_bytes: int


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """An adapter that cannot be served, with every reason found, and what of it fits the base all the same."""

    findings: tuple[Finding, ...]
    modules: tuple[MatchedProjection, ...] = ()
    size_bytes: int = 0


class StorageFull(msgspec.Struct, frozen=True, tag="storage_full"):
    """No verdict: the image does not fit the disk."""

    errno: int


Reply = Accepted | Rejected | StorageFull


def out_of_resources(what: str) -> Rejected:
    """The verdict on an upload whose validation takes too much."""
    return Rejected((Finding("", "resource_limit", f"validation took {what}"),))
