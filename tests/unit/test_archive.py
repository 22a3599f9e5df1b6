"""Archives: only two regular files of known names come out, whatever an archive holds or claims."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stencilpress.engine.image import AdapterError
from stencilpress.gateway.adapter_config import CONFIG_NAME, MAX_CONFIG_BYTES
from stencilpress.gateway.archive import ARCHIVE_NAME, FREE_BYTES, MAX_ENTRIES, unpack
from stencilpress.gateway.intake import Accepted, Rejected, validate_upload
from stencilpress.gateway.safetensors_file import WEIGHTS_NAME
from tests.unit.adapters import Desk

MAX_BYTES = 64 << 20
FILES = {CONFIG_NAME: b'{"r": 4}', WEIGHTS_NAME: os.urandom(5000)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "staging"
    folder.mkdir()
    return folder


def zip_bytes(files: dict[str, bytes], change: Callable[[zipfile.ZipInfo], None] = lambda _: None) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            change(info)
            archive.writestr(info, content)
    return data.getvalue()


def tar_bytes(files: dict[str, bytes], mode: Any = "w", extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:
        for info in extra:
            archive.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def take(folder: Path, data: bytes, max_bytes: int = MAX_BYTES) -> None:
    (folder / ARCHIVE_NAME).write_bytes(data)
    if findings := unpack(folder / ARCHIVE_NAME, folder, max_bytes):
        raise AdapterError(findings)


def refused(folder: Path, data: bytes, max_bytes: int = MAX_BYTES) -> dict[str, str]:
    """Codes by field. Nothing but the two names was written, and nothing outside."""
    beside = sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(AdapterError) as caught:
        take(folder, data, max_bytes)
    assert {path.name for path in folder.iterdir()} <= {ARCHIVE_NAME, CONFIG_NAME, WEIGHTS_NAME}
    assert sorted(path.name for path in folder.parent.iterdir()) == beside
    return {finding.field: finding.code for finding in caught.value.findings}


# --- what is taken -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("prefix", ["", "./", "my-adapter/"])
def test_a_tar_gives_its_two_files(folder: Path, mode: str, prefix: str) -> None:
    take(folder, tar_bytes({prefix + name: content for name, content in FILES.items()}, mode))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


@pytest.mark.parametrize("prefix", ["", "my-adapter/"])
def test_a_zip_gives_its_two_files(folder: Path, prefix: str) -> None:
    take(folder, zip_bytes({prefix + name: content for name, content in FILES.items()}))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


def test_folders_and_a_readme_are_passed_over(folder: Path) -> None:
    files = {"a/": b"", "a/README.md": b"# Model card", "a/.gitattributes": b"x"}
    take(folder, zip_bytes({**files, **{f"a/{name}": content for name, content in FILES.items()}}))
    assert {path.name for path in folder.iterdir()} == set(FILES)


async def test_an_archive_is_as_good_as_its_files(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    direct = await validate_upload(desk.folder, desk.model_dir)
    packed = tmp_path / "packed"
    packed.mkdir()
    files = {name: (desk.folder / name).read_bytes() for name in FILES}
    (packed / ARCHIVE_NAME).write_bytes(tar_bytes(files, "w:gz"))
    verdict = await validate_upload(packed, desk.model_dir, archive=ARCHIVE_NAME)
    assert isinstance(verdict, Accepted)
    assert verdict == direct
    assert {path.name for path in packed.iterdir()} == {*FILES, verdict.image}


async def test_findings_about_an_archive_come_like_all_others(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    (desk.folder / CONFIG_NAME).unlink()
    (desk.folder / WEIGHTS_NAME).unlink()
    (desk.folder / ARCHIVE_NAME).write_bytes(zip_bytes({"training_args.bin": b"x", "model.py": b"import os"}))
    verdict = await validate_upload(desk.folder, desk.model_dir, archive=ARCHIVE_NAME)
    assert isinstance(verdict, Rejected)
    assert [(finding.code, finding.field) for finding in verdict.findings] == [
        ("unexpected_file", "'training_args.bin'"),
        ("unexpected_file", "'model.py'"),
        ("missing_file", CONFIG_NAME),
        ("missing_file", WEIGHTS_NAME),
    ]


async def test_what_is_wrong_with_an_archive_hides_nothing_of_its_files(tmp_path: Path) -> None:
    """A trainer's checkpoint has more in it: whoever takes that out wants to know the rest at once."""
    desk = Desk(tmp_path)
    files = {name: (desk.folder / name).read_bytes() for name in FILES}
    config = json.loads(files[CONFIG_NAME]) | {"use_dora": True}
    for name in FILES:
        (desk.folder / name).unlink()
    packed = {"training_args.bin": b"x", **files, CONFIG_NAME: json.dumps(config).encode()}
    (desk.folder / ARCHIVE_NAME).write_bytes(tar_bytes(packed, "w:gz"))
    verdict = await validate_upload(desk.folder, desk.model_dir, archive=ARCHIVE_NAME)
    assert isinstance(verdict, Rejected)
    assert [(finding.code, finding.field) for finding in verdict.findings] == [
        ("unexpected_file", "'training_args.bin'"),
        ("unsupported", "use_dora"),
    ]
    assert verdict.modules, "what fits the base is told all the same"


