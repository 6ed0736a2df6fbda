"""The CRC-32 that torch.save archives keep of each record, as `verify` asks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from ckpt_tools.core.index import ByteRange, CheckpointIndex
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.protocol import (
    PART_BYTES,
    Checksummed,
    ChecksumPart,
    cut,
    lengths_of,
    plain_parts,
)
from ckpt_tools.formats.zip.read import Archive, read_archive, sniff
from ckpt_tools.storage.reader import Files

# An archive this small is read in one go, and its records are checked in memory.
_SMALL = 2 << 20
# Of a larger one this much at each end: read_archive wants the last 64 KiB.
_EDGE = 64 << 10
_PART_BYTES = PART_BYTES


def parts_of_files(index: CheckpointIndex, files: Files) -> Iterator[ChecksumPart]:
    """The archives of a checkpoint; a file of torch.save's old format has no checksums."""
    for path, length in lengths_of(index).items():
        if sniff(files.read(path, 0, min(512, length))) == "zip":
            yield from parts_of_archive(ByteRange(path, 0, length), files)
        else:
            yield from plain_parts(path, length)


def parts_of_archive(data: ByteRange, files: Files) -> Iterator[ChecksumPart]:
    """An archive as one part; a large one in parts of about 64 MiB, when it can be opened."""
    if data.length <= _PART_BYTES:
        yield ChecksumPart(data, data.length, partial(records, files, data))
        return
    groups: list[list[str]] = [[]]
    left = _PART_BYTES
    try:
        archive = _Edges(files, data).archive()
        named = [(name, archive.record(name)) for name in archive.names]
    except CheckpointError:
        yield ChecksumPart(data, data.length, partial(records, files, data))
        return
    for name, (offset, length, crc) in named:
        record = ByteRange(data.path, offset, length)
        if crc is not None and length > _PART_BYTES:
            for part in cut(record, _PART_BYTES):
                one = Checksummed(part, crc, f"record {name!r}", record=record)
                yield ChecksumPart(part, part.length, partial(iter, (one,)))
            continue
        if left <= 0:
            groups.append([])
            left = _PART_BYTES
        groups[-1].append(name)
        left -= length
    for group in groups:
        if group:
            yield ChecksumPart(data, _PART_BYTES, partial(records, files, data, only=group))


def records(
    files: Files,
    data: ByteRange,
    *,
    stored: ByteRange | None = None,
    only: Collection[str] | None = None,
) -> Iterator[Checksummed]:
    """The records of the archive that fills ``data``, all or ``only`` some.

    Raises UnreadableError where the archive, or the header of a record, is damaged.
    """
    edges = _Edges(files, data)
    archive = edges.archive()
    for name in only or archive.names:
        offset, length, crc = archive.record(name)
        record = ByteRange(data.path, offset, length)
        yield Checksummed(record, crc, f"record {name!r}", edges.kept(offset, length), stored)


class _Edges:
    """The first and the last bytes of an archive, or all of a small one, each in one read.

    The headers and the small records lie there. Read one by one they are ten reads an item of
    DCP, and with 16 threads the turns at the interpreter's lock take longer than the bytes.
    """

    def __init__(self, files: Files, data: ByteRange) -> None:
        path, offset, length = data
        edge = length if length <= _SMALL else _EDGE
        self._files, self._data = files, data
        self._parts = [(offset, memoryview(files.read(path, offset, edge)))]
        if edge < length:
            tail = offset + length - edge
            self._parts.append((tail, memoryview(files.read(path, tail, edge))))

    def archive(self) -> Archive:
        """The archive. Raises UnreadableError when it is cut or damaged."""
        path, offset, length = self._data
        return read_archive(self._read, offset=offset, length=length, where=path)

    def kept(self, offset: int, length: int) -> memoryview | None:
        """These bytes of the file, if they were read already."""
        for start, part in self._parts:
            if start <= offset and offset + length <= start + len(part):
                return part[offset - start : offset - start + length]
        return None

    def _read(self, offset: int, length: int) -> bytes:
        kept = self.kept(offset, length)
        return self._files.read(self._data.path, offset, length) if kept is None else bytes(kept)
