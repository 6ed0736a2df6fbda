"""The CRC-32 that torch.save archives keep of each record, as `verify` asks for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from ckpt_tools.core.index import ByteRange, CheckpointIndex
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.protocol import (
    PART_BYTES,
    Checksummed,
    Part,
    cut,
    lengths_of,
    plain_parts,
)
from ckpt_tools.formats.zip.read import Archive, read_archive, sniff
from ckpt_tools.storage.reader import Files

# An archive this small is read in one go, and its records are checked in memory.
_SMALL = 2 << 20
_PART_BYTES = PART_BYTES


def parts_of_files(index: CheckpointIndex, files: Files) -> Iterator[Part]:
    """The archives of a checkpoint; a file of torch.save's old format has no checksums."""
    for path, length in lengths_of(index).items():
        if sniff(files.read(path, 0, min(512, length))) == "zip":
            yield from parts_of_archive(ByteRange(path, 0, length), files)
        else:
            yield from plain_parts(path, length)


def parts_of_archive(data: ByteRange, files: Files) -> Iterator[Part]:
    """An archive as one part; a large one in parts of about 64 MiB, when it can be opened."""
    if data.length <= _PART_BYTES:
        yield Part(data, data.length, partial(records, files, data))
        return
    groups: list[list[str]] = [[]]
    left = _PART_BYTES
    try:
        archive, _ = _opened(files, data)
        found = [(name, archive.record(name)) for name in archive.names]
    except CheckpointError:
        yield Part(data, data.length, partial(records, files, data))
        return
    for name, (offset, length, crc) in found:
        record = ByteRange(data.path, offset, length)
        if crc is not None and length > _PART_BYTES:
            for part in cut(record, _PART_BYTES):
                one = Checksummed(part, crc, f"record {name!r}", record=record)
                yield Part(part, part.length, partial(iter, (one,)))
            continue
        if left <= 0:
            groups.append([])
            left = _PART_BYTES
        groups[-1].append(name)
        left -= length
    for group in groups:
        if group:
            yield Part(data, _PART_BYTES, partial(records, files, data, only=group))


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
    archive, kept = _opened(files, data)
    for name in only or archive.names:
        offset, length, crc = archive.record(name)
        start = offset - data.offset
        yield Checksummed(
            ByteRange(data.path, offset, length),
            crc,
            f"record {name!r}",
            kept[start : start + length] if kept else None,
            stored,
        )


def _opened(files: Files, data: ByteRange) -> tuple[Archive, memoryview]:
    """The archive, and its bytes when it is small."""
    kept = memoryview(files.read(*data) if data.length <= _SMALL else b"")

    def read(offset: int, length: int) -> bytes:
        if not kept:
            return files.read(data.path, offset, length)
        return bytes(kept[offset - data.offset : offset - data.offset + length])

    return read_archive(read, offset=data.offset, length=data.length, where=data.path), kept
