"""The loader: from files to host memory to pages, and every fault as an answer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import queue
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stencilpress.engine import image_check, image_format
from stencilpress.engine import loader as loader_module
from stencilpress.engine.copies import Piece, copy_pieces
from stencilpress.engine.image import ImageError, image_name, open_image
from stencilpress.engine.image_format import ImageFile
from stencilpress.engine.incoming import Hosted, Incoming
from stencilpress.engine.loader import Loader
from stencilpress.engine.plan import (
    DropOrder,
    Fetched,
    FetchOrder,
    LoadOrder,
    LoadResult,
    Page,
    Placed,
    PlaceOrder,
    Sized,
)
from stencilpress.engine.spec import ModelSpec
from stencilpress.kernels.sgmv.views import AdapterView
from tests.unit.tiny_models import MAX_RANK, Engine, load_engine, save_adapter, save_model

TARGETS = ["q_proj", "v_proj", "down_proj"]


class _Bench:
    """A loader on a small pool, its answers taken one by one."""

    def __init__(self, engine: Engine, adapters_dir: Path, max_lora_rank: int = MAX_RANK) -> None:
        self.engine = engine
        self.wakes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.answers: deque[LoadResult] = deque()
        self.loader = Loader(
            adapters_dir,
            engine.spec,
            engine.memory,
            max_lora_rank,
            wake=lambda: self.wakes.put(threading.current_thread().name),
        )

    def ask(self, order: LoadOrder) -> LoadResult:
        self.loader.submit(order)
        return self.next()

    def next(self) -> LoadResult:
        """The next answer, those apart of how many pages an image takes."""
        while not self.answers:
            assert self.wakes.get(timeout=30).startswith("loader")
            self.answers += (result for result in self.loader.results() if not isinstance(result, Sized))
        return self.answers.popleft()

    def fetch(self, digest: str) -> Fetched:
        result = self.ask(FetchOrder(digest))
        assert isinstance(result, Fetched)
        return result

    def place(self, digest: str, first: Page) -> AdapterView:
        pages = self.fetch(digest).pages
        assert self.ask(PlaceOrder(digest, tuple(range(first, first + pages)))) == Placed(digest)
        return self.loader.adapter(digest)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A model folder, an adapters folder and the digest of the adapter in it, as uploaded: without an image."""
    root = tmp_path_factory.mktemp("loader")
    save_model(root / "model", "llama")
    digest = save_adapter(root / "adapters", root / "model", 1, r=20, lora_alpha=10, target_modules=TARGETS)
    return root / "model", root / "adapters", digest


@pytest.fixture
def digest(stored: tuple[Path, Path, str]) -> str:
    return stored[2]


@pytest.fixture
def bench(stored: tuple[Path, Path, str], tmp_path: Path) -> Iterator[_Bench]:
    shutil.copytree(stored[1], tmp_path / "adapters")
    made = _Bench(load_engine(stored[0], pages=40), tmp_path / "adapters")
    yield made
    made.loader.close()


@pytest.fixture
def folder(bench: _Bench, digest: str, tmp_path: Path) -> Path:
    return tmp_path / "adapters" / digest


def _check_view(view: AdapterView, folder: Path, engine: Engine) -> None:
    """The view holds the file's matrices, transposed, with the scale, and nothing for what is not adapted."""
    tensors = load_file(folder / "adapter_model.safetensors")
    parents = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    groups = engine.spec.groups
    assert len(view.entries) == engine.spec.num_layers * len(groups)
    for entry, parts in enumerate(view.entries):
        layer, shape = entry // len(groups), engine.memory.shapes[entry % len(groups)]
        for p, projection in enumerate(groups[entry % len(groups)].projections):
            mine = [part for part in parts if part.columns == shape.columns(p)]
            prefix = f"base_model.model.model.layers.{layer}.{parents.get(projection.name, 'mlp')}.{projection.name}"
            if projection.name not in TARGETS:
                assert not mine
                continue
            assert torch.equal(torch.cat([part.a for part in mine]), tensors[f"{prefix}.lora_A.weight"])
            assert torch.equal(torch.cat([part.b for part in mine]).T, tensors[f"{prefix}.lora_B.weight"])
            assert {part.scale for part in mine} == {0.5}


