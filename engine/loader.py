"""Brings adapters from disk to host memory and from there into pages of the pool, on threads of its own.

A step never waits for it: the loop hands over orders and picks up the answers when they are there. Several images are
read at once, each in blocks that are read and checked at once; placements are carried out one after the other beside
them. Whatever goes wrong with an adapter is its answer; nothing ends a thread.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from stencilpress.engine.copies import copy_pieces
from stencilpress.engine.image import (
    AdapterError,
    Image,
    ImageError,
    Layout,
    PeftConfig,
    image_name,
    layout,
    read_image,
    remove_outdated,
    resolve,
    slice_table,
    write_image,
)
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.plan import Fetched, FetchOrder, LoadOrder, LoadResult, Placed, PlaceOrder
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.sgmv.views import AdapterView, adapter_view, table_view

logger = logging.getLogger(__name__)

READERS = 4
"""Images read at once, and blocks of all of them together; residency orders no more."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_Order = TypeVar("_Order", FetchOrder, PlaceOrder)


@dataclass(frozen=True, slots=True)
class Hosted:
    """An image in host memory, and how it lies in pages."""

    image: Image
    layout: Layout


class Loader:
    """``wake`` is called on the loader's threads whenever an answer is ready; ``close`` ends them."""

    def __init__(
        self, adapters_dir: Path, spec: ModelSpec, memory: PoolMemory, max_lora_rank: int, wake: Callable[[], None]
    ) -> None:
        self._adapters_dir = adapters_dir
        self._spec = spec
        self._memory = memory
        self._max_lora_rank = max_lora_rank
        self._wake = wake
        self._pool_bytes = memory.flat.view(torch.uint8)
        self._stream = _new_stream(memory.device)
        self._results: deque[LoadResult] = deque()
        self._hosted: dict[str, Hosted] = {}
        self._placed: dict[str, AdapterView] = {}
        self._readers = ThreadPoolExecutor(READERS, "loader-read")
        self._blocks = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "loader-block")
        self._placements = ThreadPoolExecutor(1, "loader-place")

    def submit(self, order: LoadOrder) -> None:
        """Have an order carried out. A drop is at once; placements are in order, reads at the same time as others."""
        if isinstance(order, FetchOrder):
            self._readers.submit(self._answer, self._fetched, order)
        elif isinstance(order, PlaceOrder):
            self._placements.submit(self._answer, self._placing, order)
        else:
            (self._hosted if order.tier == "host" else self._placed).pop(order.digest, None)

    def results(self) -> list[LoadResult]:
        """Answers since the last call; does not wait."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def adapter(self, digest: str) -> AdapterView:
        """The view of an adapter whose placement was answered without an error. Raises ``KeyError`` for others."""
        return self._placed[digest]

    def close(self) -> None:
        """Carry out what was ordered, then end the threads."""
        for threads in (self._readers, self._placements, self._blocks):
            threads.shutdown()

    # On the threads

    def _answer(self, work: Callable[[_Order], LoadResult], order: _Order) -> None:
        self._results.append(work(order))
        self._wake()

    def _fetched(self, order: FetchOrder) -> Fetched:
        start = time.perf_counter()
        try:
            hosted = self._fetch(order.digest)
        except Exception as error:  # noqa: BLE001 one adapter's fault, of whatever kind, is that adapter's answer
            return Fetched(order.digest, 0, 0, _reason(order, error))
        self._hosted[order.digest] = hosted
        seconds = time.perf_counter() - start
        return Fetched(order.digest, hosted.image.payload.nbytes, hosted.layout.num_pages, seconds=seconds)

    def _placing(self, order: PlaceOrder) -> Placed:
        start = time.perf_counter()
        try:
            self._placed[order.digest] = self._place(self._hosted[order.digest], order.pages)
        except Exception as error:  # noqa: BLE001 as above
            return Placed(order.digest, _reason(order, error))
        return Placed(order.digest, seconds=time.perf_counter() - start)

    def _fetch(self, digest: str) -> Hosted:
        if not _DIGEST.fullmatch(digest):
            raise ImageError("not a digest")
        folder = self._adapters_dir / digest
        path = folder / image_name(self._spec.fingerprint())
        if not path.exists():
            _build(folder, path, self._spec)
        try:
            image = self._read(path)
        except ImageError as error:
            _set_aside(path, error)
            _build(folder, path, self._spec)
            image = self._read(path)
        if image.header.max_rank > self._max_lora_rank:
            raise ImageError(f"rank {image.header.max_rank} exceeds max_lora_rank {self._max_lora_rank}")
        return Hosted(image, layout(image.header, self._memory.geometry))

    def _read(self, path: Path) -> Image:
        return read_image(
            path,
            digest=path.parent.name,
            fingerprint=self._spec.fingerprint(),
            allocate=self._host_memory,
            each=self._blocks.map,
        )

    def _place(self, hosted: Hosted, pages: tuple[int, ...]) -> AdapterView:
        image, placed, memory = hosted.image, hosted.layout, self._memory
        table_offset = pages[placed.table_page] * memory.geometry.page_elems + placed.table_offset
        payload, width = torch.from_numpy(image.payload), memory.geometry.dtype_bytes
        runs = [
            (page * memory.geometry.page_bytes, payload[run.start * width : (run.start + run.elems) * width])
            for page, run in zip(pages, placed.runs, strict=False)
        ]
        with self._own_stream():
            try:
                copy_pieces(self._pool_bytes, runs)
                table = slice_table(image.header, placed, pages)  # while the copies run
                copy_pieces(self._pool_bytes, [(table_offset * width, self._pinned(table))])
            finally:
                if self._stream is not None:
                    self._stream.synchronize()  # a step reads the pages once this is answered, on a stream of its own
        if self._stream is not None:
            return table_view(table, table_offset, memory.layers, memory.shapes)
        return adapter_view(memory.flat, table, table_offset, memory.layers, memory.shapes)

    def _pinned(self, table: npt.NDArray[np.int64]) -> Tensor:
        table_bytes = torch.from_numpy(table).view(torch.uint8)
        return table_bytes if self._stream is None else table_bytes.pin_memory()

    def _own_stream(self) -> AbstractContextManager[object]:
        """Copies to an accelerator overlap the step that runs there."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _host_memory(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Pinned where there is an accelerator to copy to."""
        array: npt.NDArray[np.uint8] = torch.empty(
            size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None
        ).numpy()
        return array


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _set_aside(path: Path, error: ImageError) -> None:
    """Keep a damaged image for whoever looks into it, under another name. Raises ``error`` where that cannot be."""
    logger.error("adapter %.12s: %s; it is built anew from the upload", path.parent.name, error)
    try:
        path.replace(path.with_suffix(".damaged"))
    except OSError:
        raise error from None


