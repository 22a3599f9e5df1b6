"""Images: what goes in comes out of the pool, PEFT agrees on every delta, and damage never passes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from stencilpress.engine.image import (
    AdapterError,
    Image,
    ImageError,
    Layout,
    PeftConfig,
    Tensor,
    adapter_digest,
    build_image,
    image_name,
    layout,
    module_name,
    places,
    read_image,
    resolve,
    slice_table,
    write_image,
)
from stencilpress.engine.image_build import to_dtype
from stencilpress.engine.spec import DTYPE_BYTES, Dtype, ModelSpec, PageGeometry, load_spec, page_geometry
from tests.unit.adapters import PREFIX, lora_tensors, tiny_spec

Array = npt.NDArray[Any]
Deltas = dict[str, tuple[Array, Array, float]]
"""By module: A, B and scale."""

DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


# --- a pool, and a reader that knows only the contract in kernels/sgmv ---------------------------------------


def fill_pool(image: Image, placed: Layout, pages: tuple[int, ...]) -> bytearray:
    """Do what the loader does: one contiguous copy a page, then the table. All other bytes are 0xFF."""
    geometry, size = placed.geometry, placed.geometry.dtype_bytes
    pool = bytearray(b"\xff" * (geometry.page_bytes * (max(pages) + 1)))
    stream = image.payload.tobytes()
    for page, run in zip(pages, placed.runs, strict=False):
        start = page * geometry.page_bytes
        assert run.elems <= geometry.page_elems
        pool[start : start + run.elems * size] = stream[run.start * size : (run.start + run.elems) * size]
    table = slice_table(placed, pages).tobytes()
    start = pages[placed.table_page] * geometry.page_bytes + placed.table_offset * size
    assert start % 8 == 0
    assert placed.table_offset * size + len(table) <= geometry.page_bytes
    pool[start : start + len(table)] = table
    return pool


def read_pool(spec: ModelSpec, pool: bytearray, table_start: int, dtype: Dtype) -> Deltas:
    """A, B and scale of each module, found through the slice table alone."""
    size = DTYPE_BYTES[dtype]
    words = np.frombuffer(pool, "<u8", offset=table_start, count=(len(pool) - table_start) // 8)
    halves = np.frombuffer(pool, "<u4", offset=table_start, count=2 * len(words))
    floats = halves.view("<f4")
    groups = spec.groups
    addresses = 4 * spec.num_layers * len(groups)
    found: Deltas = {}
    for layer in range(spec.num_layers):
        for g, group in enumerate(groups):
            e = layer * len(groups) + g
            rank, mask, first = int(halves[8 * e]), int(halves[8 * e + 1]), int(words[4 * e + 1])
            scales = (floats[8 * e + 4], floats[8 * e + 5], floats[8 * e + 6])
            present = [p for p in range(len(group.projections)) if mask >> p & 1]
            slices = []
            for j in range(rank):
                address = int(words[addresses + first + j])
                elems = int(halves[8 * e + 7])
                slices.append(np.frombuffer(pool, f"<u{size}", offset=address * size, count=elems))
            column = 0
            parts: dict[tuple[int, str], list[Array]] = {}
            for side in "AB":
                for p in present:
                    width = group.projections[p].in_features if side == "A" else group.projections[p].out_features
                    parts[p, side] = [s[column : column + width] for s in slices]
                    column += width
            for p in present:
                a, b = np.stack(parts[p, "A"]), np.stack(parts[p, "B"]).T
                name = f"{layer}.{group.projections[p].name}"
                found[name] = (widen(a, dtype), widen(b, dtype), float(scales[p]))
    return found


def widen(bits: Array, dtype: Dtype) -> Array:
    """Bits of a served dtype as float32, by torch."""
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    signed = np.ascontiguousarray(bits).view(np.int32 if dtype == "float32" else np.int16)
    wide: Array = torch.from_numpy(signed).view(kinds[dtype]).float().numpy()
    return wide


def round_trip(image: Image, spec: ModelSpec, geometry: PageGeometry, seed: int = 0) -> Deltas:
    """Through pages in random order with gaps, and back."""
    placed = layout(image.header, geometry)
    order = np.random.default_rng(seed).permutation(2 * placed.num_pages)[: placed.num_pages]
    pages = tuple(int(page) for page in order)
    pool = fill_pool(image, placed, pages)
    start = pages[placed.table_page] * geometry.page_bytes + placed.table_offset * geometry.dtype_bytes
    return read_pool(spec, pool, start, spec.dtype)


# --- random bases and adapters -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An adapter of a base. ``given`` has what the test put in: A, B in float32 and the scale in float64."""

    spec: ModelSpec
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    given: Deltas
    max_rank: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads, head_dim = draw(st.sampled_from([(1, 6), (2, 8), (3, 10), (4, 4)]))
    spec = tiny_spec(
        draw(st.sampled_from(DTYPES)),
        hidden_size=draw(st.sampled_from([6, 16, 30])),
        intermediate_size=draw(st.sampled_from([5, 24, 40])),
        num_layers=draw(st.integers(1, 3)),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
    )
    everywhere = places(spec)
    adapted = draw(st.lists(st.sampled_from(everywhere), min_size=1, unique=True))
    rsl, r, alpha = draw(st.booleans()), draw(st.integers(1, 8)), draw(st.sampled_from([0.5, 4, 16, -8]))
    kind = draw(st.sampled_from([np.float32, np.float16, np.uint16]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    tensors: dict[str, Tensor] = {}
    values: Deltas = {}
    for place in adapted:
        name = module_name(spec, place)
        projection = spec.groups[place.group].projections[place.projection]
        rank = draw(st.sampled_from([r, r, 1, 3, 12]))
        a, b = (random_tensor(rng, s, kind) for s in ((rank, projection.in_features), (projection.out_features, rank)))
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
        if rank != r:
            ranks[name] = rank
        own = draw(st.sampled_from([alpha, alpha, 7]))
        if own != alpha:
            alphas[name] = own
        scale = own / math.sqrt(rank) if rsl else own / rank
        values[f"{place.layer}.{projection.name}"] = (as_float32(a), as_float32(b), scale)
    config = {
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": rsl,
        "target_modules": [module_name(spec, place) for place in adapted],
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
    return Case(spec, config, tensors, values, max(12, r))


def random_tensor(rng: np.random.Generator, shape: tuple[int, int], kind: type[Any]) -> Tensor:
    wide = rng.standard_normal(shape).astype(np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16) if kind is np.uint16 else wide.astype(kind)


def as_float32(tensor: Tensor) -> Array:
    return widen(tensor, "bfloat16") if tensor.dtype == np.uint16 else tensor.astype(np.float32)


def rounded(values: Array, dtype: Dtype) -> Array:
    """What torch makes of float32 values in a dtype."""
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    result: Array = torch.from_numpy(values).to(kinds[dtype]).float().numpy()
    return result


@settings(deadline=None, max_examples=150)
@given(case=cases(), page_growth=st.sampled_from([1, 2, 7]), seed=st.integers(0, 1000))
def test_what_goes_in_comes_out_of_the_pool(case: Case, page_growth: int, seed: int) -> None:
    image = build_image(case.spec, case.config, case.tensors)
    smallest = page_geometry(case.spec, case.max_rank)
    geometry = PageGeometry(smallest.page_tokens * page_growth, smallest.page_elems * page_growth, smallest.dtype_bytes)
    found = round_trip(image, case.spec, geometry, seed)
    assert found.keys() == case.given.keys()
    for name, (a, b, scale) in case.given.items():
        got_a, got_b, got_scale = found[name]
        rank = len(a)
        np.testing.assert_array_equal(got_a[:rank], rounded(a, case.spec.dtype))
        np.testing.assert_array_equal(got_b[:, :rank], rounded(b, case.spec.dtype))
        assert not got_a[rank:].any(), "unequal ranks of a group are zero-filled"
        assert not got_b[:, rank:].any()
        assert got_scale == np.float32(scale)


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_a_layout_takes_whole_slices_in_order(case: Case) -> None:
    header = build_image(case.spec, case.config, case.tensors).header
    geometry = page_geometry(case.spec, case.max_rank)
    placed = layout(header, geometry)
    sizes = [record.slice_elems for record in header.records for _ in range(record.rank)]
    assert sum(run.elems for run in placed.runs) == sum(sizes)
    position = 0
    for run in placed.runs:
        assert run.start == position
        position += run.elems
    for i, size in enumerate(sizes):
        run = placed.runs[placed.slice_page[i]]
        assert run.start + placed.slice_offset[i] == sum(sizes[:i])
        assert placed.slice_offset[i] + size <= run.elems <= geometry.page_elems
    for run, following in zip(placed.runs, placed.runs[1:], strict=False):
        first = sizes[list(np.cumsum([0, *sizes])).index(following.start)]
        assert run.elems + first > geometry.page_elems, "a page takes all the slices that fit"


# --- PEFT as the judge ---------------------------------------------------------------------------------------

PATTERNS = {
    "none": {},
    "suffix": {"q_proj": 6},
    "path": {"layers.1.mlp.up_proj": 2, "self_attn.q_proj": 3},
    "regex": {r".*\.layers\.[01]\.self_attn\.(q|v)_proj": 5, "v_proj": 9},
    "full": {"model.layers.0.self_attn.q_proj": 7},
    "no match": {"q": 6, "layers.11": 3},
}
TARGETS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*layers\.[12]\.(self_attn\.[qo]_proj|mlp\.(up|down)_proj)"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "one layer": {"target_modules": ["k_proj", "self_attn.q_proj"], "layers_to_transform": 1},
    "exclude": {"target_modules": "all-linear", "exclude_modules": r".*\.(down|k)_proj"},
    "exclude names": {"target_modules": ["q_proj", "gate_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, ModelSpec]:
    """A random Llama with grouped-query attention, and our reading of its own config."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    folder = tmp_path_factory.mktemp("base")
    config.save_pretrained(folder)
    (folder / "base.json").write_text(json.dumps({"id": "acme/tiny-llama"}))
    return LlamaForCausalLM(config), load_spec(folder, "float32")


@pytest.mark.filterwarnings("ignore:.*pattern keys did not match any targeted module:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT asks transformers' old name
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    ("ranks", "alphas", "targets"),
    [
        *((ranks, alphas, "names") for ranks in PATTERNS for alphas in ("none", "suffix", "regex")),
        *(("regex", "path", targets) for targets in TARGETS),
    ],
)
def test_every_delta_is_that_of_peft(
    base: tuple[LlamaForCausalLM, ModelSpec], tmp_path: Path, ranks: str, alphas: str, targets: str, rslora: bool
) -> None:
    model, spec = base
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        use_rslora=rslora,
        rank_pattern=PATTERNS[ranks],
        alpha_pattern=PATTERNS[alphas],
        task_type="CAUSAL_LM",
        **TARGETS[targets],
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    image = build_image(spec, saved, load_file(tmp_path / "adapter_model.safetensors"))
    found = round_trip(image, spec, page_geometry(spec, 16))
    layers = {name: module for name, module in adapted.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    assert len(layers) == len(found) > 0
    for name, layer in layers.items():
        number, projection = name.split(".layers.")[1].split(".")[0], name.rpartition(".")[2]
        a, b, scale = found[f"{number}.{projection}"]
        expected = layer.get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(scale * b @ a, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
        assert scale == np.float32(layer.scaling["default"])


# --- rounding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_that_of_torch(dtype: Dtype) -> None:
    """Every exponent, both signs, subnormals, halfway cases and values that overflow."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
    values = values[np.isfinite(values)]
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float16
    expected = torch.from_numpy(values).to(kind).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(to_dtype(values, dtype).view(np.uint16), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bf16_files_convert_as_in_torch(dtype: Dtype) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    finite = torch.isfinite(wide).numpy()
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
    expected = wide.to(kind).float().numpy()[finite]
    got = to_dtype(bits[finite], dtype)
    np.testing.assert_array_equal(widen(got, dtype), expected)


def test_a_value_beyond_the_served_dtype_is_refused() -> None:
    spec = tiny_spec("float16")
    tensors = lora_tensors(spec)
    name = next(iter(tensors))
    tensors[name][0, 0] = 1e5
    with pytest.raises(AdapterError) as caught:
        build_image(spec, CONFIG, tensors)
    assert [(f.field, f.code) for f in caught.value.findings] == [(name, "overflow")]


# --- digest --------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_content_not_of_spelling() -> None:
    spec = tiny_spec()
    tensors = lora_tensors(spec)
    digest = adapter_digest(spec, CONFIG, tensors)
    renamed = {k.removeprefix(PREFIX).replace(".weight", ".default.weight"): v for k, v in reversed(tensors.items())}
    respelled = {"r": 99, "rank_pattern": {"q_proj|v_proj": 4}, "lora_alpha": 2, "target_modules": "all-linear"}
    respelled |= {"alpha_pattern": {"[qv]_proj": 8}, "exclude_modules": ["k_proj", "o_proj"], "lora_dropout": 0.1}
    respelled["target_modules"] = r".*\.(q|v)_proj"
    assert adapter_digest(spec, respelled, renamed) == digest
    assert build_image(spec, CONFIG, tensors).header.digest == digest
    assert len(digest) == 64


def change_scale(_: ModelSpec, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["lora_alpha"] = 9


def change_bit(_: ModelSpec, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    next(iter(tensors.values())).view(np.uint32)[0, 0] ^= 1


def change_dtype(_: ModelSpec, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name].astype(np.float16)


def swap_layers(_: ModelSpec, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    first, second = (f"{PREFIX}model.layers.{n}.self_attn.q_proj.lora_A.weight" for n in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]


@pytest.mark.parametrize("change", [change_scale, change_bit, change_dtype, swap_layers])
def test_the_digest_follows_every_change_of_content(change: Callable[..., None]) -> None:
    spec, tensors, config = tiny_spec(), lora_tensors(tiny_spec()), dict(CONFIG)
    before = adapter_digest(spec, config, tensors)
    change(spec, config, tensors)
    assert adapter_digest(spec, config, tensors) != before


def test_the_digest_holds_the_base_but_not_the_served_dtype() -> None:
    tensors = lora_tensors(tiny_spec())
    digests = {adapter_digest(tiny_spec(dtype), CONFIG, tensors) for dtype in DTYPES}
    assert len(digests) == 1
    assert adapter_digest(tiny_spec(base_id="acme/other"), CONFIG, tensors) not in digests


# --- the file ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Image]:
    spec = tiny_spec()
    tensors = lora_tensors(spec)
    image = build_image(spec, CONFIG, tensors)
    modules, _ = resolve(
        spec,
        PeftConfig(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj")),
        {n: t.shape for n, t in tensors.items()},
    )
    path = tmp_path_factory.mktemp("image") / image_name(spec.fingerprint())
    assert write_image(path, spec, modules, tensors.__getitem__) == image.header
    return path, image


def read(path: Path, image: Image) -> Image:
    return read_image(path, digest=image.header.digest, fingerprint=image.header.fingerprint)


def test_an_image_is_read_as_it_was_built(stored: tuple[Path, Image]) -> None:
    path, image = stored
    back = read(path, image)
    assert back.header == image.header
    np.testing.assert_array_equal(back.payload, image.payload)


def test_the_reader_fills_the_memory_that_it_is_given(stored: tuple[Path, Image]) -> None:
    path, image = stored
    pinned = np.zeros(1 << 20, np.uint8)
    got = read_image(
        path,
        digest=image.header.digest,
        fingerprint=image.header.fingerprint,
        allocate=lambda size_bytes: pinned[:size_bytes],
    )
    assert np.shares_memory(got.payload, pinned)
    np.testing.assert_array_equal(pinned[: image.header.payload_bytes], image.payload)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_flipped_bit_is_noticed(stored: tuple[Path, Image], data: st.DataObject) -> None:
    path, image = stored
    content = bytearray(path.read_bytes())
    header_bits, all_bits = 8 * 300, 8 * len(content)
    bit = data.draw(st.one_of(st.integers(0, header_bits), st.integers(0, all_bits - 1)))
    content[bit // 8] ^= 1 << bit % 8
    damaged = path.with_name("damaged")
    damaged.write_bytes(content)
    with pytest.raises(ImageError):
        read(damaged, image)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_any_other_length_is_noticed(stored: tuple[Path, Image], data: st.DataObject) -> None:
    path, image = stored
    content = path.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    damaged = path.with_name("damaged")
    for wrong in (content[:length], content + b"\0"):
        damaged.write_bytes(wrong)
        with pytest.raises(ImageError):
            read(damaged, image)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_not_a_signal(stored: tuple[Path, Image]) -> None:
    path, image = stored
    shrinking = path.with_name("shrinking")
    shrinking.write_bytes(path.read_bytes())

    def allocate(size_bytes: int) -> npt.NDArray[np.uint8]:
        with shrinking.open("r+b") as file:
            file.truncate(5000)
        return np.empty(size_bytes, np.uint8)

    with pytest.raises(ImageError, match="ends within its weights"):
        read_image(shrinking, digest=image.header.digest, fingerprint=image.header.fingerprint, allocate=allocate)


def test_another_adapters_or_bases_image_is_refused(stored: tuple[Path, Image]) -> None:
    path, image = stored
    with pytest.raises(ImageError, match="is of adapter"):
        read_image(path, digest="0" * 64, fingerprint=image.header.fingerprint)
    with pytest.raises(ImageError, match="is for base"):
        read_image(path, digest=image.header.digest, fingerprint=tiny_spec("float32").fingerprint())


def test_an_existing_file_is_never_written_over(stored: tuple[Path, Image]) -> None:
    path, _ = stored
    with pytest.raises(FileExistsError):
        write_image(path, tiny_spec(), (), lora_tensors(tiny_spec()).__getitem__)


# --- layouts that cannot be ----------------------------------------------------------------------------------


def test_a_layout_refuses_pages_that_are_too_small_or_of_another_dtype() -> None:
    spec = tiny_spec()
    header = build_image(spec, CONFIG, lora_tensors(spec)).header
    with pytest.raises(ImageError, match="needs a larger page"):
        layout(header, PageGeometry(1, 64, 2))
    with pytest.raises(ImageError, match="4-byte elements"):
        layout(header, PageGeometry(16, 1 << 16, 4))


def test_a_table_that_does_not_fit_behind_the_slices_takes_a_page() -> None:
    spec = tiny_spec()
    header = build_image(spec, CONFIG, lora_tensors(spec)).header
    stream_elems = header.payload_bytes // 2
    exact, roomy = (layout(header, PageGeometry(16, stream_elems + extra, 2)) for extra in (0, 1024))
    assert (len(exact.runs), exact.table_page, exact.table_offset) == (1, 1, 0)
    assert (len(roomy.runs), roomy.table_page, roomy.table_offset) == (1, 0, stream_elems)
    with pytest.raises(ValueError, match="1 pages for a layout of 2"):
        slice_table(exact, (0,))
