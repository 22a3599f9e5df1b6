"""Brings adapters from disk to host memory and from there into pages of the pool, on a thread of its own.

A step never waits for it: the loop hands over orders, which are carried out one after the other, and picks up the
answers when they are there. Whatever goes wrong with an adapter is its answer; nothing ends the thread.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

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
    resolve,
    slice_table,
    write_image,
)
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.plan import DropOrder, Fetched, FetchOrder, LoadOrder, LoadResult, Placed, PlaceOrder
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.sgmv.views import AdapterView, adapter_view, table_view

logger = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Hosted:
    """An image in host memory, and how it lies in pages."""

    image: Image
    layout: Layout


class Loader:
    """One I/O thread. ``wake`` is called on it whenever an answer is ready; ``close`` ends it."""

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
        self._orders: queue.SimpleQueue[LoadOrder | None] = queue.SimpleQueue()
        self._results: deque[LoadResult] = deque()
        self._hosted: dict[str, Hosted] = {}
        self._placed: dict[str, AdapterView] = {}
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self._thread.start()

    def submit(self, order: LoadOrder) -> None:
        """Have an order carried out after those before it."""
        self._orders.put(order)

    def results(self) -> list[LoadResult]:
        """Answers since the last call; does not wait."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def adapter(self, digest: str) -> AdapterView:
        """The view of an adapter whose placement was answered without an error. Raises ``KeyError`` for others."""
        return self._placed[digest]

    def close(self) -> None:
        """Carry out what was ordered, then end the thread."""
        self._orders.put(None)
        self._thread.join()

    # On the thread

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, DropOrder):
                (self._hosted if order.tier == "host" else self._placed).pop(order.digest, None)
                continue
            self._results.append(self._fetched(order) if isinstance(order, FetchOrder) else self._placing(order))
            self._wake()

    def _fetched(self, order: FetchOrder) -> Fetched:
        try:
            hosted = self._fetch(order.digest)
        except Exception as error:  # noqa: BLE001 one adapter's fault, of whatever kind, is that adapter's answer
            return Fetched(order.digest, 0, 0, _reason(order, error))
        self._hosted[order.digest] = hosted
        return Fetched(order.digest, hosted.image.payload.nbytes, hosted.layout.num_pages)

    def _placing(self, order: PlaceOrder) -> Placed:
        try:
            self._placed[order.digest] = self._place(self._hosted[order.digest], order.pages)
        except Exception as error:  # noqa: BLE001 as above
            return Placed(order.digest, _reason(order, error))
        return Placed(order.digest)

    def _fetch(self, digest: str) -> Hosted:
        if not _DIGEST.fullmatch(digest):
            raise ImageError("not a digest")
        folder, fingerprint = self._adapters_dir / digest, self._spec.fingerprint()
        path = folder / image_name(fingerprint)
        if not path.exists():
            _build(folder, path, self._spec)
        image = read_image(path, digest=digest, fingerprint=fingerprint, allocate=self._host_memory)
        if image.header.max_rank > self._max_lora_rank:
            raise ImageError(f"rank {image.header.max_rank} exceeds max_lora_rank {self._max_lora_rank}")
        return Hosted(image, layout(image.header, self._memory.geometry))

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


def _build(folder: Path, path: Path, spec: ModelSpec) -> None:
    """Convert the uploaded files: intake builds for the dtype that was served then, which may have changed since."""
    config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=PeftConfig)
    tensors = load_safetensors((folder / "adapter_model.safetensors").read_bytes())
    modules, findings = resolve(spec, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if findings:
        raise AdapterError(findings)
    partial = path.with_suffix(".building")
    partial.unlink(missing_ok=True)
    try:
        header = write_image(partial, spec, modules, lambda name: _array(tensors[name]))
        if header.digest != folder.name:
            raise ImageError(f"files are of adapter {header.digest[:12]}, expected {folder.name[:12]}")
        partial.replace(path)
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
