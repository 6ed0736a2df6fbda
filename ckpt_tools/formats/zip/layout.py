"""Where every byte of a torch.save archive goes, before any tensor has been read.

The layout is torch's own: stored records, data aligned to 64 bytes by padding in the local header's
extra field, sizes and CRC in a data descriptor behind each record, zip64 end records always. What
differs from torch is the value of `.data/serialization_id`: torch hashes the CRCs of the data into
it, which nobody knows yet; here it is a digest of the pickle and of the records' sizes.

This room knows nothing of what the pickle says, and it opens no file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.core.crc import crc32

_ALIGNMENT = 64
_LIMIT32 = 0xFFFFFFFF
_LIMIT16 = 0xFFFF
_UTF8_NAMES = 0x0800
_SIZES_FOLLOW = 0x0008  # sizes and CRC stand in a descriptor behind the data
_ZIP64_EXTRA = 1
_MADE_BY = 0x031E  # the end record's "made by": Unix, version 3.0
_ZIP64_VERSION = 45

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR64 = struct.Struct("<4sIQQ")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")

_CRC_IN_CENTRAL_HEADER = 16
_CRC_IN_DESCRIPTOR = 4


class Slot(NamedTuple):
    """Room for the bytes of one storage.

    ``offset`` and ``length`` are bytes of the archive; the CRC-32 of those bytes goes as four
    little-endian bytes to each offset in ``crc_at``, where the literals hold zeros.
    """

    offset: int
    length: int
    crc_at: tuple[int, ...]


class ArchiveLayout(NamedTuple):
    """An archive of ``length`` bytes: the bytes known already, and the slots between them."""

    length: int
    literals: tuple[tuple[int, bytes], ...]
    slots: tuple[Slot, ...]


class _Canvas:
    """Bytes laid one behind the other, with gaps; neighbours become one literal."""

    def __init__(self) -> None:
        self.at = 0
        self.literals: list[tuple[int, bytes]] = []
        self._open: list[bytes] = []
        self._start = 0

    def put(self, data: bytes) -> None:
        self._open.append(data)
        self.at += len(data)

    def skip(self, length: int) -> None:
        self.close()
        self.at += length
        self._start = self.at

    def close(self) -> None:
        if self._open:
            self.literals.append((self._start, b"".join(self._open)))
        self._open = []
        self._start = self.at


def lay_out(
    pickle: bytes, storages: Sequence[int | bytes], *, archive: str = "archive"
) -> ArchiveLayout:
    """The layout of one torch.save archive.

    ``pickle`` is its ``data.pkl``, ``storages`` are ``data/0``, ``data/1``…, each its number of
    bytes, which makes a slot, or the bytes themselves; ``archive`` is the folder that all its
    records are named under: torch takes the file's name without its ending, and ``archive`` when it
    saves to a stream.
    """
    digest = hashlib.sha256(pickle)
    digest.update(repr(list(storages)).encode())
    serialization_id = b"%040d" % (int.from_bytes(digest.digest(), "big") % 10**40)
    # In torch's order: bytes, or how many come later.
    records: list[tuple[str, int | bytes]] = [
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
        *((f"data/{key}", storage) for key, storage in enumerate(storages)),
        ("version", b"3\n"),
        (".data/serialization_id", serialization_id),
    ]
    canvas, entries, size = _Canvas(), [], 0
    places: list[tuple[int, int, int]] = []  # length and end of each slot, and its entry
    for name, content in records:
        entry, end = _put_record(canvas, f"{archive}/{name}".encode(), content)
        if isinstance(content, int):
            places.append((content, end, size))
        entries.append(entry)
        size += len(entry)
    start = canvas.at
    canvas.put(b"".join(entries))
    _put_end(canvas, start=start, count=len(entries))
    canvas.close()
    slots = []
    for length, end, at in places:
        sums = end + _CRC_IN_DESCRIPTOR, start + at + _CRC_IN_CENTRAL_HEADER
        slots.append(Slot(end - length, length, sums if length else ()))
    return ArchiveLayout(canvas.at, tuple(canvas.literals), tuple(slots))


def _put_record(canvas: _Canvas, name: bytes, content: int | bytes) -> tuple[bytes, int]:
    """Write a record; its entry of the central directory, and the end of its content."""
    length = len(content) if isinstance(content, bytes) else content
    header = canvas.at
    # The sizes are those of the data descriptor; torch leaves the compressed one 0 up here.
    extra = _zip64_extra(uncompressed=length, compressed=0, header=header)
    used = header + _LOCAL_HEADER.size + len(name) + len(extra) + 4
    padding = -used % _ALIGNMENT
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    # torch writes no descriptor behind an empty record.
    flags = _UTF8_NAMES | _SIZES_FOLLOW if length else _UTF8_NAMES
    lengths = len(name), len(extra)
    canvas.put(_LOCAL_HEADER.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, *lengths))
    canvas.put(name + extra)
    if isinstance(content, bytes):
        canvas.put(content)
    else:
        canvas.skip(length)
    crc = crc32(content) if isinstance(content, bytes) else 0
    end = canvas.at
    if length:
        wide = length >= _LIMIT32 or header >= _LIMIT32
        layout = _DESCRIPTOR64 if wide else _DESCRIPTOR
        canvas.put(layout.pack(b"PK\7\10", crc, length, length))
    extra = _zip64_extra(uncompressed=length, compressed=length, header=header)
    sizes = (min(length, _LIMIT32),) * 2
    lengths = len(name), len(extra)
    narrow = min(header, _LIMIT32)
    entry = _CENTRAL_HEADER.pack(
        b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, *sizes, *lengths, 0, 0, 0, 0, narrow
    )
    return entry + name + extra, end


def _zip64_extra(*, uncompressed: int, compressed: int, header: int) -> bytes:
    """The extra field for what does not fit 32 bits: both sizes, the header's offset, nothing."""
    values = [uncompressed, compressed] if uncompressed >= _LIMIT32 else []
    if header >= _LIMIT32:
        values.append(header)
    if not values:
        return b""
    return struct.pack(f"<HH{len(values)}Q", _ZIP64_EXTRA, 8 * len(values), *values)


def _put_end(canvas: _Canvas, *, start: int, count: int) -> None:
    """Write the zip64 end record, its locator and the plain end record."""
    end = canvas.at
    size = end - start
    rest = _END64.size - 12  # what follows the field that holds this number
    canvas.put(
        _END64.pack(b"PK\6\6", rest, _MADE_BY, _ZIP64_VERSION, 0, 0, count, count, size, start)
    )
    canvas.put(_END64_LOCATOR.pack(b"PK\6\7", 0, end, 1))
    few = min(count, _LIMIT16)
    canvas.put(_END.pack(b"PK\5\6", 0, 0, few, few, min(size, _LIMIT32), min(start, _LIMIT32), 0))