def test_an_adapter_without_an_image_is_built_and_placed(bench: _Bench, digest: str, folder: Path) -> None:
    path = folder / image_name(bench.engine.spec.fingerprint())
    assert not path.exists()

    fetched = bench.fetch(digest)

    assert fetched.error == ""
    assert fetched.host_bytes == path.stat().st_size - 4096
    assert bench.ask(PlaceOrder(digest, tuple(range(7, 7 + fetched.pages)))) == Placed(digest)
    _check_view(bench.loader.adapter(digest), folder, bench.engine)
    elems = bench.engine.memory.geometry.page_elems
    assert bench.engine.memory.flat[: 7 * elems].isnan().all()
    assert bench.engine.memory.flat[(7 + fetched.pages) * elems :].isnan().all()
    assert [entry.name for entry in folder.iterdir() if "image" in entry.name] == [path.name], "no partial files"


def test_the_slice_table_stands_in_the_pool_at_its_offset(bench: _Bench, digest: str) -> None:
    view = bench.place(digest, first=3)

    memory = bench.engine.memory
    offset_bytes = view.table_offset * memory.geometry.dtype_bytes
    words = memory.flat.view(torch.uint8)[offset_bytes:].view(torch.int64)
    assert int(words[0]) & 0xFFFFFFFF == 20
    assert int(words[0]) >> 32 == 0b101, "q and v of the first group"
    address = words[4 * len(view.entries)]
    assert torch.equal(memory.flat[address : address + 48], view.entries[0][0].a[0])


def test_an_image_once_built_is_read_again(bench: _Bench, digest: str, folder: Path) -> None:
    bench.fetch(digest)
    (folder / "adapter_model.safetensors").unlink()

    assert bench.fetch(digest).error == ""


def test_a_placement_follows_a_read_and_is_answered_after_it(
    bench: _Bench, digest: str, folder: Path, gate: _Gate
) -> None:
    pages = bench.fetch(digest).pages
    bench.loader.submit(DropOrder(digest, "host"))
    gate.shut()
    bench.loader.submit(FetchOrder(digest))
    bench.loader.submit(PlaceOrder(digest, tuple(range(5, 5 + pages))))
    gate.let(1)  # of several blocks
    gate.passed.get(timeout=30)
    assert not [one for one in bench.loader.results() if not isinstance(one, Sized)]
    with pytest.raises(KeyError):
        bench.loader.adapter(digest)

    gate.open()

    assert isinstance(bench.next(), Fetched)
    assert bench.next() == Placed(digest)
    _check_view(bench.loader.adapter(digest), folder, bench.engine)


