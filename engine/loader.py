"""Brings adapters from disk to host memory and from there into pages of the pool, on threads of its own.

A step never waits for it: the loop hands over orders and picks up the answers when they are there. Several images are
read at once, or one's blocks; one that is to be placed is copied on block by block (engine/incoming.py). Whatever goes
wrong with an adapter is its answer; nothing ends a thread.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from stencilpress.engine.copies import Piece, copy_pieces
from stencilpress.engine.image import (
    AdapterError,
    ImageError,
    PeftConfig,
    image_name,
    layout,
    open_image,
    remove_outdated,
    remove_unfinished,
    resolve,
    slice_table,
    unfinished_name,
    write_image,
)
from stencilpress.engine.image_check import BLOCK_BYTES
from stencilpress.engine.image_format import Image
from stencilpress.engine.incoming import Hosted, Incoming
from stencilpress.engine.memory import PoolMemory
from stencilpress.engine.plan import Fetched, FetchOrder, LoadOrder, LoadResult, Page, Placed, PlaceOrder, Sized
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.sgmv.views import AdapterView, adapter_view, table_view

logger = logging.getLogger(__name__)

READERS = 4
"""Images read at once, or blocks of one that is alone; residency orders no more."""
REBUILDS = 2
"""Images built anew for one order: another engine that has found the same damage may set the first one aside."""
PATIENCE_S = 0.005
"""How long a thread lets the launch of a step go first."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class _RankError(ValueError):
    """An adapter of a larger rank than the engine takes."""