def _build(folder: Path, path: Path, spec: ModelSpec) -> None:
    """Convert the uploaded files: intake builds for the dtype and the format that were served then."""
    config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=PeftConfig)
    tensors = load_safetensors((folder / "adapter_model.safetensors").read_bytes())
    modules, findings = resolve(spec, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if findings:
        raise AdapterError(findings)
    partial = path.with_suffix(f".building-{secrets.token_hex(4)}")  # another engine may be at it too
    try:
        header = write_image(partial, spec, modules, lambda name: _array(tensors[name]))
        if header.digest != folder.name:
            raise ImageError(f"files are of adapter {header.digest[:12]}, expected {folder.name[:12]}")
        partial.replace(path)
        remove_outdated(folder, header.fingerprint)
    finally:
        partial.unlink(missing_ok=True)


def _array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """As numpy has it: bfloat16 as its bits."""
    array: npt.NDArray[np.generic] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _reason(order: FetchOrder | PlaceOrder, error: Exception) -> str:
    """What a caller may read; the log gets the rest."""
    logger.warning("adapter %.12s: %s failed: %r", order.digest, type(order).__name__, error)
    if isinstance(error, (ImageError, AdapterError)):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "adapter is not stored here"
    return f"adapter cannot be read: {type(error).__name__}"
