"""How an image lies in pages of the pool: which run of the stream each page takes, and the slice table."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from stencilpress.engine.image_format import KINDS_REMEMBERED, ImageError, ImageHeader, Record
from stencilpress.engine.spec import DTYPE_BYTES, TABLE_ENTRY_WORDS, PageGeometry

Words = npt.NDArray[np.int64]

_ENTRY = struct.Struct("<IIqfffI")


@dataclass(frozen=True, slots=True)
class Run:
    """The part of the stream that one page takes, in elements."""

    start: int
    elems: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How an image lies in pages of one geometry, before it is known which.

    Page k of the adapter takes ``runs[k]`` from its start; the slice table lies ``table_offset`` elements into
    page ``table_page``, which is the last, and one more than the runs need if it does not fit behind them. The table
    begins with ``entries``, which do not depend on the pages.
    Slice i of the stream lies ``slice_offset[i]`` elements into page ``slice_page[i]``.
    """

    geometry: PageGeometry
    runs: tuple[Run, ...]
    table_page: int
    table_offset: int
    table_words: int
    entries: Words
    slice_page: Words
    slice_offset: Words

    @property
    def num_pages(self) -> int:
        return self.table_page + 1


def layout(header: ImageHeader, geometry: PageGeometry) -> Layout:
    """Fill pages with whole slices, in order. Raises :class:`ImageError` if the image cannot lie in such pages."""
    if DTYPE_BYTES[header.dtype] != geometry.dtype_bytes:
        raise ImageError(f"image of {header.dtype} in a pool of {geometry.dtype_bytes}-byte elements")
    return _layout(header.records, geometry)


@lru_cache(KINDS_REMEMBERED)
def _layout(records: tuple[Record, ...], geometry: PageGeometry) -> Layout:
    ranks = [record.rank for record in records]
    sizes = np.repeat([record.slice_elems for record in records], ranks).astype(np.int64)
    words = TABLE_ENTRY_WORDS * len(records) + len(sizes)
    if words * 8 > geometry.page_bytes or sizes.max(initial=0) > geometry.page_elems:
        raise ImageError(f"rank {max(ranks)} needs a larger page than {geometry.page_bytes} bytes")
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    page_first = _page_firsts(bounds, geometry.page_elems)
    runs = tuple(Run(int(bounds[first]), int(bounds[end] - bounds[first])) for first, end in pairwise(page_first))
    counts = np.diff(page_first)
    slice_page = np.repeat(np.arange(len(runs), dtype=np.int64), counts)
    slice_offset = bounds[:-1] - np.repeat(bounds[page_first[:-1]], counts)
    used = runs[-1].elems if runs else 0
    fits = bool(runs) and used * geometry.dtype_bytes + words * 8 <= geometry.page_bytes
    table_page, table_offset = (len(runs) - 1, used) if fits else (len(runs), 0)
    entries = _entries(records)
    return Layout(geometry, runs, table_page, table_offset, words, entries, slice_page, slice_offset)


def _page_firsts(bounds: Words, page_elems: int) -> list[int]:
    """Index of the first slice of each page, and the number of slices at the end."""
    firsts = [0]
    while firsts[-1] < len(bounds) - 1:
        end = np.searchsorted(bounds, bounds[firsts[-1]] + page_elems, side="right") - 1
        firsts.append(int(end))
    return firsts


def slice_table(placed: Layout, pages: tuple[int, ...]) -> Words:
    """The int64 words that a kernel reads (kernels/sgmv), with addresses for these pages of the pool."""
    if len(pages) != placed.num_pages:
        raise ValueError(f"{len(pages)} pages for a layout of {placed.num_pages}")
    starts = np.asarray(pages, dtype=np.int64) * placed.geometry.page_elems
    return np.concatenate((placed.entries, starts[placed.slice_page] + placed.slice_offset), dtype="<i8")


def _entries(records: tuple[Record, ...]) -> Words:
    firsts = accumulate((record.rank for record in records), initial=0)
    entries = [_entry(record, first) for record, first in zip(records, firsts, strict=False)]
    return np.frombuffer(b"".join(entries), "<i8")


def _entry(record: Record, first_slice: int) -> bytes:
    return _ENTRY.pack(record.rank, record.mask, first_slice, *record.scales, record.slice_elems)