class Loader:
    """``wake`` is called on the loader's threads whenever an answer is ready; ``close`` ends them."""

    def __init__(
        self, adapters_dir: Path, spec: ModelSpec, memory: PoolMemory, max_lora_rank: int, wake: Callable[[], None]
    ) -> None:
        self._adapters_dir = adapters_dir
        self._spec = spec
        self._fingerprint = spec.fingerprint()
        self._memory = memory
        self._max_lora_rank = max_lora_rank
        self._wake = wake
        self._pool_bytes = memory.flat.view(torch.uint8)
        self._stream = _new_stream(memory.device)
        self._results: deque[LoadResult] = deque()
        self._incoming: dict[str, Incoming] = {}
        self._hosted: dict[str, Hosted] = {}
        self._placed: dict[str, AdapterView] = {}
        self._readers = ThreadPoolExecutor(READERS, "loader-read")
        self._blocks = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "loader-block")
        self._placements = ThreadPoolExecutor(READERS + 1, "loader-place")  # one is left where others wait for reads
        self._spares = ThreadPoolExecutor(1, "loader-spare")
        self._preparing = threading.Lock()
        self._go_on = threading.Event()
        self._go_on.set()

    def submit(self, order: LoadOrder) -> None:
        """Have an order carried out. A drop is at once; reads and placements are at the same time as others."""
        if isinstance(order, FetchOrder):
            incoming = self._incoming[order.digest] = Incoming(BLOCK_BYTES)
            self._readers.submit(self._fetching, order, incoming)
        elif isinstance(order, PlaceOrder):
            self._placements.submit(self._placing, order, self._incoming.get(order.digest))
        else:
            (self._hosted if order.tier == "host" else self._placed).pop(order.digest, None)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """While the block plans and launches a step, threads leave it the interpreter, for which they would all wait
        in one line with it."""
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()

    def results(self) -> list[LoadResult]:
        """Answers since the last call; does not wait."""
        results = [self._results.popleft() for _ in range(len(self._results))]
        for result in results:
            if isinstance(result, Fetched):
                self._incoming.pop(result.digest, None)
        return results

    def adapter(self, digest: str) -> AdapterView:
        """The view of an adapter whose placement was answered without an error. Raises ``KeyError`` for others."""
        return self._placed[digest]

    def close(self) -> None:
        """Carry out what was ordered, then end the threads."""
        for threads in (self._readers, self._blocks, self._placements, self._spares):
            threads.shutdown()

    # On the threads

    def _answer(self, result: LoadResult) -> None:
        self._results.append(result)
        self._wake()

    def _fetching(self, order: FetchOrder, incoming: Incoming) -> None:
        start = time.perf_counter()
        hosted: Hosted | None = None
        try:
            hosted = self._hosted[order.digest] = self._fetch(order.digest, incoming)
        except Exception as error:  # noqa: BLE001 one adapter's fault, of whatever kind, is that adapter's answer
            absent = isinstance(error, FileNotFoundError)
            answer = Fetched(order.digest, 0, 0, _reason(order, error), absent=absent)
        else:
            seconds, size = time.perf_counter() - start, hosted.image.payload.nbytes
            answer = Fetched(order.digest, size, hosted.layout.num_pages, seconds=seconds)
        self._answer(answer)
        incoming.end(hosted)  # a placement that follows is answered after this

    def _placing(self, order: PlaceOrder, incoming: Incoming | None) -> None:
        start = time.perf_counter()
        try:
            if incoming is None:
                self._placed[order.digest] = self._place(self._hosted[order.digest], order.pages)
            else:
                self._placed[order.digest] = self._place_incoming(incoming, order.pages)
        except Exception as error:  # noqa: BLE001 as above
            if incoming is not None:
                incoming.outcome()  # the read that it follows may go on, and is answered first
            answer = Placed(order.digest, _reason(order, error))
        else:
            waited_s = incoming.waited_s if incoming is not None else 0.0
            answer = Placed(order.digest, seconds=time.perf_counter() - start - waited_s)
        self._answer(answer)

    def _fetch(self, digest: str, incoming: Incoming) -> Hosted:
        if not _DIGEST.fullmatch(digest):
            raise ImageError("not a digest")
        folder = self._adapters_dir / digest
        path = folder / image_name(self._fingerprint)
        if not path.exists():
            _build(folder, path, self._spec)
        for _ in range(REBUILDS):
            try:
                return self._read(path, incoming)
            except (ImageError, OSError) as error:
                if not _may_be_mended(error):
                    raise
                incoming.begin(None)
                _set_aside(path, error)
                _build(folder, path, self._spec)
        return self._read(path, incoming)

    def _read(self, path: Path, incoming: Incoming) -> Hosted:
        digest = path.parent.name
        self._go_on.wait(PATIENCE_S)
        with open_image(path, digest=digest, fingerprint=self._fingerprint) as file:
            header = file.header
            if header.max_rank > self._max_lora_rank:
                raise _RankError(f"rank {header.max_rank} exceeds max_lora_rank {self._max_lora_rank}")
            placed = layout(header, self._memory.geometry)
            self._answer(Sized(digest, placed.num_pages))
            coming = Hosted(Image(header, self._host_memory(header.payload_bytes)), placed)
            incoming.begin(coming)
            each = self._blocks.map if len(self._incoming) == 1 else map  # several images are threads enough
            file.read(coming.image.payload, each=each, landed=partial(incoming.landed, coming))
        return coming

    def _place(self, hosted: Hosted, pages: tuple[Page, ...]) -> AdapterView:
        """Copy an image and its slice table into pages. Raises ``ValueError`` if these are not so many as it takes."""
        with self._own_stream(), self._landing(), self._at_work():
            table = slice_table(hosted.layout, pages)
            pieces = self._pieces(hosted, pages, table)
            self._enqueue(pieces)
        return self._view(hosted, pages, table)

    def _place_incoming(self, incoming: Incoming, pages: tuple[Page, ...]) -> AdapterView:
        """The same of an image that is still being read; the table, without which nobody finds the rest, comes last."""
        coming = incoming.coming()
        if coming is not None:
            with self._at_work():
                table = slice_table(coming.layout, pages)
                pieces, ends = self._pieces(coming, pages, table), self._ends(coming)
            with self._own_stream(), self._landing():
                copied = 0
                while copied < len(ends) and (landed := incoming.follow(coming, ends[copied])):
                    complete = bisect_right(ends, landed)
                    with self._at_work():
                        self._enqueue(pieces[copied:complete])
                    copied = complete
                if incoming.outcome() is coming:
                    with self._at_work():
                        self._enqueue(pieces[-1:])
        hosted = incoming.outcome()
        if hosted is None:
            raise ImageError("the read that was to be followed has failed")
        return self._view(hosted, pages, table) if hosted is coming else self._place(hosted, pages)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """One placement at a time, and after the launch of a step: more threads that want the interpreter would hold
        each other up, and the loop most."""
        with self._preparing:
            self._go_on.wait(PATIENCE_S)
            yield

    def _ends(self, hosted: Hosted) -> list[int]:
        """Where in the stream each page's run ends, in bytes."""
        return [(run.start + run.elems) * self._memory.geometry.dtype_bytes for run in hosted.layout.runs]

    def _pieces(self, hosted: Hosted, pages: tuple[Page, ...], table: npt.NDArray[np.int64]) -> list[Piece]:
        """What of the stream each page takes, and last the table. They must be kept until they have landed: memory that
        is given up sooner may be the next placement's."""
        payload, geometry = torch.from_numpy(hosted.image.payload), self._memory.geometry
        width = geometry.dtype_bytes
        runs = [
            (page * geometry.page_bytes, payload[run.start * width : (run.start + run.elems) * width])
            for page, run in zip(pages, hosted.layout.runs, strict=False)
        ]
        return [*runs, (self._table_offset(hosted, pages) * width, self._pinned(table))]

    def _table_offset(self, hosted: Hosted, pages: tuple[Page, ...]) -> int:
        return pages[hosted.layout.table_page] * self._memory.geometry.page_elems + hosted.layout.table_offset

    def _view(self, hosted: Hosted, pages: tuple[Page, ...], table: npt.NDArray[np.int64]) -> AdapterView:
        memory, offset = self._memory, self._table_offset(hosted, pages)
        if self._stream is not None:
            return table_view(table, offset, memory.layers, memory.shapes)
        return adapter_view(memory.flat, table, offset, memory.layers, memory.shapes)

    def _enqueue(self, pieces: Sequence[Piece]) -> None:
        """Have pieces copied into the pool, on the current stream."""
        copy_pieces(self._pool_bytes, pieces)

    @contextmanager
    def _landing(self) -> Iterator[None]:
        """Wait for the copies of the block, however it ends: a step reads the pages once they are answered for, on a
        stream of its own, and after a failure they are others'."""
        try:
            yield
        finally:
            if self._stream is not None:
                landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                landed.record(self._stream)
                landed.synchronize()

    def _pinned(self, table: npt.NDArray[np.int64]) -> Tensor:
        table_bytes = torch.from_numpy(table).view(torch.uint8)
        return table_bytes if self._stream is None else table_bytes.pin_memory()

    def _own_stream(self) -> AbstractContextManager[object]:
        """Copies to an accelerator overlap the step that runs there."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _host_memory(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Pinned where there is an accelerator to copy to; then the next image's is made ready while nobody waits."""
        array = self._new_memory(size_bytes)
        if self._stream is not None:
            self._spares.submit(self._new_memory, size_bytes)  # given up at once, and found by the next of this size
        return array

    def _new_memory(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Pinning takes 17 ms for 27 MB on an H200's host; torch keeps what is given up, in sizes of powers of two."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        array: npt.NDArray[np.uint8] = memory.numpy()
        return array


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _may_be_mended(error: ImageError | OSError) -> bool:
    """Whether an image that could not be read is damaged, be it by its disk, or has just been set aside by another
    engine; of what is wrong with the machine, such as too many open files, a new image is no remedy."""
    return isinstance(error, (ImageError, FileNotFoundError)) or error.errno == errno.EIO


def _set_aside(path: Path, error: Exception) -> None:
    """Keep a damaged image for whoever looks into it, under another name, unless another engine has done so.

    Raises ``error`` where that cannot be.
    """
    logger.error("adapter %.12s: %s; it is built anew from the upload", path.parent.name, error)
    try:
        path.replace(path.with_suffix(".damaged"))
    except FileNotFoundError:
        return
    except OSError:
        raise error from None


def _build(folder: Path, path: Path, spec: ModelSpec) -> None:
    """Convert the uploaded files: intake builds for the dtype and the format that were served then."""
    config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=PeftConfig)
    tensors = load_safetensors((folder / "adapter_model.safetensors").read_bytes())
    modules, findings = resolve(spec, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if findings:
        raise AdapterError(findings)
    remove_unfinished(folder)
    partial = unfinished_name(path)
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
    if isinstance(error, (ImageError, AdapterError, _RankError)):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "adapter is not stored here"
    return f"adapter cannot be read: {type(error).__name__}"