# --- what is refused -----------------------------------------------------------------------------------------

ODD_NAMES = [
    "../adapter_config.json",
    "../../adapter_config.json",
    "/adapter_config.json",
    "/etc/passwd",
    "a/b/adapter_config.json",
    "a/../adapter_config.json",
    "./../adapter_config.json",
    "..\\adapter_config.json",
    ".hidden/adapter_config.json",
    "a\\adapter_config.json",
    "ADAPTER_CONFIG.JSON",
    "adapter_config.json.",
    "adapter_config.json ",
    "adapter_model.bin",
    "tokenizer.json",
    "train.py",
    "C:adapter_config.json",
    "a b/adapter_config.json",
    "\u202eadapter_config.json",
]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("pack", [zip_bytes, tar_bytes])
def test_odd_names_are_refused(folder: Path, pack: Callable[[dict[str, bytes]], bytes], name: str) -> None:
    codes = refused(folder, pack({name: b"x", WEIGHTS_NAME: b"y"}))
    assert len(codes) == 1
    assert set(codes.values()) <= {"bad_file_name", "unexpected_file"}


def test_a_nul_in_a_zips_name_hides_nothing(folder: Path) -> None:
    data = zip_bytes({"adapter_config.jsonX.py": b"x"}).replace(b"jsonX.py", b"json\0.py")
    assert set(refused(folder, data).values()) <= {"unexpected_file", "bad_archive"}


def test_every_bad_entry_is_told(folder: Path) -> None:
    codes = refused(folder, tar_bytes({"../x": b"", "y.bin": b"", "z/z/z": b""}))
    assert set(codes.values()) == {"bad_file_name", "unexpected_file"}
    assert len(codes) == 3


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_a_tar_are_refused(folder: Path, kind: bytes) -> None:
    link = tarfile.TarInfo(CONFIG_NAME)
    link.type, link.linkname = kind, "/etc/passwd"
    assert refused(folder, tar_bytes({WEIGHTS_NAME: b"x"}, extra=(link,)))[f"'{CONFIG_NAME}'"] == "link"
    assert not (folder / CONFIG_NAME).exists()


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.BLKTYPE])
def test_devices_in_a_tar_are_refused(folder: Path, kind: bytes) -> None:
    device = tarfile.TarInfo(CONFIG_NAME)
    device.type = kind
    assert refused(folder, tar_bytes({}, extra=(device,))) == {f"'{CONFIG_NAME}'": "not_a_file"}


def test_a_link_in_a_zip_is_refused(folder: Path) -> None:
    def as_link(info: zipfile.ZipInfo) -> None:
        info.external_attr = 0o120777 << 16

    assert refused(folder, zip_bytes({CONFIG_NAME: b"/etc/passwd"}, as_link)) == {f"'{CONFIG_NAME}'": "link"}


