"""Latency histograms with fixed logarithmic buckets: those of any two processes, hours or adapters can be added.

Bucket ``i`` holds durations in ``(GROWTH^(i-1), GROWTH^i]`` milliseconds, so a quantile is off by at most 5 % (the
bucket's geometric middle is reported). The idea is that of Masson, Rim and Lee, "DDSketch: a fast and fully-mergeable
quantile sketch with relative-error guarantees", VLDB 12(12), 2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

GROWTH = 1.1
LEAST_MS = 0.01
MOST_MS = 86_400_000.0

SCALE = 1 / math.log(GROWTH)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[int, int]).decode

_MAP_16 = 0xDE
"""MessagePack's first byte of a map of 16 entries or more; below that the byte holds how many there are."""
_WIDTH, _LOWEST = 160, 32
"""Integers that MessagePack writes as one byte: -32 to 127."""

Counts = dict[int, int]
"""Bucket to number of durations; buckets without any are left out."""


def bucket_of(ms: float) -> int:
    """The bucket of a duration; what is outside of 0.01 ms to a day goes to the last bucket on that side."""
    return math.ceil(math.log(min(max(ms, LEAST_MS), MOST_MS)) * SCALE)


def value_of(bucket: int) -> float:
    """The duration in milliseconds that stands for a bucket."""
    return math.exp((bucket - 0.5) / SCALE)


def add(into: Counts, other: Mapping[int, int]) -> None:
    """Merge ``other`` into ``into``."""
    if not into:
        into.update(other)
        return
    for bucket, count in other.items():
        into[bucket] = into.get(bucket, 0) + count


def merged(packed: Sequence[bytes], groups: Sequence[int], count: int) -> list[Counts]:
    """Many stored histograms at once, each added to that of its group, a number below ``count``.

    The buckets and counts of most take one byte each; those are added as one array, six times as fast as in a loop.
    """
    short, short_groups, sizes = [], [], []
    totals: list[Counts] = [{} for _ in range(count)]
    for one, group in zip(packed, groups, strict=True):
        head, size = (3, one[1] << 8 | one[2]) if one[0] == _MAP_16 else (1, one[0] & 15)
        if len(one) == head + 2 * size:
            short.append(one[head:])
            short_groups.append(group)
            sizes.append(size)
        else:
            add(totals[group], unpack(one))
    pairs = np.frombuffer(b"".join(short), np.int8).reshape(-1, 2)
    places = np.repeat(np.array(short_groups, np.int64), sizes) * _WIDTH + pairs[:, 0] + _LOWEST
    sums = np.bincount(places, pairs[:, 1], count * _WIDTH).astype(np.int64)
    found = np.flatnonzero(sums)
    buckets, counts = (found % _WIDTH - _LOWEST).tolist(), sums[found].tolist()
    bounds = np.searchsorted(found, np.arange(count + 1) * _WIDTH).tolist()
    for total, start, end in zip(totals, bounds, bounds[1:], strict=False):
        add(total, dict(zip(buckets[start:end], counts[start:end], strict=True)))
    return totals


def quantiles(counts: Mapping[int, int], shares: Iterable[float]) -> list[float | None]:
    """The durations below which these shares (0 to 1, ascending) lie; None for all if there is no duration."""
    total = sum(counts.values())
    wanted = list(shares)
    if not total:
        return [None for _ in wanted]
    found: list[float | None] = []
    below = 0
    buckets = iter(sorted(counts.items()))
    bucket = 0
    for share in wanted:
        rank = max(math.ceil(share * total), 1)
        while below < rank:
            bucket, count = next(buckets)
            below += count
        found.append(value_of(bucket))
    return found


def pack(counts: Mapping[int, int]) -> bytes:
    """The form in which they are stored."""
    return _encode(dict(sorted(counts.items())))


def unpack(data: bytes) -> Counts:
    """Inverse of :func:`pack`."""
    return _decode(data)