def test_a_copy_that_follows_a_read_is_not_counted_as_slow_as_that(
    bench: _Bench, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = bench.fetch(digest).pages
    bench.loader.submit(DropOrder(digest, "host"))
    clock = [0.0]
    read = image_format._read_block
    awaited = threading.Semaphore(0)
    incoming: list[Incoming] = []

    def slow(fd: int, offset: int, payload: memoryview, start: int) -> bytes:
        assert awaited.acquire(timeout=30)
        with incoming[0]._changed:  # which the one that follows holds until it waits
            clock[0] += 10.0
        return read(fd, offset, payload, start)

    follow = Incoming.follow

    def followed(self: Incoming, coming: Hosted, end: int) -> int:
        with self._changed:
            incoming.append(self)
            awaited.release()
            return follow(self, coming, end)

    monkeypatch.setattr(image_format, "_read_block", slow)
    monkeypatch.setattr(Incoming, "follow", followed)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    bench.loader.submit(FetchOrder(digest))
    bench.loader.submit(PlaceOrder(digest, tuple(range(pages))))

    fetched, placed = bench.next(), bench.next()

    assert isinstance(fetched, Fetched)
    assert isinstance(placed, Placed)
    assert (fetched.seconds, placed.seconds) == (10.0, 0.0)


def test_a_damaged_tail_is_never_usable(bench: _Bench, digest: str, folder: Path, gate: _Gate) -> None:
    pages = bench.fetch(digest).pages
    bench.loader.submit(DropOrder(digest, "host"))
    _flip(folder, folder / image_name(bench.engine.spec.fingerprint()))
    (folder / "adapter_model.safetensors").unlink()
    gate.shut()
    bench.loader.submit(FetchOrder(digest))
    bench.loader.submit(PlaceOrder(digest, tuple(range(pages))))
    gate.open()

    results = [bench.next(), bench.next()]

    assert [type(result) for result in results] == [Fetched, Placed]
    assert all(result.error for result in results)
    with pytest.raises(KeyError):
        bench.loader.adapter(digest)


def test_a_placement_that_follows_a_damaged_image_gets_the_one_built_anew(
    bench: _Bench, digest: str, folder: Path
) -> None:
    pages = bench.fetch(digest).pages
    bench.loader.submit(DropOrder(digest, "host"))
    _flip(folder, folder / image_name(bench.engine.spec.fingerprint()))
    bench.loader.submit(FetchOrder(digest))
    bench.loader.submit(PlaceOrder(digest, tuple(range(pages))))

    assert [bench.next().error, bench.next().error] == ["", ""]
    _check_view(bench.loader.adapter(digest), folder, bench.engine)


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize("broken", ["_enqueue", "_pieces"])
def test_a_placement_that_fails_during_the_read_is_answered_after_it(
    bench: _Bench, digest: str, folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Host memory for the table may be lacking, or the copy be refused: who heard of that first would order a second
    read beside the one that goes on."""
    pages = bench.fetch(digest).pages
    assert pages > 1
    bench.loader.submit(DropOrder(digest, "host"))
    failed, rest = threading.Event(), threading.Event()
    read = image_format._read_block

    def first_page(fd: int, offset: int, payload: memoryview, start: int) -> bytes:
        if start >= bench.engine.memory.geometry.page_bytes:
            assert rest.wait(30)
        return read(fd, offset, payload, start)

    def fail(*_: object) -> None:
        failed.set()
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(image_format, "_read_block", first_page)
    monkeypatch.setattr(bench.loader, broken, fail)
    bench.loader.submit(FetchOrder(digest))
    bench.loader.submit(PlaceOrder(digest, tuple(range(pages))))
    assert failed.wait(30)
    rest.set()

    fetched, placed = bench.next(), bench.next()

    assert isinstance(fetched, Fetched)
    assert not fetched.error
    assert isinstance(placed, Placed)
    assert placed.error == "adapter cannot be read: RuntimeError"
    monkeypatch.setattr(bench.loader, broken, getattr(type(bench.loader), broken).__get__(bench.loader))
    assert bench.ask(PlaceOrder(digest, tuple(range(pages)))) == Placed(digest)
    _check_view(bench.loader.adapter(digest), folder, bench.engine)


def test_a_slow_read_that_is_followed_holds_up_no_other_placement(
    bench: _Bench, digest: str, folder: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "adapters" / ("5" * 64)
    slow.mkdir()
    os.mkfifo(slow / folder.joinpath(image_name(bench.engine.spec.fingerprint())).name)
    bench.loader.submit(FetchOrder(slow.name))
    bench.loader.submit(PlaceOrder(slow.name, (30, 31)))

    _check_view(bench.place(digest, first=0), folder, bench.engine)

    (slow / image_name(bench.engine.spec.fingerprint())).open("wb").close()
    for result in (bench.next(), bench.next()):
        assert result.digest == slow.name
        assert result.error


class _Gate:
    """Lets blocks of images be read only one by one while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._tickets = threading.Semaphore(1 << 20)
        read = image_format._read_block

        def gated(fd: int, offset: int, payload: memoryview, start: int) -> bytes:
            assert self._tickets.acquire(timeout=30)
            digest = read(fd, offset, payload, start)
            self.passed.put(start)
            return digest

        monkeypatch.setattr(image_format, "_read_block", gated)

    def shut(self) -> None:
        while self._tickets.acquire(blocking=False):
            pass
        while not self.passed.empty():
            self.passed.get()

    def let(self, count: int) -> None:
        self._tickets.release(count)

    def open(self) -> None:
        self._tickets.release(1 << 10)


@pytest.fixture
def gate(bench: _Bench, monkeypatch: pytest.MonkeyPatch) -> _Gate:
    """Also makes blocks so small that an image has many."""
    for module in (image_format, loader_module, image_check):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1024)
    return _Gate(monkeypatch)


def test_an_adapter_moves_to_other_pages(bench: _Bench, digest: str, folder: Path) -> None:
    bench.place(digest, first=0)
    bench.loader.submit(DropOrder(digest, "hbm"))
    bench.engine.memory.flat.fill_(torch.nan)

    _check_view(bench.place(digest, first=20), folder, bench.engine)


def test_a_placement_lets_the_launch_of_a_step_go_first(
    bench: _Bench, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "PATIENCE_S", 600.0)
    pages = tuple(range(bench.fetch(digest).pages))
    with bench.loader.held_back():
        bench.loader.submit(PlaceOrder(digest, pages))
        with pytest.raises(queue.Empty):
            bench.wakes.get(timeout=0.2)

    assert bench.next() == Placed(digest)


@pytest.mark.parametrize("followed", [False, True])
def test_what_is_copied_stays_in_memory_until_it_has_landed(
    bench: _Bench, digest: str, folder: Path, followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator copies later: memory given up before may be the next placement's, with another slice table."""
    pieces: list[weakref.ref[torch.Tensor]] = []

    def enqueue(target: torch.Tensor, sources: Sequence[Piece]) -> None:
        copy_pieces(target, sources)
        pieces.extend(weakref.ref(source) for _, source in sources)

    @contextmanager
    def landing() -> Iterator[None]:
        yield
        assert pieces
        assert all(piece() is not None for piece in pieces)

    monkeypatch.setattr(loader_module, "copy_pieces", enqueue)
    monkeypatch.setattr(bench.loader, "_landing", landing)
    pages = bench.fetch(digest).pages
    order = PlaceOrder(digest, tuple(range(pages)))
    if followed:
        bench.loader.submit(DropOrder(digest, "host"))
        bench.loader.submit(FetchOrder(digest))
        bench.loader.submit(order)
        assert bench.next().error == ""
        assert bench.next() == Placed(digest)
    else:
        assert bench.ask(order) == Placed(digest)
    _check_view(bench.loader.adapter(digest), folder, bench.engine)


def test_a_launch_that_takes_long_holds_up_no_placement(bench: _Bench, digest: str) -> None:
    with bench.loader.held_back():
        bench.place(digest, first=0)


def test_files_of_another_adapter_are_not_converted(bench: _Bench, digest: str, folder: Path) -> None:
    """Rounded to half precision it is another adapter, whatever its folder is called."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors")

    fetched = bench.fetch(digest)

    assert fetched.error.endswith(f"expected {digest[:12]}")
    assert not (folder / image_name(bench.engine.spec.fingerprint())).exists()


def _truncate(folder: Path, image: Path) -> None:
    image.write_bytes(image.read_bytes()[:-5])


def _flip(folder: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[-100] ^= 1
    image.write_bytes(data)


def _empty(folder: Path, image: Path) -> None:
    image.write_bytes(b"")


def _older_version(folder: Path, image: Path) -> None:
    data = bytearray(image.read_bytes())
    data[8] -= 1
    image.write_bytes(data)


def _folder_in_place_of_the_image(folder: Path, image: Path) -> None:
    image.unlink()
    image.mkdir()


def _no_files(folder: Path, image: Path) -> None:
    shutil.rmtree(folder)


def _config_is_no_json(folder: Path, image: Path) -> None:
    image.unlink()
    (folder / "adapter_config.json").write_text("{")


def _weights_are_damaged(folder: Path, image: Path) -> None:
    image.unlink()
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)


def _weights_of_another_shape(folder: Path, image: Path) -> None:
    image.unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 4}))


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty, _older_version])
def test_a_damaged_image_is_set_aside_and_built_anew_from_the_upload(
    bench: _Bench, digest: str, folder: Path, damage: Callable[[Path, Path], None]
) -> None:
    image = folder / image_name(bench.engine.spec.fingerprint())
    sound = bench.fetch(digest)
    whole = image.read_bytes()
    damage(folder, image)

    assert bench.fetch(digest) == sound

    assert image.read_bytes() == whole
    assert image.with_suffix(".damaged").read_bytes() != whole
    _check_view(bench.place(digest, first=0), folder, bench.engine)


@pytest.mark.parametrize("error", [ImageError("damaged"), FileNotFoundError()])
def test_two_engines_that_find_the_same_damage_both_have_the_adapter(
    bench: _Bench, digest: str, folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one sets the image aside while this one reads it, or just before."""
    sound = bench.fetch(digest)
    image = folder / image_name(bench.engine.spec.fingerprint())
    opened: list[Path] = []

    def open_for_two(path: Path, *, digest: str, fingerprint: str) -> AbstractContextManager[ImageFile]:
        opened.append(path)
        if len(opened) == 1:
            image.rename(image.with_suffix(".damaged"))
            raise error
        return open_image(path, digest=digest, fingerprint=fingerprint)

    monkeypatch.setattr(loader_module, "open_image", open_for_two)

    assert bench.fetch(digest) == sound
    _check_view(bench.place(digest, first=0), folder, bench.engine)


def test_an_image_built_anew_may_be_set_aside_by_another_engine(
    bench: _Bench, digest: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That had read the damaged one until then, and takes the new one for it."""
    sound = bench.fetch(digest)
    image = folder / image_name(bench.engine.spec.fingerprint())
    _flip(folder, image)
    build = loader_module._build
    built: list[Path] = []

    def build_for_two(folder: Path, path: Path, spec: ModelSpec) -> None:
        build(folder, path, spec)
        built.append(path)
        if len(built) == 1:
            path.replace(path.with_suffix(".damaged"))

    monkeypatch.setattr(loader_module, "_build", build_for_two)

    assert bench.fetch(digest) == sound
    _check_view(bench.place(digest, first=0), folder, bench.engine)


def test_an_image_that_its_disk_cannot_read_is_built_anew(
    bench: _Bench, digest: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = bench.fetch(digest)
    image = folder / image_name(bench.engine.spec.fingerprint())
    lost = image.stat().st_ino
    pread = os.preadv

    def read(fd: int, buffers: Any, offset: int) -> int:
        if os.fstat(fd).st_ino == lost:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)

    assert bench.fetch(digest) == sound
    assert image.with_suffix(".damaged").stat().st_ino == lost


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty, _older_version])
def test_without_the_upload_damage_is_an_answer(
    bench: _Bench, digest: str, folder: Path, damage: Callable[[Path, Path], None]
) -> None:
    bench.fetch(digest)
    (folder / "adapter_model.safetensors").unlink()
    damage(folder, folder / image_name(bench.engine.spec.fingerprint()))

    assert bench.fetch(digest).error
    assert bench.fetch(digest).error


def test_an_image_of_an_older_format_goes_when_the_new_one_is_there(bench: _Bench, digest: str, folder: Path) -> None:
    outdated = folder / f"image-{bench.engine.spec.fingerprint()}.bin"
    outdated.write_bytes(b"STENCIL\n")

    assert bench.fetch(digest).error == ""

    assert not outdated.exists()


def test_what_a_killed_engine_has_left_of_an_image_goes_when_it_is_built_again(
    bench: _Bench, digest: str, folder: Path
) -> None:
    """What another engine is writing stays, and so does what somebody has begun just now."""
    name = image_name(bench.engine.spec.fingerprint())
    left, written, begun = [(folder / name).with_suffix(f".building-{who}") for who in ("left", "written", "begun")]
    for path in (left, written, begun):
        path.write_bytes(b"STENCIL\n")
    for path in (left, written):
        os.utime(path, (0, 0))
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert bench.fetch(digest).error == ""

    assert set(folder.glob("*.building-*")) == {written, begun}


def test_several_adapters_are_read_at_the_same_time(bench: _Bench, digest: str, tmp_path: Path) -> None:
    """One whose file does not come must not hold up the others: a pipe that nobody writes stands for a slow disk."""
    slow = tmp_path / "adapters" / ("5" * 64)
    slow.mkdir()
    pipe = slow / image_name(bench.engine.spec.fingerprint())
    os.mkfifo(pipe)
    bench.loader.submit(FetchOrder(slow.name))

    assert bench.fetch(digest).error == ""

    pipe.open("wb").close()
    result = bench.next()
    assert isinstance(result, Fetched)
    assert result.digest == slow.name
    assert result.error


@pytest.mark.parametrize(
    "damage",
    [
        _folder_in_place_of_the_image,
        _no_files,
        _config_is_no_json,
        _weights_are_damaged,
        _weights_of_another_shape,
    ],
)
def test_damage_is_an_answer_and_the_next_order_is_served(
    bench: _Bench, digest: str, folder: Path, damage: Callable[[Path, Path], None], stored: tuple[Path, Path, str]
) -> None:
    image = folder / image_name(bench.engine.spec.fingerprint())
    bench.fetch(digest)
    bench.loader.submit(DropOrder(digest, "host"))
    damage(folder, image)

    fetched = bench.fetch(digest)

    assert fetched.error
    assert (fetched.host_bytes, fetched.pages) == (0, 0)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(stored[1] / digest, folder)
    assert bench.fetch(digest).error == ""


@pytest.mark.parametrize("name", ["../adapters", "x", "", "0" * 64, "A" * 64, "é" * 64])
def test_a_name_that_is_no_stored_digest_is_an_answer(bench: _Bench, name: str) -> None:
    assert bench.fetch(name).error


def test_an_image_of_another_adapter_is_refused(bench: _Bench, digest: str, folder: Path) -> None:
    bench.fetch(digest)
    other = folder.with_name("1" * 64)
    folder.rename(other)

    assert "expected 111111111111" in bench.fetch(other.name).error


def test_a_rank_over_the_limit_is_refused(bench: _Bench, digest: str, tmp_path: Path) -> None:
    strict = _Bench(bench.engine, tmp_path / "adapters", max_lora_rank=19)

    error = strict.fetch(digest).error
    strict.loader.close()

    assert error == "rank 20 exceeds max_lora_rank 19"


def test_placing_what_is_not_hosted_is_an_answer(bench: _Bench, digest: str) -> None:
    fetched = bench.fetch(digest)
    bench.loader.submit(DropOrder(digest, "host"))

    placed = bench.ask(PlaceOrder(digest, tuple(range(fetched.pages))))

    assert isinstance(placed, Placed)
    assert placed.error
    with pytest.raises(KeyError):
        bench.loader.adapter(digest)


def test_a_dropped_adapter_has_no_view(bench: _Bench, digest: str) -> None:
    bench.place(digest, first=0)
    bench.loader.submit(DropOrder(digest, "hbm"))
    bench.fetch(digest)  # orders are carried out one after the other

    with pytest.raises(KeyError):
        bench.loader.adapter(digest)


def test_closing_carries_out_what_was_ordered(bench: _Bench, digest: str) -> None:
    for _ in range(5):
        bench.loader.submit(FetchOrder(digest))

    bench.loader.close()

    results = bench.loader.results()
    assert results.count(results[0]) == results.count(results[-1]) == 5
    assert [result.error for result in results] == [""] * 10
    assert bench.loader.results() == []
    bench.loader = Loader(Path("/nonexistent"), bench.engine.spec, bench.engine.memory, 8, wake=lambda: None)
