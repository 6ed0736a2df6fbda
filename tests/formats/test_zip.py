"""Where records lie in torch.save archives: real ones, and every kind of damage."""

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from pickled import CASES, CHECKPOINTS, archive_of, saved_files

from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.foreign import sniff
from ckpt_tools.formats.zip.read import (
    Archive,
    read_archive,
    require_little_endian,
)

REAL = [
    CHECKPOINTS / "torch-2.1.2-a_fsdp1_full/model.pt",
    CHECKPOINTS / "composer-0.32.1-monolith",
    CHECKPOINTS / "torch-2.9.1-a_fsdp1_full/model.pt",
    CASES / "C26_dtype_zoo/ckpt.pt",
]
PAYLOAD = bytes(range(256)) * 300
RECORDS = {"data.pkl": b"pickle", "byteorder": b"little", "data/0": PAYLOAD, "data/1": b""}


class Reads:
    """Bytes that count how they are read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []

    def __call__(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        return self.data[offset : offset + length]


def opened(data: bytes, *, offset: int = 0, length: int | None = None) -> Archive:
    size = len(data) - offset if length is None else length
    return read_archive(Reads(data), offset=offset, length=size, where="x.pt")


def real_file(path: Path) -> Path:
    return path if path.is_file() else next(saved_files(path))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.parent.name)
def test_records_of_real_archives_lie_where_zipfile_reads_them(path: Path) -> None:
    data = real_file(path).read_bytes()
    archive = opened(data)
    with zipfile.ZipFile(io.BytesIO(data)) as other:
        for full_name in other.namelist():
            record = archive.record(full_name.partition("/")[2])
            found = data[record.offset : record.offset + record.length]
            assert found == other.read(full_name)


def test_an_archive_inside_a_file_is_found_at_its_offset() -> None:
    data = archive_of(RECORDS)
    archive = opened(b"x" * 1000 + data + b"y" * 50, offset=1000, length=len(data))
    assert archive.read("data/0") == PAYLOAD
    assert archive.record("data/0").offset > 1000


def test_a_small_archive_costs_one_read() -> None:
    data = archive_of({"data.pkl": b"pickle", "data/0": b"1234"})
    reads = Reads(data)
    archive = read_archive(reads, offset=0, length=len(data), where="x.pt")
    archive.read("data.pkl")
    archive.record("data/0")
    assert reads.asked == [(0, len(data))]


def test_a_large_archive_is_not_read_whole() -> None:
    data = archive_of({"data/0": bytes(1 << 20), "data.pkl": b"pickle"})
    reads = Reads(data)
    read_archive(reads, offset=0, length=len(data), where="x.pt").record("data/0")
    assert sum(length for _, length in reads.asked) < 70_000


def test_a_crc_of_zero_is_no_crc() -> None:
    data = archive_of({"data.pkl": b"pickle"})
    crc = zlib.crc32(b"pickle").to_bytes(4, "little")
    assert opened(data.replace(crc, bytes(4))).record("data.pkl").crc is None


def test_a_flipped_bit_in_a_record_is_told_by_its_crc() -> None:
    with pytest.raises(UnreadableError, match=r"x\.pt: record 'data\.pkl' is damaged"):
        opened(archive_of(RECORDS).replace(b"pickle", b"pickld")).read("data.pkl")


def test_a_cut_archive_is_told_so() -> None:
    with pytest.raises(UnreadableError, match="is truncated: 50,000 bytes"):
        opened(archive_of(RECORDS)[:50_000])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b"\x28\xb5\x2f\xfd....", "a packed archive"),
        (b"\x80\x02}.", "it is a pickle"),
        (b"nothing that anybody knows", "does not begin like one"),
    ],
)
def test_what_is_no_archive_is_named(data: bytes, words: str) -> None:
    with pytest.raises(UnreadableError, match=words):
        opened(data)


def test_a_compressed_record_is_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1000))
    with pytest.raises(UnreadableError, match=r"data\.pkl' is compressed"):
        opened(buffer.getvalue())


def test_a_record_that_is_there_twice_is_refused() -> None:
    data = archive_of({"data/0": b"a", "data/1": b"b"}).replace(b"data/1", b"data/0")
    with pytest.raises(UnreadableError, match="'data/0' is there twice"):
        opened(data)


def test_an_archive_of_another_program_is_refused() -> None:
    data = archive_of({"a": b"1"})
    with pytest.raises(UnreadableError, match=r"has no record 'data\.pkl'"):
        opened(data).read("data.pkl")


def test_a_record_outside_of_the_archive_is_refused() -> None:
    data = bytearray(archive_of({"data.pkl": b"pickle"}))
    entry = data.find(b"PK\x01\x02")
    for place in (entry + 20, entry + 24):
        data[place : place + 4] = (10_000).to_bytes(4, "little")
    with pytest.raises(UnreadableError, match="lies outside of the archive"):
        opened(bytes(data)).record("data.pkl")


@pytest.mark.parametrize(
    ("header", "at", "bit", "words"),
    [
        (b"PK\x01\x02", 8, 0x20, "compressed or encrypted"),
        (b"PK\x01\x02", 8, 0x40, "compressed or encrypted"),
        (b"PK\x01\x02", 9, 0x20, "compressed or encrypted"),
        (b"PK\x01\x02", 34, 0x02, r"'\S+' that it is on another disk"),
        (b"PK\x01\x02", 38, 0x10, r"'\S+' that it is a folder"),
        (b"PK\x06\x06", 4, 0x04, "the end record"),
        (b"PK\x06\x06", 16, 0x02, "one of several disks"),
        (b"PK\x06\x06", 20, 0x02, "one of several disks"),
        (b"PK\x06\x06", 24, 0x80, "one of several disks"),
        (b"PK\x06\x07", 16, 0x02, "one of several disks"),
    ],
)
def test_a_directory_that_torch_does_not_load_is_refused(
    header: bytes, at: int, bit: int, words: str
) -> None:
    """With the folder's bit set, torch.load gives memory that was never written."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(9.0)}, buffer)
    data = bytearray(buffer.getvalue())
    data[data.rindex(header) + at] ^= bit
    with pytest.raises(UnreadableError, match=words):
        opened(bytes(data))


