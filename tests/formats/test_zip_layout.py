"""The layout of a torch.save archive is torch's own, byte for byte."""

import io
import re
import zipfile
from collections.abc import Sequence
from zlib import crc32

import pytest
import torch

from ckpt_tools.formats.zip.layout import ArchiveLayout, lay_out

has_our_records = pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="torch 2.6 writes no .storage_alignment"
)


def filled(layout: ArchiveLayout, storages: Sequence[bytes]) -> bytes:
    """The archive with its storages and their CRCs put in."""
    data = bytearray(layout.length)
    for offset, literal in layout.literals:
        data[offset : offset + len(literal)] = literal
    for slot, storage in zip(layout.slots, storages, strict=True):
        data[slot.offset : slot.offset + slot.length] = storage
        for place in slot.crc_at:
            data[place : place + 4] = crc32(storage).to_bytes(4, "little")
    return bytes(data)


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def records(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return {name.removeprefix("archive/"): file.read(name) for name in file.namelist()}


def without_id(archive: bytes) -> bytes:
    """The archive with its serialization id, and the id's CRC, blanked out."""
    identity = records(archive)[".data/serialization_id"]
    crc = re.escape(crc32(identity).to_bytes(4, "little"))
    return re.sub(crc, bytes(4), archive.replace(identity, bytes(40)))


@has_our_records
@pytest.mark.parametrize(
    "value",
    [
        7,
        {"a": torch.arange(5.0)},
        {"a": torch.zeros(0, 3), "b": torch.arange(100, dtype=torch.int16)},
        [torch.full((n,), n) for n in range(12)],
    ],
    ids=["no storage", "one", "an empty one", "twelve"],
)
def test_an_archive_is_torchs_own_but_for_the_serialization_id(value: object) -> None:
    theirs = saved(value)
    found = records(theirs)
    storages = [found[f"data/{key}"] for key in range(sum(n.startswith("data/") for n in found))]
    layout = lay_out(found["data.pkl"], [len(storage) for storage in storages])
    ours = filled(layout, storages)
    assert without_id(ours) == without_id(theirs)


def test_storages_start_at_multiples_of_64_bytes() -> None:
    layout = lay_out(b"pickle", [1, 63, 64, 65, 1000])
    assert [slot.offset % 64 for slot in layout.slots] == [0] * 5


def test_equal_content_gives_the_same_bytes() -> None:
    assert lay_out(b"pickle", [10]) == lay_out(b"pickle", [10])


def test_every_crc_of_a_slot_holds_zeros_until_it_is_known() -> None:
    layout = lay_out(b"pickle", [10])
    empty = filled(layout._replace(slots=()), [])
    assert {empty[at : at + 4] for slot in layout.slots for at in slot.crc_at} == {bytes(4)}


class _Sink(io.RawIOBase):
    """A stream that forgets long writes, and keeps where the others went."""

    def __init__(self) -> None:
        self.length = 0
        self.kept: list[tuple[int, bytes]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        if len(view) < 1 << 16:
            self.kept.append((self.length, bytes(view)))
        self.length += len(view)
        return len(view)

    def between(self, start: int, end: int) -> bytearray:
        """The bytes of this range, which must all be kept ones."""
        return bytearray(b"".join(data for at, data in self.kept if start <= at < end))


@has_our_records
@pytest.mark.slow
def test_beyond_four_gib_the_layout_is_torchs_own() -> None:
    large = (1 << 32) + 5
    sink = _Sink()
    torch.save({"a": torch.zeros(large, dtype=torch.uint8), "b": torch.ones(3)}, sink)
    pickle = next(data for _, data in sink.kept if data.startswith(b"\x80\x02"))
    layout = lay_out(pickle, [large, 12])
    first, second = layout.slots
    start = first.offset + large
    theirs = sink.between(start, sink.length)
    for place in (*first.crc_at, *second.crc_at):
        theirs[place - start : place - start + 4] = bytes(4)
    ours = bytearray(layout.length - start)
    for offset, literal in layout.literals[1:]:
        ours[offset - start : offset - start + len(literal)] = literal
    theirs[second.offset - start : second.offset - start + 12] = bytes(12)
    assert bytes(sink.between(0, first.offset)) == layout.literals[0][1]
    assert _without_identity(ours) == _without_identity(theirs)


def _without_identity(tail: bytearray) -> bytes:
    """The end of an archive with its serialization id, and the id's CRC, blanked out."""
    at = tail.index(b"PK\6\6")
    identity = re.findall(rb"[0-9]{40}", tail[:at])[-1]
    crc = re.escape(crc32(identity).to_bytes(4, "little"))
    return re.sub(crc, bytes(4), bytes(tail).replace(identity, bytes(40)))
