"""A comparison of two versions as a page shows it: what moved most comes first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stencilpress.gateway.lifecycle.diff import ConfigChange, DeltaChange, Diff, LayerRanks, TensorChange
from stencilpress.web.adapters import words
from stencilpress.web.formats import NONE, percent

SHOWN = 24
"""Bars that are shown at once; the others unfold."""
MAX_BARS = 400


@dataclass(frozen=True, slots=True)
class Bar:
    """How far something has moved, relative to what it was. ``width`` is 0 to 100, of the furthest."""

    name: str
    width: float
    moved: str
    norms: str
    unmatched: bool = False
    """There is nothing to compare it with."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """Layers next to each other whose ranks are the same, on both sides."""

    layers: str
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class DiffShown:
    """``same`` is what may be said where nothing differs at all. ``config`` is None where one was not kept."""

    config: list[tuple[str, str, str]] | None
    added: list[str]
    removed: list[str]
    ranks: list[RankRow]
    ranks_differ: bool
    deltas: list[Bar]
    tensors: list[Bar]
    left_out: int
    same: bool


def shown_diff(diff: Diff) -> DiffShown:
    deltas, tensors = _bars((one.module, one) for one in diff.deltas), _bars((one.name, one) for one in diff.tensors)
    moved = any(one.change is None or one.change > 0 for one in diff.deltas)
    return DiffShown(
        config=None if diff.config is None else [_field(one) for one in diff.config],
        added=_by_projection(diff.added),
        removed=_by_projection(diff.removed),
        ranks=_ranks(diff.layers),
        ranks_differ=any(one.left != one.right for one in diff.layers),
        deltas=deltas,
        tensors=tensors,
        left_out=max(0, len(diff.tensors) - MAX_BARS),
        same=diff.config is not None and not (diff.config or diff.added or diff.removed or moved),
    )


def _field(one: ConfigChange) -> tuple[str, str, str]:
    return one.field, as_json(one.left), as_json(one.right)


def as_json(value: Any) -> str:
    """A value of a config; "" for a field that is not there."""
    return "" if value is None else msgspec.json.encode(value).decode()


def short_name(name: str) -> str:
    """A module or tensor without what all have in common: ``3.self_attn.q_proj.lora_A``."""
    return name.rpartition("layers.")[2].removesuffix(".weight")


def _bars(changes: Any) -> list[Bar]:
    """The furthest first; what has no counterpart is as far as can be."""
    found: list[tuple[str, DeltaChange | TensorChange]] = sorted(changes, key=lambda one: -_distance(one[1]))
    furthest = max((_distance(one) for _, one in found if _distance(one) < float("inf")), default=0.0)
    return [_bar(name, one, furthest) for name, one in found[:MAX_BARS]]


def _distance(one: DeltaChange | TensorChange) -> float:
    if one.change is None:
        return float("inf")
    return one.relative if one.relative is not None else one.change


def _bar(name: str, one: DeltaChange | TensorChange, furthest: float) -> Bar:
    norms = f"{_norm(one.left)} → {_norm(one.right)}"
    if one.change is None:
        only = "new" if one.left is None else "gone" if one.right is None else "other shape"
        return Bar(short_name(name), 100.0, only, norms, unmatched=True)
    distance = _distance(one)
    moved = percent(one.relative) if one.relative is not None else _norm(one.change)
    return Bar(short_name(name), round(100 * distance / furthest, 2) if furthest else 0.0, moved, norms)


def _norm(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"


def _by_projection(names: Sequence[str]) -> list[str]:
    """``q_proj in 32 layers`` instead of 32 names."""
    counts = Counter(name.rpartition(".")[2] for name in names)
    return [f"{name} in {words.count(count, 'layer')}" for name, count in counts.items()]


def _ranks(layers: Sequence[LayerRanks]) -> list[RankRow]:
    rows: list[tuple[int, int, str, str]] = []
    for one in layers:
        left, right = _rank_text(one.left), _rank_text(one.right)
        if rows and rows[-1][1] == one.layer - 1 and rows[-1][2:] == (left, right):
            rows[-1] = (rows[-1][0], one.layer, left, right)
        else:
            rows.append((one.layer, one.layer, left, right))
    return [RankRow(f"{first}" if first == last else f"{first}–{last}", *sides) for first, last, *sides in rows]


def _rank_text(ranks: Mapping[str, int]) -> str:
    """Projections by rank: ``q k v o 16``, or ``q v 8, gate up 16``."""
    by_rank: dict[int, list[str]] = {}
    for name, rank in ranks.items():
        by_rank.setdefault(rank, []).append(words.module(name))
    return ", ".join(f"{' '.join(names)}: {rank}" for rank, names in by_rank.items()) or NONE