def test_folders_that_a_packer_adds_are_no_damage() -> None:
    buffer = io.BytesIO(archive_of(RECORDS))
    folder = zipfile.ZipInfo("archive/data/")
    folder.external_attr = 0x10
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(folder, b"")
    assert opened(buffer.getvalue()).read("data/0") == PAYLOAD


def test_a_hostile_directory_size_takes_no_memory() -> None:
    data = bytearray(archive_of({"data.pkl": b"pickle"}))
    data[-10:-6] = (0xFFFFFF00).to_bytes(4, "little")
    with pytest.raises(UnreadableError, match=r"x\.pt"):
        opened(bytes(data))


def test_zip64_fields_are_read(tmp_path: Path) -> None:
    path = tmp_path / "wide.zip"
    with (
        zipfile.ZipFile(path, "w") as archive,
        archive.open(zipfile.ZipInfo("archive/data/0"), "w", force_zip64=True) as record,
    ):
        record.write(PAYLOAD)
    assert opened(path.read_bytes()).read("data/0") == PAYLOAD


def one_wide_record(fields: bytes) -> bytes:
    """An archive of record data/0 whose sizes and offset stand in these extra fields."""
    name, data = b"archive/data/0", b"0123456789"
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 45, *[0] * 7, len(name), 0) + name + data
    absent = 0xFFFFFFFF
    sizes = (zlib.crc32(data), absent, absent, len(name), len(fields))
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[45] * 2, *[0] * 4, *sizes, *[0] * 4, absent)
    entry += name + fields
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local), 0)
    return local + entry + end


def test_zip64_fields_of_the_directory_are_read_behind_other_extra_fields() -> None:
    other, wide = struct.pack("<2HB", 7, 1, 9), struct.pack("<2H3Q", 1, 24, 10, 10, 0)
    assert opened(one_wide_record(other + wide)).read("data/0") == b"0123456789"


@pytest.mark.parametrize("fields", [b"", struct.pack("<2H2Q", 1, 16, 10, 10), bytes(65_532)])
def test_a_missing_zip64_field_of_the_directory_is_refused(fields: bytes) -> None:
    with pytest.raises(UnreadableError, match="a zip64 field of its central directory is missing"):
        opened(one_wide_record(fields))


def test_big_endian_archives_are_known_and_refused() -> None:
    archive = opened(archive_of(RECORDS | {"byteorder": b"big"}))
    with pytest.raises(UnsupportedError, match="big-endian"):
        require_little_endian(archive)


def test_archives_that_say_nothing_are_little_endian() -> None:
    require_little_endian(opened(archive_of({"data.pkl": b""})))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (CASES / "C26_dtype_zoo/ckpt.pt", "zip"),
        (CASES / "C48_legacy_nonzip/old.pt", "pickle"),
        (CASES / "C48_legacy_nonzip/old_nested.tar", "pickle"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_files_are_told_by_their_first_bytes(path: Path, kind: str) -> None:
    assert sniff(path.read_bytes()[:512]) == kind


@pytest.mark.parametrize(("head", "kind"), [(bytes(512), "zeros"), (b"\x1f\x8b\x08", "packed")])
def test_what_crashes_and_packers_leave_is_told(head: bytes, kind: str) -> None:
    assert sniff(head) == kind
