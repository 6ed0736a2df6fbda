"""Where the raw bytes lie inside a torch.save archive: a zip file whose records are all stored.

It reads the end of the archive, its central directory, and the local header of a record that is
asked for. It knows nothing of what a record holds, and it never inflates one.

The layout is PKWARE's APPNOTE 6.3. What torch makes of it: records lie under one top folder, sizes
and CRCs stand only in the central directory, and a CRC of 0 says that none was computed.

The library's `zipfile` was tried in its place: around it stand the same checks (it keeps no count
of records, reads past bytes behind the end, and does not say where a CRC lies), 25 lines fewer in
all. An item of DCP (7 records) took 31 µs, here 15; a directory of 20,000 records 63 ms, here 38.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import NamedTuple

from ckpt_tools.core.crc import crc32
from ckpt_tools.core.index import ByteRange
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.foreign import HEAD, not_a, sniff
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

ReadBytes = Callable[[int, int], bytes]

# A DCP item of a few KB then costs one read, and of a larger one the end record and most central
# directories come with the first.
WINDOW = 64 * 1024
# A directory of a million records takes about 100 MB.
_MAX_DIRECTORY = 512 * 1024 * 1024
_MAX_RECORD_IN_MEMORY = 1 << 30
_BLOCK = 4 << 20

_LOCAL = Struct("<4s22x2H")  # only the fields that are used, here and below
_CENTRAL = Struct("<8x2H4x3L4H2x2L")
_END = Struct("<4xL2H2LH")
_END64 = Struct("<4sQ4x5Q")
_END64_REST = _END64.size - 12  # the length that the record itself gives
_LOCATOR64 = Struct("<8xQL")
_EXTRA = Struct("<2H")
_ZIP64 = 1
_CRC_AT = 16
_UNPLAIN = 0x2061  # flags: encrypted (0x1, 0x40, 0x2000), or a patch (0x20)
_FOLDER = 0x10  # an attribute: torch then gives memory that was never written, and no error
_ABSENT_32 = 0xFFFFFFFF


class Record(NamedTuple):
    """The bytes of one record: absolute ``offset`` in the file, ``length``, and CRC-32 or None."""

    offset: int
    length: int
    crc: int | None


class VaryingRecord(NamedTuple):
    """A record's content from ``start`` to ``end``, and where its CRC-32 stands: first in the
    directory, then, in archives of torch, behind the content. All are relative to the archive.
    """

    name: str
    start: int
    end: int
    sums: tuple[int, ...]


class _DirectoryEntry(NamedTuple):
    """What the central directory says of a record; ``header`` and ``crc_at``, where its CRC
    stands, are relative to the archive.
    """

    name: bytes
    header: int
    length: int
    crc: int
    crc_at: int


class Archive:
    """One torch.save archive of ``length`` bytes: its records by name, without the top folder
    ("data.pkl", "data/0").

    The local header of a record is read only when the record is asked for.
    """

    __slots__ = ("_bytes", "_end", "_entries", "length", "where")

    def __init__(self, source: _Source, entries: dict[str, _DirectoryEntry], *, end: int) -> None:
        self._bytes = source
        self._entries = entries
        self._end = end
        self.length = source.length
        self.where = source.where

    @property
    def names(self) -> Collection[str]:
        """Names of the records, in the order of the archive."""
        return self._entries.keys()

    def read_headers(self, files: Files, path: str) -> None:
        """Have the local headers of all records in memory, as far as they can be read."""
        entries = self._entries.values()
        places = [(one.header, _LOCAL.size + len(one.name)) for one in entries]
        files.fetch((path, self._bytes.offset + start, length) for start, length in places)
        for place in places:
            with suppress(UnreadableError):
                self._bytes.headers[place] = self._bytes.take(*place)

    def record(self, name: str) -> Record:
        """Where the bytes of a record lie.

        Raises UnreadableError when there is no such record or its local header is damaged.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise UnreadableError(
                f"{self.where} has no record {name!r}; it is truncated, or not of torch.save."
            )
        header = self._bytes.take(entry.header, _LOCAL.size + len(entry.name))
        magic, name_length, extra_length = _LOCAL.unpack_from(header)
        same_name = header[_LOCAL.size :] == entry.name and name_length == len(entry.name)
        if magic != b"PK\x03\x04" or not same_name:
            raise UnreadableError(f"{self.where}: the header of record {name!r} is damaged.")
        start = entry.header + _LOCAL.size + name_length + extra_length
        if start + entry.length > self._end:
            raise UnreadableError(
                f"{self.where}: record {name!r} lies outside of the archive "
                f"(bytes {start:,} to {start + entry.length:,} of {self._end:,})."
            )
        absent = entry.crc == 0 and entry.length > 0
        return Record(self._bytes.offset + start, entry.length, None if absent else entry.crc)

    def taken(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end`` of the archive."""
        return self._bytes.take(start, end - start)

    def varying(self, names: Iterable[str]) -> list[VaryingRecord]:
        """Where archives differ that are equal but for the contents of these records, as far as
        they are there. Raises UnreadableError as `record` does.
        """
        found = []
        for name in filter(self._entries.__contains__, names):
            record, entry = self.record(name), self._entries[name]
            end = record.offset - self._bytes.offset + record.length
            sums = [entry.crc_at]
            if end + 8 <= self._end and self._bytes.take(end, 4) == b"PK\x07\x08":
                sums.append(end + 4)
            found.append(VaryingRecord(name, end - record.length, end, tuple(sums)))
        return found

    def read(self, name: str) -> bytes:
        """The bytes of a small record, checked against its CRC. At most 1 GiB.

        Raises UnreadableError as `record` does, and when the CRC says that the bytes are damaged.
        """
        record = self.record(name)
        if record.length > _MAX_RECORD_IN_MEMORY:
            raise UnreadableError(f"{self.where}: record {name!r} is too large: {record.length:,}.")
        data = self._bytes.take(record.offset - self._bytes.offset, record.length)
        self._require_crc(name, record, crc32(data))
        return data

    def digest(self, name: str) -> bytes:
        """The SHA-256 of a record of any size, read in blocks and checked against its CRC.

        Raises UnreadableError as `read` does.
        """
        from hashlib import sha256  # late: it loads OpenSSL

        record = self.record(name)
        start = record.offset - self._bytes.offset
        end = start + record.length
        crc, found = 0, sha256()
        for at in range(start, end, _BLOCK):
            block = self._bytes.take(at, min(_BLOCK, end - at))
            crc = crc32(block, crc)
            found.update(block)
        self._require_crc(name, record, crc)
        return found.digest()

    def _require_crc(self, name: str, record: Record, crc: int) -> None:
        if record.crc is not None and crc != record.crc:
            raise UnreadableError(
                f"{self.where}: record {name!r} is damaged: its CRC-32 is {crc:08x}, "
                f"the archive says {record.crc:08x}."
            )


def archive_in(files: Files, data: ByteRange, where: str) -> Archive:
    """The torch.save archive that fills a byte range, of which every record will be asked for.

    Of a store, both ends and then the headers of all records are asked for together. Raises as
    `read_archive` does.
    """
    path, offset, length = data
    files.fetch(ends_of(data))
    archive = read_archive(partial(files.read, path), offset=offset, length=length, where=where)
    if is_address(path):
        archive.read_headers(files, path)
    return archive


def ends_of(data: ByteRange, edge: int = WINDOW) -> tuple[ByteRange, ByteRange]:
    """The bytes of an archive that are read first: of its first pickle, and its directory."""
    edge = min(data.length, edge)
    return data._replace(length=edge), ByteRange(data.path, data.offset + data.length - edge, edge)


def read_archive(
    read: ReadBytes, *, offset: int, length: int, where: str, window: int = WINDOW
) -> Archive:
    """The torch.save archive that fills bytes [offset, offset + length) of a file.

    ``read(offset, length)`` gives bytes of the file, ``where`` names it in errors. The last bytes,
    as many as the ``window``, are read first: smaller archives cost one read.

    Raises UnreadableError when the bytes are no such archive, or one that is cut or damaged, and
    UnsupportedError when it holds a program, which is no state dict.
    """
    source = _Source(read, offset=offset, length=length, where=where, window=window)
    start, size, count = _directory_place(source)
    if size > _MAX_DIRECTORY:
        raise UnreadableError(f"{where}: its central directory of {size:,} bytes is too large.")
    entries: dict[str, _DirectoryEntry] = {}
    folders: set[bytes] = set()
    directory = source.take(start, size)
    for records, what, way in _PROGRAMS:
        if any(record in directory for record in records):
            raise UnsupportedError(f"{where} is {what}, not a state dict.", hint=way)
    for entry in _directory(directory, where, start=start):
        folder, _, name = entry.name.partition(b"/")
        text = name.decode("utf-8", "backslashreplace")
        if text in entries:
            raise UnreadableError(f"{where}: record {text!r} is there twice.")
        folders.add(folder)
        entries[text] = entry
    if len(entries) != count:
        raise UnreadableError(
            f"{where}: its central directory lists {len(entries):,} records, not {count:,}."
        )
    if len(folders) > 1:
        raise UnreadableError(
            f"{where} is a zip archive, but not one of torch.save: it has more than one top folder."
        )
    return Archive(source, entries, end=start)


# Records that only programs have, what such an archive is, and what to call.
_PROGRAMS = (
    (
        (b"/code/__torch__", b"/constants.pkl"),
        "a TorchScript program",
        "torch.save(torch.jit.load(path).state_dict(), …) makes a state dict of it.",
    ),
    (
        (b"archive_format", b"serialized_exported_program.json"),
        "a program of torch.export (.pt2)",
        "torch.save(torch.export.load(path).state_dict, …) makes a state dict of it.",
    ),
    (
        (b"/.data/extern_modules",),
        "a package of torch.package",
        "Load it with torch.package.PackageImporter, and save the state dict of its model.",
    ),
)


def require_little_endian(archive: Archive) -> None:
    """Raise UnsupportedError when the tensors of the archive are big-endian, and UnreadableError
    for any other word; they are little-endian when it does not say.
    """
    order = archive.read("byteorder")[:16] if "byteorder" in archive.names else b"little"
    if order == b"big":
        raise big_endian(archive.where)
    if order != b"little":
        raise UnreadableError(f"{archive.where}: byte order {order!r} is not known.")


def big_endian(where: str) -> UnsupportedError:
    """The error for a file of big-endian tensors."""
    return UnsupportedError(
        f"{where} was saved on a big-endian machine; its bytes are not swapped here.",
        hint="Load it with torch.load and save it again on a little-endian machine.",
    )


class _Source:
    """The bytes of the archive, of which the last, as many as the ``window``, are ``kept``."""

    __slots__ = ("_from", "_read", "headers", "kept", "length", "offset", "where")

    def __init__(
        self, read: ReadBytes, *, offset: int, length: int, where: str, window: int
    ) -> None:
        self._read = read
        self.headers: dict[tuple[int, int], bytes] = {}
        self.offset = offset
        self.length = length
        self.where = where
        self._from = max(0, length - window)
        self.kept = read(offset + self._from, length - self._from) if length > 0 else b""
        if len(self.kept) != length - self._from:
            self._raise_cut(self._from + len(self.kept), length)

    def take(self, start: int, length: int) -> bytes:
        """``length`` bytes from byte ``start`` of the archive on."""
        if start < 0 or length < 0 or start + length > self.length:
            self._raise_cut(self.length, start + length)
        if start >= self._from:
            return self.kept[start - self._from : start - self._from + length]
        data = self.headers.get((start, length)) or self._read(self.offset + start, length)
        if len(data) != length:
            self._raise_cut(start + len(data), start + length)
        return data

    def refuse(self) -> None:
        """Raise what the bytes are, given that they are no whole zip archive."""
        kind = sniff(self.take(0, min(HEAD, self.length)))
        if kind == "zip":
            raise UnreadableError(
                f"{self.where} is truncated: {self.length:,} bytes, and its end record is missing.",
                hint="Copy the file again, or save the checkpoint again.",
            )
        raise not_a("torch.save archive", self.where, kind)

    def _raise_cut(self, length: int, expected: int) -> None:
        raise UnreadableError(
            f"{self.where} is truncated: {length:,} bytes, the archive needs {expected:,}."
        )


def _directory_place(source: _Source) -> tuple[int, int, int]:
    """Start, size and number of entries of the central directory."""
    tail = source.kept
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        source.refuse()
    disks, here, count, size, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        source.refuse()
    end = source.length - len(tail) + at
    locator = source.take(end - _LOCATOR64.size, _LOCATOR64.size) if end >= _LOCATOR64.size else b""
    if locator.startswith(b"PK\x06\x07"):
        end, total = _LOCATOR64.unpack(locator)
        magic, rest, disks, *counts = _END64.unpack(source.take(end, _END64.size))
        here, count, size, start = counts
        disks = disks or total != 1
        if magic != b"PK\x06\x06" or rest < _END64_REST:
            raise UnreadableError(f"{source.where}: the end record of the archive is damaged.")
    if disks or here != count:
        raise UnreadableError(
            f"{source.where}: its end record says that it is one of several disks, as no archive "
            "of torch.save is; torch does not load it.",
            hint="The end record is damaged: copy the file again.",
        )
    if start + size > end:
        raise UnreadableError(
            f"{source.where} is damaged: its central directory (bytes {start:,} to "
            f"{start + size:,}) runs over its end record at {end:,}."
        )
    return start, size, count


def _directory(data: bytes, where: str, *, start: int) -> Iterator[_DirectoryEntry]:
    """The entries of a central directory, which begins at byte ``start`` of the archive."""
    at = 0
    while at < len(data):
        if len(data) - at < _CENTRAL.size or not data.startswith(b"PK\x01\x02", at):
            raise UnreadableError(f"{where}: its central directory is damaged at byte {at:,}.")
        fields = _CENTRAL.unpack_from(data, at)
        flags, method, crc, packed, length, name_length, extra_length, comment = fields[:8]
        disk, attributes, header = fields[8:]
        name_at, crc_at = at + _CENTRAL.size, start + at + _CRC_AT
        extra_at = name_at + name_length
        at = extra_at + extra_length + comment
        if at > len(data):
            raise UnreadableError(f"{where}: its central directory is truncated.")
        name = data[name_at:extra_at]
        if _ABSENT_32 in (packed, length, header):
            extra = data[extra_at:at]
            length, packed, header = _wide_fields(extra, (length, packed, header), where)
        if disk or (length and attributes & _FOLDER):
            shown = name.decode("utf-8", "backslashreplace")
            raise UnreadableError(
                f"{where}: its central directory says of record {shown!r} that it is "
                f"{'on another disk' if disk else 'a folder'}, so torch does not read it.",
                hint="The directory is damaged: copy the file again.",
            )
        if method or packed != length or flags & _UNPLAIN:
            shown = name.decode("utf-8", "backslashreplace")
            raise UnreadableError(
                f"{where}: record {shown!r} is compressed or encrypted, which torch.save never "
                "does.",
                hint="The file was packed again by another program; unpack it and take the "
                "original.",
            )
        yield _DirectoryEntry(name, header, length, crc, crc_at)


def _wide_fields(extra: bytes, narrow: tuple[int, int, int], where: str) -> list[int]:
    """The 64-bit values of those fields that are too narrow, from the zip64 extra field."""
    at, tag, size = 0, 0, 0
    while tag != _ZIP64 and at + _EXTRA.size <= len(extra):
        tag, size = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size + size
    wide = extra[at - size : at] if tag == _ZIP64 else b""
    values = list(narrow)
    for index, value in enumerate(narrow):
        if value == _ABSENT_32:
            if len(wide) < 8:
                raise UnreadableError(
                    f"{where}: a zip64 field of its central directory is missing."
                )
            values[index], wide = int.from_bytes(wide[:8], "little"), wide[8:]
    return values