@pytest.mark.parametrize("pack", [zip_bytes, tar_bytes])
def test_a_second_file_of_a_name_is_refused(folder: Path, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    codes = refused(folder, pack({CONFIG_NAME: b"{}", f"a/{CONFIG_NAME}": b"{}"}))
    assert codes == {f"'a/{CONFIG_NAME}'": "duplicate_file"}
    assert (folder / CONFIG_NAME).read_bytes() == b"{}"


@pytest.mark.parametrize("pack", [zip_bytes, tar_bytes])
def test_too_many_entries_are_refused(folder: Path, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    codes = refused(folder, pack({f"f{i}/": b"" for i in range(MAX_ENTRIES + 1)}))
    assert codes["archive"] == "too_many_entries"


def bomb_zip() -> bytes:
    return zip_bytes({WEIGHTS_NAME: bytes(32 << 20)})


def bomb_tar() -> bytes:
    return tar_bytes({WEIGHTS_NAME: bytes(32 << 20)}, "w:gz")


def bomb_between() -> bytes:
    """A thousand to one in an entry that nobody wants."""
    return tar_bytes({"README.md": bytes(32 << 20), **FILES}, "w:gz")


@pytest.mark.parametrize("bomb", [bomb_zip, bomb_tar, bomb_between])
def test_a_bomb_is_stopped_long_before_it_has_gone_off(folder: Path, bomb: Callable[[], bytes]) -> None:
    data = bomb()
    assert len(data) < 64 << 10
    assert refused(folder, data) == {"archive": "archive_bomb"}
    written = sum(path.stat().st_size for path in folder.iterdir() if path.name != ARCHIVE_NAME)
    assert written <= FREE_BYTES + 200 * len(data)


@pytest.mark.parametrize("pack", [zip_bytes, tar_bytes])
def test_bytes_are_counted_not_believed(folder: Path, pack: Callable[[dict[str, bytes]], bytes]) -> None:
    data = pack({WEIGHTS_NAME: os.urandom(200_000)})
    assert refused(folder, data, max_bytes=100_000) == {"archive": "too_large"}


def test_a_zip_that_lies_about_a_size_is_refused(folder: Path) -> None:
    content = os.urandom(50_000)
    data = bytearray(zip_bytes({WEIGHTS_NAME: content}))
    for signature, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        start = data.index(signature) + at
        data[start : start + 4] = (100).to_bytes(4, "little")
    assert refused(folder, bytes(data)) == {"archive": "bad_archive"}


def test_a_config_of_megabytes_is_refused(folder: Path) -> None:
    assert refused(folder, tar_bytes({CONFIG_NAME: os.urandom(MAX_CONFIG_BYTES + 1)})) == {CONFIG_NAME: "too_large"}


def encrypted() -> bytes:
    data = bytearray(zip_bytes(FILES))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "not_an_archive"),
        (b"x" * 1000, "not_an_archive"),
        (b"\x80\x04\x95", "not_an_archive"),
        (b"7z\xbc\xaf\x27\x1c" + bytes(600), "not_an_archive"),
        (gzip.compress(b"no tar at all" * 100), "bad_archive"),
        (gzip.compress(tar_bytes(FILES))[:-2000], "bad_archive"),
        (b"\x1f\x8b" + bytes(100), "bad_archive"),
        (zip_bytes(FILES)[:-100], "bad_archive"),
        (b"PK\x03\x04" + bytes(100), "bad_archive"),
        (zip_bytes(FILES)[:40] + b"\xff" * 200 + zip_bytes(FILES)[240:], "bad_archive"),
    ],
    ids=[
        "empty",
        "text",
        "pickle",
        "7z",
        "gzip of text",
        "tar cut off",
        "broken gzip",
        "zip cut off",
        "broken zip",
        "zip overwritten",
    ],
)
def test_what_is_no_sound_archive_is_refused(folder: Path, data: bytes, code: str) -> None:
    assert refused(folder, data) == {"archive": code}


def test_an_encrypted_zip_is_refused(folder: Path) -> None:
    assert "encrypted" in refused(folder, encrypted()).values()


def test_a_tar_that_ends_within_a_file_is_refused(folder: Path) -> None:
    assert refused(folder, tar_bytes({WEIGHTS_NAME: os.urandom(50_000)})[:20_000]) == {"archive": "bad_archive"}


def test_only_deflate_is_taken(folder: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr(CONFIG_NAME, b"{}")
    assert refused(folder, data.getvalue()) == {f"'{CONFIG_NAME}'": "unsupported_compression"}


def test_fuzzed_archives_never_do_anything_else(folder: Path) -> None:
    """Ten thousand single-byte changes; each is taken or refused, and nothing but the two names ever appears."""
    sound = zip_bytes({CONFIG_NAME: b"{}" * 20, WEIGHTS_NAME: b"w" * 50})
    packed = tar_bytes({CONFIG_NAME: b"{}" * 20, WEIGHTS_NAME: b"w" * 50})
    assert zlib.crc32(sound) != zlib.crc32(packed)
    for data in (sound, packed[:2600]):
        for position in range(0, len(data), 3):
            changed = bytearray(data)
            changed[position] ^= 1 + position % 255
            for path in folder.iterdir():
                path.unlink()
            try:
                take(folder, bytes(changed))
            except AdapterError as error:
                assert error.findings  # noqa: PT017 - most changes are refused, some do not matter
            assert {path.name for path in folder.iterdir()} <= {ARCHIVE_NAME, CONFIG_NAME, WEIGHTS_NAME}
